"""The column that a projection gives mass to for nothing. Vs rows, K slots a row.

The original builder overwrites the last slot of every row by 0.2 and normalises the row (its "scale
trick"). In a row of fewer than K pieces that slot names no piece but any column whatever, and
cutting the table keeps the slot beside a copy of it. About 29 % of the mass of a row goes there.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megatron_ext.projection.nemo.loose_entries import LooseEntries, Mask

_SORTED_SHARE = 0.99
"""Of the rows of a table that somebody sorted, with room for a few mended by hand."""
_LEAST_ROWS = 0.5
"""Of the rows that are not exact, for a filler to be the work of a builder."""
_LEAST_COLUMN_ROWS = 0.1
_LEAST_SHARE = 0.12
"""Above what a second piece has (1/11), below what the overwritten slot has (1/6)."""
_NEAR = 0.05
_LEAST_INEXACT = 8


@dataclass(kw_only=True, frozen=True, slots=True, eq=False)
class Filler:
    """Entries that stand for nothing."""

    mask: Mask
    """[n] of the entries they were found in."""

    columns: NDArray[np.int64]
    """Their columns, the most frequent first."""

    counts: NDArray[np.int64]
    """Rows that each of the columns fills."""


def find_filler(entries: LooseEntries) -> Filler | None:
    """The filler of a file, or None.

    Where the file is a table, it is told from the order: rows fall up to the last slot and rise
    there. Elsewhere it is a column of many rows that always has the same share and never leads.
    """
    mask = _overwritten_slots(entries)
    if mask is None:
        mask = _constant_columns(entries)
    if mask is None:
        return None
    pairs = np.unique(np.stack((entries.columns[mask], entries.rows[mask])), axis=1)
    columns, counts = np.unique(pairs[0], return_counts=True)
    order = np.lexsort((columns, -counts))
    return Filler(mask=mask, columns=columns[order], counts=counts[order])


def _overwritten_slots(entries: LooseEntries) -> Mask | None:
    """[n] entries with the column of their row's last slot, where that slot is a filler."""
    last = entries.slot_count - 1
    if last < 1:
        return None
    table = np.zeros((entries.height, entries.slot_count))
    table[entries.rows, entries.slots] = entries.weights
    falls = (np.diff(table[:, :last], axis=1) <= 0).all(axis=1)
    rises_last = table[:, last] > table[:, last - 1]
    inexact = np.count_nonzero(~_is_one_hot(entries) | rises_last)
    recognised = falls.mean() >= _SORTED_SHARE and rises_last.sum() >= max(1, _LEAST_ROWS * inexact)
    if not recognised:
        return None
    column = np.full(entries.height, -1)
    is_last = entries.slots == last
    column[entries.rows[is_last]] = entries.columns[is_last]
    mask: Mask = entries.columns == column[entries.rows]
    return mask


def _constant_columns(entries: LooseEntries) -> Mask | None:
    """[n] entries of columns that many rows share in the same measure and none leads with."""
    merged = entries.merged()
    is_inexact = merged.row_sizes > 1
    inexact = int(is_inexact.sum())
    if inexact < _LEAST_INEXACT:
        return None
    is_led = is_inexact[merged.rows] & (merged.slots == 0)
    is_candidate = is_inexact[merged.rows] & (merged.slots > 0)
    columns, shares = merged.columns[is_candidate], merged.shares[is_candidate]
    counts = np.bincount(columns, minlength=1)
    leads = np.bincount(merged.columns[is_led], minlength=len(counts))[: len(counts)]
    often = (counts >= _LEAST_COLUMN_ROWS * inexact) & (leads <= _NEAR * counts)
    fillers = [c for c in np.flatnonzero(often).tolist() if _is_constant(shares[columns == c])]
    is_filled = is_candidate & np.isin(merged.columns, fillers)
    if len(np.unique(merged.rows[is_filled])) < _LEAST_ROWS * inexact:
        return None
    mask: Mask = np.isin(entries.keys, merged.keys[is_filled])
    return mask


def _is_constant(shares: NDArray[np.float64]) -> bool:
    middle = float(np.median(shares))
    near = np.abs(shares - middle) <= _NEAR * middle
    return middle >= _LEAST_SHARE and bool(near.mean() >= 0.5)


def _is_one_hot(entries: LooseEntries) -> Mask:
    """[Vs] rows with all their mass in one entry."""
    one_hot: Mask = entries.row_sizes == 1
    return one_hot
