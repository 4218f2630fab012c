"""Operations of NeMo RL's tools: the multi-token map, exact rows, sorting and cutting.

Vs rows, K slots a row.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from megatron_ext.errors import ProjectionError
from megatron_ext.projection.builder import build_matrix, identity
from megatron_ext.projection.compressed_rows import check_top_k, with_step
from megatron_ext.projection.nemo.loose_entries import LooseEntries, Mask, sorted_entries
from megatron_ext.projection.nemo.tokenizer_pair import TokenizerPair, find_filler
from megatron_ext.projection.projection_matrix import ProjectionMatrix
from megatron_ext.projection.speller import ProjectionOptions


@dataclass(kw_only=True, frozen=True, slots=True, eq=False)
class Cut:
    """A projection of fewer slots, and the mass that was left out."""

    projection: ProjectionMatrix

    cut_mass: float
    """Mass of entries without a slot, in rows."""

    filler_rows: int
    """Number of rows whose filler was left out."""

    filler_mass: float
    """Mass of these fillers, in rows."""


def sort_and_cut(entries: LooseEntries, top_k: int, *, preserve_last: bool = False) -> Cut:
    """Keep the ``top_k`` largest entries of each row, repeated columns added up, rows normalised.

    A filler column is left out (see ``find_filler``).

    Args:
        entries: Entries of a file.
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
    is_kept = merged.slots < top_k
    if is_last is not None:
        is_kept = _with_last(merged, np.isin(merged.keys, entries.keys[is_last]), top_k)
    shape = (entries.height, entries.least_width)
    metadata = with_step(entries.metadata, "sort_and_cut", top_k=top_k, preserve_last=preserve_last)
    metadata.pop("enable_scale_trick", None)
    return Cut(
        projection=merged.kept(is_kept).projection(
            shape,
            vocab_sizes=entries.vocab_sizes,
            is_exact_row=_still_exact(entries, merged),
            metadata=metadata,
        ),
        cut_mass=float(merged.shares[~is_kept].sum()),
        filler_rows=len(np.unique(entries.rows[is_filler])),
        filler_mass=float(entries.shares[is_filler].sum()),
    )


def reapply_exact_map(entries: LooseEntries, pair: TokenizerPair) -> ProjectionMatrix:
    """Map every common token of ``entries`` to itself alone.

    Raises:
        ProjectionError: Entries beyond one of the vocabularies.
    """
    exact = pair.retokenized.is_exact_row
    exact_entries = LooseEntries.of(pair.retokenized)
    exact_entries = exact_entries.kept(exact[exact_entries.rows])
    height = max(entries.height, pair.shape[0])
    is_exact_row = np.zeros(height, dtype=np.bool_)
    is_exact_row[: pair.shape[0]] = exact
    other = entries.kept(~is_exact_row[entries.rows])
    together = sorted_entries(
        np.concatenate((other.rows, exact_entries.rows)),
        np.concatenate((other.columns, exact_entries.columns)),
        np.concatenate((other.weights, exact_entries.weights)),
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


def _with_last(merged: LooseEntries, is_last: Mask, top_k: int) -> Mask:
    """Mask [n] of the last slots and of as many of the largest others as fit."""
    others_before = merged.slots - _before(merged, is_last)
    room = top_k - np.bincount(merged.rows[is_last], minlength=merged.height)
    is_kept: Mask = is_last | (others_before < room[merged.rows])
    return is_kept


def _before(merged: LooseEntries, is_last: Mask) -> NDArray[np.int64]:
    """Number [n] of last slots of the same row before each entry."""
    running: NDArray[np.int64] = np.cumsum(is_last) - is_last
    starts = np.searchsorted(merged.rows, merged.rows)
    return running - running[starts]


def _still_exact(entries: LooseEntries, merged: LooseEntries) -> Mask:
    """Mask [Vs] of rows that were exact and have lost no filler."""
    was = entries.row_sizes == 1 if entries.is_exact_row is None else entries.is_exact_row
    still: Mask = was & (merged.row_sizes == 1)
    return still


@dataclass(kw_only=True, frozen=True, slots=True)
class MultitokenOptions:
    """Options of the tool; names and defaults are those of its flags."""

    reverse_pass: bool = True
    """Also spell the teacher's tokens with the student's."""

    special_token_mapping: bool = True
    """Relate control tokens without a match by the similarity of their names."""

    tokens_to_cut: int = 4
    """Most pieces of a spelling."""

    top_k: int = 32
    """Most entries of a row."""

    special_token_similarity_threshold: float = 0.3
    """Least similarity of two names."""

    special_token_top_k: int | None = None
    """Most entries of a control token; ``top_k`` where None."""

    def __post_init__(self) -> None:
        if self.special_token_top_k is not None and self.special_token_top_k < 1:
            raise ProjectionError(
                "no entry of a control token counts",
                got=self.special_token_top_k,
                expected="at least 1",
                where="special_token_top_k",
            )


def multitoken_projection(
    pair: TokenizerPair, options: MultitokenOptions, initial: LooseEntries | None = None
) -> ProjectionMatrix:
    """Build exact rows, spellings of the others, and the entries that an initial map adds to these.

    Args:
        pair: The tokenizers.
        options: Options of the tool.
        initial: Entries whose weights are added to the shares of rows that are not exact.

    Raises:
        ProjectionError: An invalid number, or an initial map of other vocabularies.
    """
    similarity = options.special_token_similarity_threshold
    built = build_matrix(
        pair.student,
        pair.teacher,
        ProjectionOptions(
            top_k=options.top_k,
            pieces=options.tokens_to_cut,
            reverse_pass=options.reverse_pass,
            control_similarity=similarity if options.special_token_mapping else None,
        ),
    )
    if options.special_token_top_k is not None:
        built = _with_short_control_rows(built, pair, options.special_token_top_k)
    return built if initial is None else _added(built, initial, options.top_k)


def _with_short_control_rows(
    built: ProjectionMatrix, pair: TokenizerPair, most: int
) -> ProjectionMatrix:
    entries = LooseEntries.of(built).merged()
    is_kept = pair.is_ordinary[entries.rows] | (entries.slots < most)
    return entries.kept(is_kept).projection(built.shape, is_exact_row=built.is_exact_row)


def _added(built: ProjectionMatrix, initial: LooseEntries, top_k: int) -> ProjectionMatrix:
    entries = LooseEntries.of(built)
    for ids, size, role in zip(
        (initial.rows, initial.columns), built.shape, ("student", "teacher"), strict=True
    ):
        if ids.max(initial=-1) >= size:
            raise ProjectionError(
                f"the initial map is of a larger {role} vocabulary",
                got=f"id {ids.max()}",
                expected=f"0 to {size - 1}",
                fix="build one from the two tokenizers: megatron-ext projection build",
            )
    initial = initial.kept(~built.is_exact_row[initial.rows])
    together = sorted_entries(
        np.concatenate((entries.rows, initial.rows)),
        np.concatenate((entries.columns, initial.columns)),
        np.concatenate((entries.weights, initial.weights)),
        like=replace(entries, slot_count=0),
    ).merged()
    return together.kept(together.slots < top_k).projection(
        built.shape,
        is_exact_row=built.is_exact_row,
        metadata=with_step(built.metadata, "initial_projection"),
    )
