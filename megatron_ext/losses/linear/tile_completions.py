"""The completions of a microbatch's chunks, cut to tiles. S steps, H chains, E completions.

Numpy on the host, as ``ChunkCompletions`` are made.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from megatron_ext.losses.inputs.chunk_completions import ChunkCompletions
from megatron_ext.ops.linear_form import Tile, TilePlan
from megatron_ext.ops.partition_kl import ChainRows, Chains, SingleRows

Ids = NDArray[np.int64]


def tile_completions(completions: ChunkCompletions, plan: TilePlan) -> tuple[ChunkCompletions, ...]:
    """Of each tile, with rows and chunks counted from its first.

    Args:
        completions: Of the whole microbatch, on the CPU.
        plan: With its tensors on the CPU.
    """
    return _Cutter(completions, plan).all_tiles()


class _Cutter:
    """Where rows and chunks of a microbatch are in the order of its plan."""

    def __init__(self, completions: ChunkCompletions, plan: TilePlan) -> None:
        self._whole, self._plan = completions, plan
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

    def all_tiles(self) -> tuple[ChunkCompletions, ...]:
        return tuple(self._tile(tile) for tile in self._plan.tiles)

    def _tile(self, tile: Tile) -> ChunkCompletions:
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
            place[own.numpy()[single]] - start
            for place, own, start in zip(
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
    """Things that belong to chunks, by the places of these."""

    def __init__(self, place: Ids) -> None:
        self.place = place
        self._order = np.argsort(place, kind="stable")
        self._sorted = place[self._order]

    def of(self, tile: Tile) -> Ids:
        """Indices of those of a tile's chunks, chunk by chunk."""
        bounds = np.searchsorted(self._sorted, [tile.chunks.start, tile.chunks.stop])
        found: Ids = self._order[bounds[0] : bounds[1]]
        return found


def _places(listed: torch.Tensor, count: int) -> Ids:
    """[count] the place in ``listed`` of every number, -1 where it is not."""
    place = np.full(count, -1, dtype=np.int64)
    place[listed.numpy()] = np.arange(len(listed))
    return place
