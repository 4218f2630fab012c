"""Rows of chunks: of one token a side, and chains of predictions for several.

S steps, H chains, E completions.
"""

from __future__ import annotations

from typing import NamedTuple

import torch


class SingleRows(NamedTuple):
    """Rows that predict the chunks of one token a side. C chunks."""

    student: torch.Tensor
    """int64 [C], each once."""

    teacher: torch.Tensor
    """int64 [C]"""


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
