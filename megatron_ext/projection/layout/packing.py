"""Which rank each token goes to. Vs Vt vocabularies, R ranks."""

from __future__ import annotations

import heapq
from typing import Final

import numpy as np
from numpy.typing import NDArray

from megatron_ext.projection.layout.residual_graph import ResidualGraph

Ids = NDArray[np.int64]

NOWHERE: Final = -1
"""The rank of what has none yet."""


class Packing:
    """Fills ranks of fixed capacities with the items of a ``ResidualGraph``.

    Args:
        graph: Of the pair.
        student_capacity: [R] student tokens that each rank takes, Vs together.
        teacher_capacity: [R] the same of the teacher.
    """

    def __init__(
        self, graph: ResidualGraph, *, student_capacity: Ids, teacher_capacity: Ids
    ) -> None:
        self._graph = graph
        self._room = [student_capacity.tolist(), teacher_capacity.tolist()]
        students = int(student_capacity.sum())
        self._students = students
        self._rank = np.full(len(graph.degree), NOWHERE, dtype=np.int64)
        self._is_pair = (graph.student_items & graph.teacher_items).astype(np.bool_)

    def pack(self) -> Ids:
        """[Vs + Vt] the rank of each item; ``NOWHERE`` for what fits nowhere whole, and for tokens
        that no entry has.

        Components go first, the one of most entries to the rank that has fewest; then the hubs,
        each to where most of its entries are; then common pairs, spread so that all ranks have
        equally many.
        """
        component, is_hub = self._graph.grouped(len(self._room[0]))
        self._place_components(component, is_hub)
        self._place_hubs(np.flatnonzero(is_hub))
        self._place_pairs()
        return self._rank

    def _place_components(self, component: Ids, is_hub: NDArray[np.bool_]) -> None:
        graph = self._graph
        has_entries = np.zeros(len(component), dtype=np.bool_)
        has_entries[graph.row_item] = True
        has_entries[graph.column_item] = True
        members = np.flatnonzero(has_entries & ~is_hub)
        if not len(members):
            return
        members = members[np.argsort(component[members], kind="stable")]
        starts = np.flatnonzero(np.diff(component[members], prepend=-1))
        sizes = np.diff(starts, append=len(members))
        cost, *needs = (
            np.add.reduceat(items[members], starts)
            for items in (graph.work, graph.student_items, graph.teacher_items)
        )
        chosen = np.full(len(starts), NOWHERE, dtype=np.int64)
        loads = [(0, rank) for rank in range(len(self._room[0]))]
        order = np.lexsort((starts, -sizes, -cost))
        for index, load, *need in zip(
            *(array[order].tolist() for array in (np.arange(len(starts)), cost, *needs)),
            strict=True,
        ):
            chosen[index] = self._least_loaded(loads, load, need)
        self._rank[members] = np.repeat(chosen, sizes)

    def _least_loaded(self, loads: list[tuple[int, int]], load: int, need: list[int]) -> int:
        """The rank of the least load that has room, which it takes; ``NOWHERE`` if none has."""
        passed = []
        found = NOWHERE
        while loads and found == NOWHERE:
            least, rank = heapq.heappop(loads)
            if self._take(rank, need):
                found = rank
                least += load
            passed.append((least, rank))
        for entry in passed:
            heapq.heappush(loads, entry)
        return found

    def _place_hubs(self, hubs: Ids) -> None:
        graph, ranks = self._graph, len(self._room[0])
        hubs = hubs[np.argsort(-graph.degree[hubs], kind="stable")]
        number = np.full(len(graph.degree), NOWHERE, dtype=np.int64)
        number[hubs] = np.arange(len(hubs))
        row_rank, hub = self._rank[graph.row_item], number[graph.column_item]
        counted = (hub != NOWHERE) & (row_rank != NOWHERE)
        entries = np.bincount(
            hub[counted] * ranks + row_rank[counted], minlength=len(hubs) * ranks
        ).reshape(len(hubs), ranks)
        for item, preferred in zip(
            hubs.tolist(), np.argsort(-entries, axis=1, kind="stable").tolist(), strict=True
        ):
            need = [int(graph.student_items[item]), int(graph.teacher_items[item])]
            self._rank[item] = next((rank for rank in preferred if self._take(rank, need)), NOWHERE)

    def _place_pairs(self) -> None:
        placed = self._rank != NOWHERE
        levels = np.bincount(self._rank[self._is_pair & placed], minlength=len(self._room[0]))
        left = np.flatnonzero(self._is_pair & ~placed)
        room = np.minimum(*map(np.asarray, self._room))
        counts = spread(min(len(left), int(room.sum())), levels=levels, room=room)
        # The pairs of the lowest ids, which are the most frequent ones of most vocabularies, first.
        self._rank[left[: int(counts.sum())]] = np.repeat(np.arange(len(counts)), counts)

    def _take(self, rank: int, need: list[int]) -> bool:
        student, teacher = self._room
        if need[0] > student[rank] or need[1] > teacher[rank]:
            return False
        student[rank] -= need[0]
        teacher[rank] -= need[1]
        return True


def spread(count: int, *, levels: Ids, room: Ids) -> Ids:
    """[R] how many of ``count`` things each rank gets, so that levels end as equal as can be.

    Args:
        count: At most the sum of ``room``.
        levels: [R] what each has already.
        room: [R] the most that each can take.
    """
    low, high = 0, int((levels + room).max(initial=0))
    while low < high:
        middle = (low + high) // 2
        if np.clip(middle - levels, 0, room).sum() >= count:
            high = middle
        else:
            low = middle + 1
    shares = np.clip(low - 1 - levels, 0, room)
    # What is missing to the level above is one for each of the first ranks that reach it.
    reaching = np.flatnonzero(np.clip(low - levels, 0, room) > shares)
    shares[reaching[: count - int(shares.sum())]] += 1
    return shares


def filled(rank: Ids, *, capacity: Ids, members: Ids) -> Ids:
    """``rank`` [V] of a vocabulary's tokens with those that have none put where there is room.

    Args:
        members: [N] the tokens that should be spread evenly, in this order; the rest follow.
    """
    out: Ids = rank.copy()
    for tokens in (members[out[members] == NOWHERE], None):
        left = np.flatnonzero(out == NOWHERE) if tokens is None else tokens
        room = capacity - np.bincount(out[out != NOWHERE], minlength=len(capacity))
        counts = spread(len(left), levels=np.zeros_like(room), room=room)
        out[left] = np.repeat(np.arange(len(counts)), counts)
    return out
