"""The largest columns of each row, ties in the order of columns. C rows, V columns."""

from __future__ import annotations

from typing import Final, NamedTuple

import torch

_COLUMN_BITS: Final = 32


class Largest(NamedTuple):
    """Candidates of this rank for the largest places, at least as many as are compared."""

    values: torch.Tensor
    """[C, K] in any order in which equal ones are in that of their columns; -1: no candidate."""

    columns: torch.Tensor
    """[C, K], any integer type."""

    rest: torch.Tensor
    """[C, 1] this rank's mass outside of them; exactly 0 where there is nothing outside."""


def select_largest(values: torch.Tensor, count: int, excluded: torch.Tensor | None) -> Largest:
    """``largest_columns`` with the sum of the others."""
    chosen, columns = largest_columns(values, count, excluded)
    rest = values.scatter(-1, columns, 0.0)
    if excluded is not None:
        rest.masked_fill_(excluded, 0.0)
    return Largest(chosen, columns, rest.sum(dim=-1, keepdim=True))


def largest_columns(
    values: torch.Tensor, count: int, excluded: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The ``count`` largest of each row, descending, with their columns int64: [C, count] each.

    Args:
        values: [C, V], not negative.
        count: At most V.
        excluded: bool [V], columns that come last, with the value -1.

    Deterministic, on a GPU as well: fp32 values of fewer than all columns are chosen by a key that
    holds value and column; others by a stable sort.
    """
    if excluded is not None:
        values = values.masked_fill(excluded, -1.0)
    if values.dtype != torch.float32 or count == values.shape[1]:
        ordered, columns = values.sort(dim=-1, descending=True, stable=True)
        return ordered[:, :count], columns[:, :count]
    backwards = torch.arange(values.shape[1] - 1, -1, -1, device=values.device)
    bits = values.contiguous().view(torch.int32).to(torch.int64)
    keys = bits.bitwise_left_shift_(_COLUMN_BITS).bitwise_or_(backwards)
    chosen = keys.topk(count, dim=-1).values
    columns = values.shape[1] - 1 - chosen.bitwise_and_((1 << _COLUMN_BITS) - 1)
    return values.gather(-1, columns), columns
