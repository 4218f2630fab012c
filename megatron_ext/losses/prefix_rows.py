"""Rows of a microbatch that ``byte_prefix`` compares, looked up where its data is loaded.

B batch, Ts Tt tokens, C chunks, R rows, M middles, E completions.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np
import torch

from megatron_ext.alignment.alignment import ChunkClass
from megatron_ext.alignment.batch import AlignmentBatch
from megatron_ext.losses.lookup import ChunkSide, Completions, Ids, check_labels
from megatron_ext.losses.vocabulary_match import IdTable
from megatron_ext.ops.prefix_masses import PrefixSums, Spans

if TYPE_CHECKING:
    from megatron_ext.losses.prefix_table import PrefixTable


class RowPairs(NamedTuple):
    """Student rows and the teacher rows that their targets come from, over flattened [B, T]."""

    student: torch.Tensor
    """int64 [R], each once."""

    teacher: torch.Tensor
    """int64 [R]"""

    chunk: torch.Tensor
    """int64 [R]"""

    on_host: tuple[int, ...]
    """[R] the student rows, ascending."""

    def each(self, change: Callable[[torch.Tensor], torch.Tensor]) -> RowPairs:
        """The same with changed tensors."""
        return RowPairs(
            change(self.student), change(self.teacher), change(self.chunk), self.on_host
        )


class PrefixCut(NamedTuple):
    """Part of the student's rows, with the ranges of starts and of middles in it."""

    rows: slice
    starts: slice
    middles: slice


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixRows(Completions):
    """Student rows in two kinds, and what the teacher's masses at them are made of.

    At a *start*, as the first row of every chunk is, both models predict from the same bytes on;
    the others are *middles*, which begin within a teacher token. A chunk of several tokens is left
    out where one of them has no label. Where the bytes of both sides differ, it has its start
    alone.
    """

    starts: RowPairs

    middles: RowPairs

    prefixes: PrefixSums
    """Part of the teacher's token before each middle; its slots are the first completions."""

    completion: torch.Tensor
    """int64 [E] student tokens behind each middle's prefix, each once; a label that spans tokens
    comes last where it is not among them."""

    pointers: tuple[int, ...]
    """[M + 1] start of each middle's completions, on the host."""

    counts: torch.Tensor
    """int64 [M] number of each middle's completions."""

    spans: Spans
    """Rows count over starts and then middles. ``gains`` and ``loses`` of a start are student
    tokens, of a middle indices among all completions."""

    @classmethod
    def of(
        cls,
        alignment: AlignmentBatch,
        student_labels: torch.Tensor,
        teacher_labels: torch.Tensor,
        table: PrefixTable,
    ) -> PrefixRows:
        """See ``PrefixTable.of_batch``."""
        sides = []
        for side, chunk_id, labels, spellings in (
            ("student", alignment.student_chunk_id, student_labels, table.student_bytes),
            ("teacher", alignment.teacher_chunk_id, teacher_labels, table.teacher_bytes),
        ):
            check_labels(side, chunk_id, labels, len(spellings))
            sides.append(ChunkSide(chunk_id.numpy(), labels.numpy(), alignment.chunk_count))
        is_single = alignment.chunk_class.numpy() == ChunkClass.ONE_TO_ONE
        is_labelled = sides[0].is_labelled & sides[1].is_labelled
        compared = np.flatnonzero(is_single | is_labelled)
        firsts = [side.first_rows(compared) for side in sides]
        found = _Found(table, firsts[0], firsts[1], compared)
        for chunk in np.flatnonzero(~is_single & is_labelled & alignment.is_exact.numpy()).tolist():
            found.read(chunk, *sides)
        return found.rows(alignment.chunk_count)

    def cuts(self, row_count: int, step: int) -> Iterator[PrefixCut]:
        """Cuts of ``row_count`` student rows, ``step`` at a time, the last with the rest; at least
        one."""
        for first in range(0, max(row_count, 1), step):
            rows = slice(first, min(first + step, row_count))
            starts, middles = (
                slice(bisect_left(side.on_host, rows.start), bisect_left(side.on_host, rows.stop))
                for side in (self.starts, self.middles)
            )
            yield PrefixCut(rows, starts, middles)

    def by_place(self, student: IdTable, teacher: IdTable) -> PrefixRows:
        """Replace ids by their places in a vocabulary layout."""
        spans = self.spans
        is_start = spans.row < len(self.starts.student)
        gains, loses = (
            torch.where(is_start, student.places_of(torch.where(is_start, ids, 0)), ids)
            for ids in (spans.gains, spans.loses)
        )
        return replace(
            self,
            completion=student.places_of(self.completion),
            spans=spans._replace(
                gains=gains, loses=loses, step_label=teacher.places_of(spans.step_label)
            ),
        )

    def each(self, change: Callable[[torch.Tensor], torch.Tensor]) -> PrefixRows:
        return replace(
            self,
            starts=self.starts.each(change),
            middles=self.middles.each(change),
            prefixes=self.prefixes.each(change),
            completion=change(self.completion),
            counts=change(self.counts),
            spans=self.spans.each(change),
        )


class _Found:
    """Starts, middles and spans of the chunks that were read so far."""

    def __init__(self, table: PrefixTable, student: Ids, teacher: Ids, chunk: Ids) -> None:
        self._table = table
        self._starts = list(zip(student.tolist(), teacher.tolist(), chunk.tolist(), strict=True))
        self._start_of = {place: number for number, place in enumerate(chunk.tolist())}
        self._middles: list[tuple[int, int, int, int]] = []
        self._completions: list[Ids] = []
        self._spans: list[tuple[int, int, int, int, int, int]] = []
        self._steps: list[tuple[int, int, int]] = []

    def read(self, chunk: int, student: ChunkSide, teacher: ChunkSide) -> None:
        """Add the rows of a chunk of several tokens, whose labels are all known."""
        table = self._table
        labels, its_labels = (side.labels_of(chunk).tolist() for side in (student, teacher))
        texts = [table.student_bytes[label] or b"" for label in labels]
        pieces = [table.teacher_bytes[label] or b"" for label in its_labels]
        if not (all(texts) and all(pieces)) or b"".join(texts) != b"".join(pieces):
            return
        rows, its_rows = (side.rows_of(chunk).tolist() for side in (student, teacher))
        begins = [0, *accumulate(map(len, pieces))]
        begin = at = 0
        for row, label, text in zip(rows, labels, texts, strict=True):
            end = begin + len(text)
            while begins[at + 1] <= begin:
                at += 1
            last = at
            while begins[last + 1] < end:
                last += 1
            cut = begin - begins[at]
            said = pieces[at][:cut]
            if said:
                self._add_middle(row, its_rows[at], chunk, said)
            elif begin:
                self._starts.append((row, its_rows[at], chunk))
            if last > at:
                place = len(self._starts) - 1 if begin else self._start_of[chunk]
                gains, loses = label, int(table.starts[its_labels[at]])
                if said:
                    place = len(self._middles) - 1
                    gains, loses = self._among_completions(label, table.next_in(pieces[at], cut))
                number = [len(self._spans)] * (last - at)
                self._steps += zip(number, its_rows[at:last], its_labels[at:last], strict=True)
                tail = table.number[pieces[last][: end - begins[last]]]
                self._spans.append((bool(said), place, gains, loses, its_rows[last], tail))
            begin = end

    def _add_middle(self, row: int, its_row: int, chunk: int, said: bytes) -> None:
        table = self._table
        number = table.number[said]
        self._middles.append((row, its_row, chunk, number))
        behind = slice(table.next_pointers[number], table.next_pointers[number + 1])
        self._completions.append(table.next_token[behind].astype(np.int64))

    def _among_completions(self, label: int, loses: int) -> tuple[int, int]:
        """Places of two tokens among the completions of the last middle, to which the label is
        added; -1 for a token that is part of the rest."""
        own = self._completions[-1]
        if label not in own:
            self._completions[-1] = own = np.append(own, label)
        found = [np.flatnonzero(own == token) for token in (label, loses)]
        return (int(found[0][0]), int(found[1][0]) if len(found[1]) else -1)

    def rows(self, chunk_count: int) -> PrefixRows:
        """All that was found, in the order of the student's rows."""
        start, middle, span, step = (
            _columns(values, width)
            for values, width in (
                (self._starts, 3),
                (self._middles, 4),
                (self._spans, 6),
                (self._steps, 3),
            )
        )
        orders = [rows.argsort() for rows in (start[0], middle[0])]
        places = [order.argsort() for order in orders]
        completions = [self._completions[row] for row in orders[1].tolist()]
        counts = torch.tensor(list(map(len, completions)), dtype=torch.int64, device="cpu")
        pointers = [0, *accumulate(counts.tolist())]
        is_middle = span[0] == 1
        starts, middles = (
            RowPairs(side[0][order], side[1][order], side[2][order], tuple(side[0][order].tolist()))
            for side, order in zip((start, middle), orders, strict=True)
        )
        row = torch.where(
            is_middle, len(start[0]) + _at(places[1], span[1]), _at(places[0], span[1])
        )
        first = _at(
            torch.tensor(pointers, device="cpu")[places[1]], torch.where(is_middle, span[1], 0)
        )
        shift = torch.where(is_middle, first, 0)
        return PrefixRows(
            starts=starts,
            middles=middles,
            prefixes=self._sums(middle[3][orders[1]]),
            completion=torch.from_numpy(np.concatenate([_NOTHING, *completions])),
            pointers=tuple(pointers),
            counts=counts,
            spans=Spans(
                row=row,
                gains=span[2] + shift,
                loses=torch.where(span[3] < 0, -1, span[3] + shift),
                step_span=step[0],
                step_row=step[1],
                step_label=step[2],
                end_row=span[4],
                ends=self._sums(span[5]),
            ),
            chunk_count=chunk_count,
        )

    def _sums(self, number: torch.Tensor) -> PrefixSums:
        table, index = self._table, number.numpy()
        pairs = table.pointers[index + 1] - table.pointers[index]
        slots = table.next_pointers[index + 1] - table.next_pointers[index]
        return PrefixSums(number, tuple(pairs.tolist()), torch.from_numpy(slots))


def _at(values: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """``values[index]`` where there is one, else 0."""
    found = torch.nn.functional.pad(values, (0, 1))[index.clamp(max=len(values))]
    return torch.where(index < len(values), found, 0)


def _columns(values: Sequence[tuple[int, ...]], width: int) -> list[torch.Tensor]:
    table = torch.tensor(values, dtype=torch.int64, device="cpu")
    return list(table.reshape(-1, width).T.contiguous())


_NOTHING: Final[Ids] = np.zeros(0, dtype=np.int64)
