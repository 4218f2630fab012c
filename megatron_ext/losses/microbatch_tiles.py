"""A microbatch cut into tiles, with its alignment and completions, where its data is loaded.

B batch, T tokens, C chunks, S steps, H chains, E completions. Numpy on the host, as
``ChunkCompletions``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray

from megatron_ext.alignment.batch import AlignmentBatch
from megatron_ext.constants import IGNORE_INDEX
from megatron_ext.losses.base import DistillationInputs, KnownAhead
from megatron_ext.losses.completions import ChunkCompletions
from megatron_ext.ops.partition_kl import ChainRows, Chains, SingleRows
from megatron_ext.ops.tile_plan import Tile, TilePlan

Ids = NDArray[np.int64]


def tile_completions(completions: ChunkCompletions, plan: TilePlan) -> tuple[ChunkCompletions, ...]:
    """Cut completions to each tile, with rows and chunks counted from the tile's first.

    Args:
        completions: Completions of the whole microbatch, on the CPU.
        plan: Plan with its tensors on the CPU.
    """
    cutter = _Cutter(completions, plan)
    return tuple(cutter.tile(tile) for tile in plan.tiles)


class _Cutter:
    """Places of a microbatch's rows and chunks in the order of its plan."""

    def __init__(self, completions: ChunkCompletions, plan: TilePlan) -> None:
        self._whole = completions
        self._student = _places(plan.student_rows, plan.student_total)
        self._teacher = _places(plan.teacher_rows, plan.teacher_total)
        chunk = _places(plan.chunks, len(plan.chunks))
        self._singles = _Members(chunk[completions.single_chunk.numpy()])
        self._chains = _Members(chunk[completions.chain_chunk.numpy()])
        chains = completions.chains
        # Steps and completions by the place of their chunk.
        place = self._chains.place
        self._steps = tuple(
            _Members(place[side.step_chain.numpy()]) for side in (chains.student, chains.teacher)
        )
        self._ends = _Members(place[chains.completion_chain.numpy()])

    def tile(self, tile: Tile) -> ChunkCompletions:
        whole = self._whole
        single, chain = self._singles.of(tile), self._chains.of(tile)
        new_chain = np.full(len(whole.chain_chunk), -1)
        new_chain[chain] = np.arange(len(chain))
        end = self._ends.of(tile)
        end_chain = new_chain[whole.chains.completion_chain.numpy()[end]]
        counts = np.bincount(end_chain, minlength=len(chain))
        rows = [self._chain_rows(side, new_chain, chain, end, tile) for side in range(2)]
        first = (tile.student.start, tile.teacher.start)
        singles = (
            place[rows_of_side.numpy()[single]] - start
            for place, rows_of_side, start in zip(
                (self._student, self._teacher), whole.singles, first, strict=True
            )
        )
        return ChunkCompletions(
            singles=SingleRows(*map(torch.from_numpy, singles)),
            single_chunk=torch.from_numpy(self._singles.place[single] - tile.chunks.start),
            chains=Chains(
                student=rows[0],
                teacher=rows[1],
                completion_chain=torch.from_numpy(end_chain),
                completion_pointers=(0, *np.cumsum(counts).tolist()),
                longest=max(
                    int(side.step_place.max()) + 1 if len(side.step_place) else 0 for side in rows
                ),
            ),
            chain_chunk=torch.from_numpy(self._chains.place[chain] - tile.chunks.start),
            chunk_count=tile.chunk_count,
        )

    def _chain_rows(self, side: int, new_chain: Ids, chain: Ids, end: Ids, tile: Tile) -> ChainRows:
        whole = (self._whole.chains.student, self._whole.chains.teacher)[side]
        place = (self._student, self._teacher)[side]
        start = (tile.student.start, tile.teacher.start)[side]
        step = self._steps[side].of(tile)
        return ChainRows(
            step_row=torch.from_numpy(place[whole.step_row.numpy()[step]] - start),
            step_label=whole.step_label[step],
            step_chain=torch.from_numpy(new_chain[whole.step_chain.numpy()[step]]),
            step_place=whole.step_place[step],
            last_row=torch.from_numpy(place[whole.last_row.numpy()[chain]] - start),
            completion=whole.completion[end],
        )


class _Members:
    """Items that belong to chunks, sorted by the places of their chunks."""

    def __init__(self, place: Ids) -> None:
        self.place = place
        self._order = np.argsort(place, kind="stable")
        self._sorted = place[self._order]

    def of(self, tile: Tile) -> Ids:
        """Indices of the items of a tile's chunks, chunk by chunk."""
        bounds = np.searchsorted(self._sorted, [tile.chunks.start, tile.chunks.stop])
        members: Ids = self._order[bounds[0] : bounds[1]]
        return members


def _places(listed: torch.Tensor, count: int) -> Ids:
    """Place [count] of every number in ``listed``, -1 for those not in it."""
    place = np.full(count, -1, dtype=np.int64)
    place[listed.numpy()] = np.arange(len(listed))
    return place


@dataclass(frozen=True, slots=True, kw_only=True)
class MicrobatchTiles:
    """Cuts of a microbatch, with the alignment and completions of every tile."""

    plan: TilePlan

    alignments: tuple[AlignmentBatch | None, ...]
    """Alignment of each tile: its rows as one sample, its chunks from 0."""

    completions: tuple[ChunkCompletions | None, ...]
    """Completions of each tile, numbered likewise."""

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
        """Cut a microbatch, on the CPU.

        Args:
            rows: Most rows of a tile, of either model; see ``TilePlan.of``.
            paired: Both models read the same tokens, and are compared position by position at the
                labels; no alignment.
            with_labels: Whether labelled rows outside every chunk are used.
            completions: For ``partition_kl``.

        Raises:
            LossError: No plan can be made, or there is no alignment where chunks are compared.
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
        """Copy to ``device``."""
        return replace(
            self,
            plan=self.plan.to(device),
            alignments=tuple(each and each.to(device) for each in self.alignments),
            completions=tuple(each and each.to(device) for each in self.completions),
        )

    def inputs(self, whole: DistillationInputs) -> Iterator[DistillationInputs]:
        """Inputs of an objective for each tile, without its logits and the teacher's targets."""
        for index, tile in enumerate(self.plan.tiles):
            rows, teacher_rows = self.plan.student_index(tile), self.plan.teacher_index(tile)
            chunks = self.plan.chunks[tile.chunks]
            yield replace(
                whole,
                labels=_rows(whole.labels, rows),
                alignment=self.alignments[index],
                completions=self.completions[index],
                teacher_labels=_rows_if(whole.teacher_labels, teacher_rows),
                chunk_mask=_of_chunks(whole.chunk_mask, chunks),
                chunk_text_class=_of_chunks(whole.chunk_text_class, chunks),
                chunk_script=_of_chunks(whole.chunk_script, chunks),
                student_hidden=None,
                student_head_weight=None,
            )


def _alignment(aligned: AlignmentBatch, plan: TilePlan, tile: Tile) -> AlignmentBatch:
    student_id, teacher_id = (
        torch.where(ids < 0, -1, ids - tile.chunks.start)[None]
        for ids in (plan.student_chunk_id[tile.student], plan.teacher_chunk_id[tile.teacher])
    )
    is_exact = aligned.is_exact[plan.chunks[tile.chunks]]
    return AlignmentBatch.from_chunk_ids(student_id, teacher_id, is_exact=is_exact)


def _rows(values: torch.Tensor, rows: slice | torch.Tensor) -> torch.Tensor:
    """[1, n, ...] of [B, T, ...]"""
    return values.flatten(0, 1)[rows][None]


def _rows_if(values: torch.Tensor | None, rows: slice | torch.Tensor) -> torch.Tensor | None:
    return None if values is None else _rows(values, rows)


def _of_chunks(values: torch.Tensor | None, chunks: torch.Tensor) -> torch.Tensor | None:
    return None if values is None else values[chunks]
