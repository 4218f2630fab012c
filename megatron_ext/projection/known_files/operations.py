"""What the known tools do to a projection that is there already. Vs rows, K slots a row."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from megatron_ext.projection.building.builder import identity
from megatron_ext.projection.entries import check_top_k
from megatron_ext.projection.history import with_step
from megatron_ext.projection.known_files.filler import find_filler
from megatron_ext.projection.known_files.loose_entries import LooseEntries, Mask, sorted_entries
from megatron_ext.projection.known_files.tokenizer_pair import TokenizerPair
from megatron_ext.projection.projection_matrix import ProjectionMatrix


@dataclass(kw_only=True, frozen=True, slots=True, eq=False)
class Cut:
    """A projection of fewer slots, and what was left out."""

    projection: ProjectionMatrix

    cut_mass: float
    """Mass of entries that had no slot left, in rows."""

    filler_rows: int
    """Rows whose filler was left out."""

    filler_mass: float
    """Mass of these fillers, in rows."""


def sort_and_cut(entries: LooseEntries, top_k: int, *, preserve_last: bool = False) -> Cut:
    """The ``top_k`` largest entries of each row, repeated columns added up, rows summing to 1.

    A filler column is left out (see ``find_filler``).

    Args:
        entries: What a file holds.
        top_k: Most entries of a row.
        preserve_last: Keep the last slot of each row whatever it holds, a filler too, in the place
            of the smallest entry.

    Raises:
        ProjectionError: ``top_k`` is below 1.
    """
    check_top_k(top_k)
    filler = None if preserve_last else find_filler(entries)
    is_filler = np.zeros(entries.entry_count, dtype=np.bool_) if filler is None else filler.mask
    is_last = entries.slots == entries.slot_count - 1 if preserve_last else None
    merged = entries.kept(~is_filler).merged()
    kept = merged.slots < top_k
    if is_last is not None:
        kept = _with_last(merged, np.isin(merged.keys, entries.keys[is_last]), top_k)
    shape = (entries.height, width_of(entries))
    metadata = with_step(entries.metadata, "sort_and_cut", top_k=top_k, preserve_last=preserve_last)
    metadata.pop("enable_scale_trick", None)
    return Cut(
        projection=merged.kept(kept).projection(
            shape,
            vocab_sizes=entries.vocab_sizes,
            is_exact_row=_still_exact(entries, merged),
            metadata=metadata,
        ),
        cut_mass=float(merged.shares[~kept].sum()),
        filler_rows=len(np.unique(entries.rows[is_filler])),
        filler_mass=float(entries.shares[is_filler].sum()),
    )


def reapply_exact_map(entries: LooseEntries, pair: TokenizerPair) -> ProjectionMatrix:
    """``entries`` with every token that both vocabularies have mapped to itself alone.

    Raises:
        ProjectionError: Entries behind one of the vocabularies.
    """
    exact = pair.retokenized.is_exact_row
    own = LooseEntries.of(pair.retokenized)
    own = own.kept(exact[own.rows])
    height = max(entries.height, pair.shape[0])
    is_exact_row = np.zeros(height, dtype=np.bool_)
    is_exact_row[: pair.shape[0]] = exact
    other = entries.kept(~is_exact_row[entries.rows])
    together = sorted_entries(
        np.concatenate((other.rows, own.rows)),
        np.concatenate((other.columns, own.columns)),
        np.concatenate((other.weights, own.weights)),
        like=replace(other, height=height, width=None),
    )
    return together.projection(
        (height, max(pair.shape[1], entries.width or 0)),
        vocab_sizes=pair.shape,
        is_exact_row=is_exact_row,
        metadata={
            **with_step(entries.metadata, "reapply_exact_map"),
            **identity(pair.student, pair.teacher),
        },
    )


def width_of(entries: LooseEntries) -> int:
    """Vt of the entries: what the file says, else one past the largest column."""
    return entries.width or int(entries.columns.max(initial=0)) + 1


def _with_last(merged: LooseEntries, is_last: Mask, top_k: int) -> Mask:
    """[n] the last slots, and as many of the largest others as there is room for."""
    others_before = merged.slots - _before(merged, is_last)
    room = top_k - np.bincount(merged.rows[is_last], minlength=merged.height)
    kept: Mask = is_last | (others_before < room[merged.rows])
    return kept


def _before(merged: LooseEntries, is_last: Mask) -> NDArray[np.int64]:
    """[n] last slots of the same row that come before each entry."""
    running: NDArray[np.int64] = np.cumsum(is_last) - is_last
    starts = np.searchsorted(merged.rows, merged.rows)
    return running - running[starts]


def _still_exact(entries: LooseEntries, merged: LooseEntries) -> Mask:
    """[Vs] rows that were exact; one that has lost a filler is not."""
    was = entries.row_sizes == 1 if entries.is_exact_row is None else entries.is_exact_row
    still: Mask = was & (merged.row_sizes == 1)
    return still
