"""A microbatch cut into tiles, made where its data is loaded. B batch, T tokens, C chunks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from megatron_ext.alignment.batch import AlignmentBatch
from megatron_ext.constants import IGNORE_INDEX
from megatron_ext.losses.base import DistillationInputs
from megatron_ext.losses.count_ahead import KnownAhead
from megatron_ext.losses.inputs.chunk_completions import ChunkCompletions
from megatron_ext.losses.linear.tile_completions import tile_completions
from megatron_ext.ops.linear_form import Tile, TilePlan


@dataclass(frozen=True, slots=True, kw_only=True)
class MicrobatchTiles:
    """Where a microbatch is cut, and what the host knows of every tile."""

    plan: TilePlan

    alignments: tuple[AlignmentBatch | None, ...]
    """Of each tile: its rows as one sample, its chunks from 0."""

    completions: tuple[ChunkCompletions | None, ...]
    """The same of ``ChunkCompletions``."""

    @classmethod
    def of(
        cls,
        known: KnownAhead,
        *,
        rows: int,
        paired: bool = False,
        with_labels: bool = True,
        completions: ChunkCompletions | None = None,
    ) -> MicrobatchTiles:
        """Cut what is known of a microbatch, on the CPU.

        Args:
            rows: Most rows of a tile, of either model; see ``TilePlan.of``.
            paired: Both models read the same tokens, and are compared position by position at the
                labels; no alignment.
            with_labels: Whether rows with a label are used that are in no chunk.
            completions: For ``partition_kl``.

        Raises:
            LossError: A plan cannot be made, or there is no alignment where chunks are compared.
        """
        labelled = known.labels != IGNORE_INDEX
        if paired:
            plan = TilePlan.paired(labelled, rows=rows)
            nothing = (None,) * len(plan.tiles)
            return cls(plan=plan, alignments=nothing, completions=nothing)
        aligned = known.aligned
        plan = TilePlan.of(
            aligned.student_chunk_id,
            aligned.teacher_chunk_id,
            aligned.chunk_count,
            rows=rows,
            student_used=labelled if with_labels else torch.zeros_like(labelled),
        )
        cut: tuple[ChunkCompletions | None, ...] = (None,) * len(plan.tiles)
        if completions is not None:
            cut = tile_completions(completions, plan)
        alignments = tuple(_alignment(aligned, plan, tile) for tile in plan.tiles)
        return cls(plan=plan, alignments=alignments, completions=cut)

    def to(self, device: torch.device | str) -> MicrobatchTiles:
        """The same on ``device``."""
        return replace(
            self,
            plan=self.plan.to(device),
            alignments=tuple(part and part.to(device) for part in self.alignments),
            completions=tuple(part and part.to(device) for part in self.completions),
        )

    def inputs(self, whole: DistillationInputs) -> Iterator[DistillationInputs]:
        """What an objective gets of each tile, but for logits and the teacher's targets."""
        for index, tile in enumerate(self.plan.tiles):
            own, other = self.plan.student_index(tile), self.plan.teacher_index(tile)
            chunks = self.plan.chunks[tile.chunks]
            yield replace(
                whole,
                labels=_rows(whole.labels, own),
                alignment=self.alignments[index],
                completions=self.completions[index],
                teacher_labels=_rows_if(whole.teacher_labels, other),
                chunk_mask=_of_chunks(whole.chunk_mask, chunks),
                chunk_text_class=_of_chunks(whole.chunk_text_class, chunks),
                chunk_script=_of_chunks(whole.chunk_script, chunks),
                student_hidden=None,
                student_head_weight=None,
            )


def _alignment(aligned: AlignmentBatch, plan: TilePlan, tile: Tile) -> AlignmentBatch:
    own, other = (
        torch.where(ids < 0, -1, ids - tile.chunks.start)[None]
        for ids in (plan.student_chunk_id[tile.student], plan.teacher_chunk_id[tile.teacher])
    )
    is_exact = aligned.is_exact[plan.chunks[tile.chunks]]
    return AlignmentBatch.from_chunk_ids(own, other, is_exact=is_exact)


def _rows(values: torch.Tensor, rows: slice | torch.Tensor) -> torch.Tensor:
    """[1, n, ...] of [B, T, ...]"""
    return values.flatten(0, 1)[rows][None]


def _rows_if(values: torch.Tensor | None, rows: slice | torch.Tensor) -> torch.Tensor | None:
    return None if values is None else _rows(values, rows)


def _of_chunks(values: torch.Tensor | None, chunks: torch.Tensor) -> torch.Tensor | None:
    return None if values is None else values[chunks]
