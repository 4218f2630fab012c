"""Mending the projection in a file. Vs rows, Vt columns, n entries."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from megatron_ext.projection.building.builder import identity
from megatron_ext.projection.history import with_step
from megatron_ext.projection.known_files.defect import Defect
from megatron_ext.projection.known_files.diagnosis import diagnose
from megatron_ext.projection.known_files.loose_entries import LooseEntries, Mask, sorted_entries
from megatron_ext.projection.known_files.tokenizer_pair import TokenizerPair
from megatron_ext.projection.sparse_projection import SparseProjection

OffSupport = Literal["drop", "keep"]


@dataclass(kw_only=True, frozen=True, slots=True, eq=False)
class Repair:
    """A mended projection and what was done."""

    projection: SparseProjection

    defects: list[Defect]
    """What was found, in the order in which it was mended."""

    moved: NDArray[np.float64]
    """[Vs] share of each row that lies elsewhere now; 1 for a row that was empty and is not."""

    restored_rows: NDArray[np.int64]
    """Rows with pieces from the tokenizers that the file had lost."""

    def as_row(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "defects": [defect.as_row() for defect in self.defects],
            "changed_rows": int(np.count_nonzero(self.moved > 0)),
            "moved_mass": float(self.moved.sum()),
            "restored_rows": len(self.restored_rows),
        }


def repair(
    entries: LooseEntries,
    pair: TokenizerPair | None = None,
    *,
    off_support: OffSupport = "drop",
) -> Repair:
    """A projection from ``entries`` without their defects.

    Entries in the padding, on filler columns and off support are dropped, repeated columns added
    up, and rows made to sum to 1. With tokenizers, a token that both have is mapped to itself
    alone again. In a row that lost something, the share of its pieces is spread over all that the
    teacher spells the token with, as a new projection has them; what else the row held stays. A row
    that is left without any takes the spelling as a whole.

    Args:
        entries: What the file holds.
        pair: The tokenizers it is for; without them nothing is restored.
        off_support: Whether to drop entries of tokens that share no bytes with the row's. Keep them
            in a projection that was built from embeddings.
    """
    defects = diagnose(entries, pair)
    if off_support == "keep":
        defects = [defect for defect in defects if defect.kind != "off_support"]
    dropped = _dropped(entries, defects)
    sound = entries.kept(~dropped)
    restored: NDArray[np.int64] = np.zeros(0, dtype=np.int64)
    if pair is not None:
        restored = _rows_to_restore(entries, dropped, defects)
        sound = _with_pieces(entries, sound, restored, pair)
        sound = _with_exact_rows(sound, defects, pair)
    sound = _cut(sound.merged(), entries.slot_count)
    projection = _projection(entries, sound, dropped, pair)
    return Repair(
        projection=projection,
        defects=defects,
        moved=_moved(entries, projection, defects),
        restored_rows=restored,
    )


def _dropped(entries: LooseEntries, defects: list[Defect]) -> Mask:
    dropped = np.zeros(entries.entry_count, dtype=np.bool_)
    for defect in defects:
        if defect.entries is not None and defect.kind != "duplicate_columns":
            dropped |= defect.entries
    return dropped


def _rows_to_restore(
    entries: LooseEntries, dropped: Mask, defects: list[Defect]
) -> NDArray[np.int64]:
    """Rows that lost an entry, or have none though they should."""
    empty = [d.rows for d in defects if d.kind in ("lost_rows", "missing_rows")]
    padding = [d.rows for d in defects if d.kind == "padding_rows"]
    harmed = np.unique(np.concatenate([entries.rows[dropped], *empty]))
    return np.setdiff1d(harmed, np.concatenate(padding)) if padding else harmed


def _with_pieces(
    entries: LooseEntries, sound: LooseEntries, rows: NDArray[np.int64], pair: TokenizerPair
) -> LooseEntries:
    """``sound`` with the pieces of ``rows`` as the tokenizers say."""
    height = max(entries.height, pair.shape[0])
    own = LooseEntries.of(pair.retokenized)
    own = own.kept(np.isin(own.rows, rows))
    weights = sound.weights / entries.row_sums[sound.rows]
    is_piece = np.isin(sound.rows, rows) & np.isin(
        sound.rows * pair.shape[1] + sound.columns, own.rows * pair.shape[1] + own.columns
    )
    left = np.bincount(sound.rows, weights, height)
    pieces = np.bincount(sound.rows[is_piece], weights[is_piece], height)
    share = np.where(pieces > 0, pieces, np.maximum(1 - left, 0))
    # A row of pieces alone is the spelling, bit for bit.
    share[np.bincount(sound.rows[~is_piece], minlength=height) == 0] = 1
    return sorted_entries(
        np.concatenate((sound.rows[~is_piece], own.rows)),
        np.concatenate((sound.columns[~is_piece], own.columns)),
        np.concatenate((weights[~is_piece], own.weights * share[own.rows])),
        like=replace(sound, height=height, width=None),
    )


def _with_exact_rows(
    sound: LooseEntries, defects: list[Defect], pair: TokenizerPair
) -> LooseEntries:
    rows = np.concatenate(
        [np.zeros(0, np.int64), *(d.rows for d in defects if d.kind == "lost_exact_rows")]
    )
    own = LooseEntries.of(pair.retokenized)
    own = own.kept(np.isin(own.rows, rows))
    other = sound.kept(~np.isin(sound.rows, rows))
    return sorted_entries(
        np.concatenate((other.rows, own.rows)),
        np.concatenate((other.columns, own.columns)),
        np.concatenate((other.weights, own.weights)),
        like=other,
    )


def _cut(entries: LooseEntries, slot_count: int) -> LooseEntries:
    """The largest entries of each row, as many as the file had slots."""
    return entries.kept(entries.slots < slot_count) if slot_count else entries


def _projection(
    entries: LooseEntries, sound: LooseEntries, dropped: Mask, pair: TokenizerPair | None
) -> SparseProjection:
    metadata = with_step(entries.metadata, "repair")
    metadata.pop("enable_scale_trick", None)
    if pair is None:
        width = entries.width or int(entries.columns.max(initial=-1)) + 1
        return sound.projection(
            (entries.height, width),
            vocab_sizes=entries.vocab_sizes,
            is_exact_row=_unharmed_one_hot_rows(entries, sound, dropped),
            metadata=metadata,
        )
    shape = (max(entries.height, pair.shape[0]), max(entries.width or 0, pair.shape[1]))
    exact = np.zeros(shape[0], dtype=np.bool_)
    exact[sound.rows[pair.is_same_token(sound)]] = True
    exact[: pair.shape[0]] &= pair.retokenized.is_exact_row
    exact &= np.bincount(sound.rows, minlength=shape[0]) == 1
    return sound.projection(
        shape,
        vocab_sizes=pair.shape,
        is_exact_row=exact,
        metadata={**metadata, **identity(pair.student, pair.teacher)},
    )


def _unharmed_one_hot_rows(entries: LooseEntries, sound: LooseEntries, dropped: Mask) -> Mask:
    before = entries.row_sizes == 1 if entries.is_exact_row is None else entries.is_exact_row
    exact: Mask = before & (sound.row_sizes == 1)
    exact[entries.rows[dropped]] = False
    return exact


def _moved(
    entries: LooseEntries, projection: SparseProjection, defects: list[Defect]
) -> NDArray[np.float64]:
    """[Vs] half the absolute difference of a row before and after, as shares of 1.

    It is 0 in rows without a defect, where only the rounding of the file is gone.
    """
    after = LooseEntries.of(projection)
    stop = max(int(entries.columns.max(initial=0)) + 1, projection.shape[1])
    keys, place = np.unique(
        np.concatenate((entries.rows * stop + entries.columns, after.rows * stop + after.columns)),
        return_inverse=True,
    )
    signed = np.bincount(place, np.concatenate((entries.shares, -after.weights)), len(keys))
    height = max(entries.height, projection.shape[0])
    moved: NDArray[np.float64] = np.bincount(keys // stop, np.abs(signed), height) / 2
    moved[(np.bincount(entries.rows, minlength=height) == 0) & (moved > 0)] = 1
    sound = np.ones(height, dtype=np.bool_)
    for defect in defects:
        sound[defect.rows] = False
    moved[sound] = 0
    return moved
