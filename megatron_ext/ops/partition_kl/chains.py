"""Chunks of several tokens as chains of predictions. S steps, H chains, E completions, R rows."""

from __future__ import annotations

from typing import NamedTuple

import torch


class ChainRows(NamedTuple):
    """One model's rows of all chains: an observed prefix, step by step, and a last prediction.

    No row comes twice.
    """

    step_row: torch.Tensor
    """int64 [S]: row of the logits that predicts a token of an observed prefix."""

    step_label: torch.Tensor
    """int64 [S]: that token."""

    step_chain: torch.Tensor
    """int64 [S]: the chain it belongs to."""

    step_place: torch.Tensor
    """int64 [S]: how many tokens of its chain come before it."""

    last_row: torch.Tensor
    """int64 [H]: row that predicts the token behind the prefix."""

    completion: torch.Tensor
    """int64 [E]: tokens that may stand there, each once in a chain; negative for none."""


class Chains(NamedTuple):
    """Both models' rows of the same chunks; completion ``e`` is the same text on both sides."""

    student: ChainRows
    teacher: ChainRows

    completion_chain: torch.Tensor
    """int64 [E] ascending: the chain of each completion."""

    completion_pointers: tuple[int, ...]
    """[H + 1] where the completions of each chain start, on the host."""

    longest: int
    """Most steps of a chain on either side, on the host."""

    @property
    def chain_count(self) -> int:
        """H."""
        return len(self.completion_pointers) - 1


class ChosenColumns(NamedTuple):
    """Some columns of some rows of a [T, V] tensor."""

    row: torch.Tensor
    """int64 [R]: rows of the logits."""

    column: torch.Tensor
    """int64 [N]: chosen columns over all shards, those of a row together; negative for none."""

    place: torch.Tensor
    """int64 [N] ascending: which of the R rows each belongs to."""

    pointers: tuple[int, ...]
    """[R + 1] where the columns of each row start, on the host."""


def chosen_columns(rows: ChainRows, chains: Chains) -> ChosenColumns:
    """The label of every step and the completions of every last row, S + H rows in this order."""
    steps = len(rows.step_row)
    device = rows.step_row.device
    return ChosenColumns(
        row=torch.cat([rows.step_row, rows.last_row]),
        column=torch.cat([rows.step_label, rows.completion]),
        place=torch.cat([torch.arange(steps, device=device), chains.completion_chain + steps]),
        pointers=(
            *range(steps),
            *(steps + pointer for pointer in chains.completion_pointers),
        ),
    )
