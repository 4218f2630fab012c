"""Packing of tokens onto ranks by their shared entries, and the resulting order of a vocabulary.

V Vs Vt vocabularies, Vp with padding, R ranks, E entries beside the common pairs.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Final

import numpy as np
from numpy.typing import ArrayLike, NDArray

from megatron_ext.errors import ProjectionError
from megatron_ext.projection.projection_matrix import ProjectionMatrix
from megatron_ext.projection.vocabulary_partition import VocabularyPartition

Ids = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class ResidualGraph:
    """Tokens as items, joined by the projection's entries other than the common pairs.

    A common pair is one item, since both of its tokens go to one rank. Items are numbered by their
    student token, and those without one by ``Vs`` plus their teacher token.
    """

    row_item: Ids
    """[E] item of each entry's student token."""

    column_item: Ids
    """[E] item of each entry's teacher token."""

    degree: Ids
    """[Vs + Vt] number of entries in an item's column."""

    student_items: Ids
    """[Vs + Vt] 1 for an item with a student token, else 0."""

    teacher_items: Ids
    """[Vs + Vt] 1 for an item with a teacher token, else 0."""

    @classmethod
    def of(cls, projection: ProjectionMatrix, partition: VocabularyPartition) -> ResidualGraph:
        """The graph of a projection without padding."""
        students, teachers = projection.vocab_sizes
        partner = np.full(students, -1, dtype=np.int64)
        partner[partition.common_student] = partition.common_teacher
        item_of_teacher = students + np.arange(teachers)
        item_of_teacher[partition.common_teacher] = partition.common_student
        rows, columns = projection.entry_rows, projection.indices.astype(np.int64)
        residual = partner[rows] != columns
        column_item = item_of_teacher[columns[residual]]
        has_teacher = np.zeros(students + teachers, dtype=np.int64)
        has_teacher[item_of_teacher] = 1
        return cls(
            row_item=rows[residual],
            column_item=column_item,
            degree=np.bincount(column_item, minlength=students + teachers),
            student_items=(np.arange(students + teachers) < students).astype(np.int64),
            teacher_items=has_teacher,
        )

    @property
    def work(self) -> Ids:
        """Number of entries in each item's row, [Vs + Vt]."""
        return np.bincount(self.row_item, minlength=len(self.degree))

    def grouped(self, rank_count: int) -> tuple[Ids, NDArray[np.bool_]]:
        """Component of each item [Vs + Vt], named by one of its items, and the mask of hubs.

        Columns join their rows to components, those of the fewest entries first. One that would
        make a component of more work than a rank's share is a hub instead: it joins nothing, and
        its entries may come from several ranks.
        """
        share = -(-len(self.row_item) // rank_count)
        weight = self.work.tolist()
        parent = list(range(len(weight)))
        is_hub = np.zeros(len(weight), dtype=np.bool_)
        order = np.lexsort((self.row_item, self.column_item, self.degree[self.column_item]))
        columns = self.column_item[order]
        starts = np.flatnonzero(np.diff(columns, prepend=-1))
        rows = self.row_item[order].tolist()
        bounds = [*starts.tolist(), len(rows)]
        for start, stop in pairwise(bounds):
            column = int(columns[start])
            roots = {_root(parent, item) for item in (column, *rows[start:stop])}
            joined = sum(weight[root] for root in roots)
            if joined > share:
                is_hub[column] = True
                continue
            top = min(roots)
            for root in roots:
                parent[root] = top
            weight[top] = joined
        return _flattened(np.array(parent, dtype=np.int64)), is_hub


def _root(parent: list[int], item: int) -> int:
    while parent[item] != item:
        # Halves the path for later lookups.
        parent[item] = item = parent[parent[item]]
    return item


def _flattened(parent: Ids) -> Ids:
    """Root of each item."""
    while not np.array_equal(above := parent[parent], parent):
        parent = above
    return parent


NOWHERE: Final = -1
"""Rank of an item that has none yet."""


class Packing:
    """Fills ranks of fixed capacities with the items of a ``ResidualGraph``.

    Args:
        graph: Graph of the pair.
        student_capacity: [R] student tokens that each rank holds, Vs together.
        teacher_capacity: [R] teacher tokens that each rank holds, Vt together.
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
        """Rank of each item [Vs + Vt]; ``NOWHERE`` for one that fits on no rank, or has no entry.

        Components are placed first, the one of most entries on the rank with the fewest; then the
        hubs, each where most of its entries are; then common pairs, equally many on each rank.
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
        """Take room on the rank of least load that has it; ``NOWHERE`` if none has."""
        passed = []
        chosen = NOWHERE
        while loads and chosen == NOWHERE:
            least, rank = heapq.heappop(loads)
            if self._take(rank, need):
                chosen = rank
                least += load
            passed.append((least, rank))
        for entry in passed:
            heapq.heappush(loads, entry)
        return chosen

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
        # Pairs of the lowest ids first, which are the most frequent in most vocabularies.
        self._rank[left[: int(counts.sum())]] = np.repeat(np.arange(len(counts)), counts)

    def _take(self, rank: int, need: list[int]) -> bool:
        student, teacher = self._room
        if need[0] > student[rank] or need[1] > teacher[rank]:
            return False
        student[rank] -= need[0]
        teacher[rank] -= need[1]
        return True


def spread(count: int, *, levels: Ids, room: Ids) -> Ids:
    """Distribute ``count`` items over the ranks [R] so that levels end as equal as possible.

    Args:
        count: At most the sum of ``room``.
        levels: [R] items that each has already.
        room: [R] most items that each can take.
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
    """Complete ``rank`` [V]: put tokens without a rank where there is room.

    Args:
        members: [N] tokens to spread evenly, in this order; the others follow.
    """
    out: Ids = rank.copy()
    for tokens in (members[out[members] == NOWHERE], None):
        left = np.flatnonzero(out == NOWHERE) if tokens is None else tokens
        room = capacity - np.bincount(out[out != NOWHERE], minlength=len(capacity))
        counts = spread(len(left), levels=np.zeros_like(room), room=room)
        out[left] = np.repeat(np.arange(len(counts)), counts)
    return out


@dataclass(frozen=True, slots=True, eq=False)
class VocabularyOrder:
    """Permutation of the rows of a head. An *id* is the tokenizer's, a *place* the new row.

    Padding stays where megatron-core has it, after all tokens, and every padding row is its own
    place: the test ``place >= vocab_size`` for padding holds in either order.

    Raises:
        ProjectionError: No permutation, tokens among the padding, or ranks that do not divide it.
    """

    ids: Ids
    """[Vp] id at each place; read-only."""

    vocab_size: int
    """V"""

    rank_count: int
    """Tensor-parallel ranks; each has ``width`` consecutive places."""

    places: Ids = field(init=False)
    """[Vp] place of each id: the inverse of ``ids``; read-only."""

    def __post_init__(self) -> None:
        ids = np.asarray(self.ids, dtype=np.int64).copy()
        size = len(ids)
        if self.rank_count < 1 or size % self.rank_count:
            raise ProjectionError(
                "a padded vocabulary does not divide over its ranks",
                got=f"{size} rows over {self.rank_count}",
                fix="pad it as megatron-core does, to a multiple of the tensor-parallel size",
            )
        places = np.full(size, -1, dtype=np.int64)
        if ids.size and ids.min() >= 0 and ids.max() < size:
            places[ids] = np.arange(size)
        padding = np.arange(self.vocab_size, size)
        if (places < 0).any() or not np.array_equal(ids[self.vocab_size :], padding):
            raise ProjectionError(
                "the order of a vocabulary is not a permutation that leaves its padding in place",
                got=f"{size} rows, {int((places < 0).sum())} of them missing",
                expected=f"the ids below {self.vocab_size}, each once, and then the padding",
            )
        for name, array in (("ids", ids), ("places", places)):
            array.setflags(write=False)
            object.__setattr__(self, name, array)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, VocabularyOrder):
            return NotImplemented
        return (self.vocab_size, self.rank_count) == (
            other.vocab_size,
            other.rank_count,
        ) and np.array_equal(self.ids, other.ids)

    @classmethod
    def by_rank(
        cls, rank: ArrayLike, key: ArrayLike, *, padded_size: int, rank_count: int
    ) -> VocabularyOrder:
        """Order tokens by rank, then by key, then by id.

        Args:
            rank: [V]; each rank has the number of tokens that ``capacities`` gives.
            key: [V]
        """
        ranks, keys = np.asarray(rank), np.asarray(key)
        order = np.lexsort((np.arange(len(ranks)), keys, ranks))
        ids = np.concatenate([order, np.arange(len(ranks), padded_size)])
        return cls(ids=ids, vocab_size=len(ranks), rank_count=rank_count)

    @property
    def width(self) -> int:
        """Places on each rank, padding included."""
        return len(self.ids) // self.rank_count

    def rank_of(self, ids: ArrayLike) -> Ids:
        """Rank that holds each of ``ids``."""
        ranks: Ids = self.places[np.asarray(ids)] // max(self.width, 1)
        return ranks


def capacities(vocab_size: int, padded_size: int, rank_count: int) -> Ids:
    """Number of tokens that each rank holds, [R]; all padding is at the end."""
    width = padded_size // rank_count
    return np.clip(vocab_size - width * np.arange(rank_count), 0, width)
