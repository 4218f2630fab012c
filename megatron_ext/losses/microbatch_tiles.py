"""A microbatch cut into tiles, with its alignment and completions, where its data is loaded.

B batch, T tokens, C chunks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from megatron_ext.alignment.batch import AlignmentBatch
from megatron_ext.constants import IGNORE_INDEX, NO_CHUNK
from megatron_ext.losses.base import (
    DistillationInputs,
    KnownAhead,
)
from megatron_ext.losses.lookup import Completions, CompletionSource, places_after
from megatron_ext.losses.vocabulary_match import IdTable
from megatron_ext.ops.chunk_likelihood import PlaceAfter
from megatron_ext.ops.tile_plan import Tile, TilePlan


@dataclass(frozen=True, slots=True, kw_only=True)
class MicrobatchTiles:
    """Cuts of a microbatch, with the alignment and completions of every tile."""

    plan: TilePlan

    alignments: tuple[AlignmentBatch | None, ...]
    """Alignment of each tile: its rows as one sample, its chunks from 0."""

    completions: tuple[Completions | None, ...]
    """Completions of each tile, numbered likewise."""

    @classmethod
    def of(
        cls,
        known: KnownAhead,
        *,
        rows: int,
        paired: bool = False,
        with_labels: bool = True,
        with_rows_behind: bool = False,
        table: CompletionSource | None = None,
    ) -> MicrobatchTiles:
        """Cut a microbatch, on the CPU.

        Args:
            rows: Most rows of a tile, of either model; see ``TilePlan.of``.
            paired: Both models read the same tokens, and are compared position by position at the
                labels; no alignment.
            with_labels: Whether labelled rows outside every chunk are used.
            with_rows_behind: Whether the rows behind chunks are read; it needs the teacher's
                labels.
            table: Table in which completions are looked up; it needs the teacher's labels.

        Raises:
            LossError: No plan can be made, or there is no alignment where chunks are compared.
        """
        labelled = known.labels != IGNORE_INDEX
        if paired:
            plan = TilePlan.paired(labelled, rows=rows)
            nothing = (None,) * len(plan.tiles)
            return cls(plan=plan, alignments=nothing, completions=nothing)
        aligned, behind = known.aligned, None
        if with_rows_behind:
            assert known.teacher_labels is not None
            behind = places_after(aligned, known.labels, known.teacher_labels)
        plan = TilePlan.of(
            aligned.student_chunk_id,
            aligned.teacher_chunk_id,
            aligned.chunk_count,
            rows=rows,
            student_used=labelled if with_labels else torch.zeros_like(labelled),
            behind=behind
            and (
                _mask(behind[0], aligned.student_chunk_id),
                _mask(behind[1], aligned.teacher_chunk_id),
            ),
        )
        alignments = tuple(_alignment(aligned, plan, tile, behind) for tile in plan.tiles)
        cut: list[Completions | None] = [None] * len(plan.tiles)
        if table is not None:
            assert known.teacher_labels is not None
            for index, (tile, part) in enumerate(zip(plan.tiles, alignments, strict=True)):
                cut[index] = table.of_batch(
                    part,
                    _labels(known.labels, plan, tile),
                    _rows(known.teacher_labels, plan.teacher_index(tile)),
                )
        return cls(plan=plan, alignments=alignments, completions=tuple(cut))

    def to(self, device: torch.device | str) -> MicrobatchTiles:
        """Copy to ``device``."""
        return replace(
            self,
            plan=self.plan.to(device),
            alignments=tuple(each and each.to(device) for each in self.alignments),
            completions=tuple(each and each.to(device) for each in self.completions),
        )

    def by_place(self, student: IdTable, teacher: IdTable) -> MicrobatchTiles:
        """Replace ids by their places in a vocabulary layout."""
        completions = tuple(each and each.by_place(student, teacher) for each in self.completions)
        return replace(self, completions=completions)

    def inputs(self, whole: DistillationInputs) -> Iterator[DistillationInputs]:
        """Inputs of an objective for each tile, without its logits and the teacher's targets."""
        for index, tile in enumerate(self.plan.tiles):
            teacher_rows = self.plan.teacher_index(tile)
            chunks = self.plan.chunks[tile.chunks]
            yield replace(
                whole,
                labels=_labels(whole.labels, self.plan, tile),
                alignment=self.alignments[index],
                completions=self.completions[index],
                teacher_labels=_rows_if(whole.teacher_labels, teacher_rows),
                chunk_mask=_of_chunks(whole.chunk_mask, chunks),
                chunk_text_class=_of_chunks(whole.chunk_text_class, chunks),
                chunk_script=_of_chunks(whole.chunk_script, chunks),
                student_hidden=None,
                student_head_weight=None,
            )


def _alignment(
    aligned: AlignmentBatch,
    plan: TilePlan,
    tile: Tile,
    behind: tuple[PlaceAfter, PlaceAfter] | None,
) -> AlignmentBatch:
    student_id, teacher_id = (
        # A row that is shared with the next tile is in none of this tile's chunks.
        torch.where((ids < 0) | (ids >= tile.chunks.stop), NO_CHUNK, ids - tile.chunks.start)[None]
        for ids in (plan.student_chunk_id[tile.student], plan.teacher_chunk_id[tile.teacher])
    )
    chunks = plan.chunks[tile.chunks]
    part = AlignmentBatch.from_chunk_ids(student_id, teacher_id, is_exact=aligned.is_exact[chunks])
    if behind is None:
        return part
    student, teacher = (
        torch.where(place.exists[chunks], torch.searchsorted(rows, place.row[chunks]), -1)
        for place, rows in (
            (behind[0], plan.student_rows[tile.student]),
            (behind[1], plan.teacher_rows[tile.teacher]),
        )
    )
    return replace(part, student_behind=student, teacher_behind=teacher)


def _mask(behind: PlaceAfter, chunk_id: torch.Tensor) -> torch.Tensor:
    """Rows that are behind a chunk, bool of the shape of ``chunk_id``."""
    mask = torch.zeros_like(chunk_id, dtype=torch.bool)
    mask.view(-1)[behind.row[behind.exists]] = True
    return mask


def _labels(labels: torch.Tensor, plan: TilePlan, tile: Tile) -> torch.Tensor:
    """[1, n] labels of a tile's rows; a row that is shared with the next tile has its label
    there."""
    of_tile = _rows(labels, plan.student_index(tile))
    if not tile.shares_last:
        return of_tile
    return torch.nn.functional.pad(of_tile[:, :-1], (0, 1), value=IGNORE_INDEX)


def _rows(values: torch.Tensor, rows: slice | torch.Tensor) -> torch.Tensor:
    """[1, n, ...] of [B, T, ...]"""
    return values.flatten(0, 1)[rows][None]


def _rows_if(values: torch.Tensor | None, rows: slice | torch.Tensor) -> torch.Tensor | None:
    return None if values is None else _rows(values, rows)


def _of_chunks(values: torch.Tensor | None, chunks: torch.Tensor) -> torch.Tensor | None:
    return None if values is None else values[chunks]
