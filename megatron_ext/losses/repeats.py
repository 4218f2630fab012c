"""Student tokens that repeat one teacher token, and the rows of a batch that predict them.

Where the teacher writes ``\\n`` three times for one token of the student, the projection has the
same row for this token and for the student's ``\\n`` and ``\\n\\n``. ``RepeatRows`` are made where
a microbatch's data is loaded, from the ``RepeatTable`` of the pair.

B batch, Ts Tt tokens, C chunks, Vs Vt vocabularies, R rows, M members, K steps.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from megatron_ext.alignment.batch import AlignmentBatch
from megatron_ext.constants import NO_CHUNK
from megatron_ext.losses.lookup import Completions, check_labels, places_after
from megatron_ext.losses.vocabulary_match import IdTable
from megatron_ext.ops.repeats import Repeats
from megatron_ext.projection.projection_matrix import ProjectionMatrix
from megatron_ext.projection.speller import Speller
from megatron_ext.tokenizers.base import ByteTokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class RepeatRows(Completions):
    """Rows of a batch at which the student has several tokens of the same row to choose from."""

    repeats: Repeats

    chunk: torch.Tensor
    """[R] int64: chunk of each row."""

    def by_place(self, student: IdTable, teacher: IdTable) -> RepeatRows:
        """Replace ids by their places in a vocabulary layout."""
        repeats = self.repeats
        return replace(
            self,
            repeats=repeats._replace(
                member=student.places_of(repeats.member),
                teacher_token=teacher.places_of(repeats.teacher_token),
            ),
        )

    def each(self, change: Callable[[torch.Tensor], torch.Tensor]) -> RepeatRows:
        return replace(self, repeats=Repeats(*map(change, self.repeats)), chunk=change(self.chunk))


@dataclass(frozen=True, slots=True, eq=False)
class RepeatTable:
    """Student tokens that are copies of one teacher token; built once for a pair."""

    vocab_sizes: tuple[int, int]
    """Vs, Vt"""

    members: Mapping[int, Mapping[int, int]]
    """By teacher token: number of copies -> student token, ascending; two at least."""

    copies: Mapping[int, tuple[int, int]]
    """By student token among the members: its teacher token, and how many of it."""

    @classmethod
    def of(
        cls, projection: ProjectionMatrix, student: ByteTokenizer, teacher: ByteTokenizer
    ) -> RepeatTable:
        """Read the table from the rows of one entry of a projection.

        Of several student tokens with the same bytes, the one that the tokenizer emits is taken.
        """
        speller = Speller(student)
        return cls.from_token_bytes(
            projection,
            [
                token if number in emitted else None
                for emitted in [set(speller.emitted_ids)]
                for number, token in enumerate(speller.tokens)
            ],
            Speller(teacher).tokens,
        )

    @classmethod
    def from_token_bytes(
        cls,
        projection: ProjectionMatrix,
        student: list[bytes | None],
        teacher: list[bytes | None],
    ) -> RepeatTable:
        """Read the table with the bytes of each id; None for one that is in no text."""
        found: dict[int, dict[int, int]] = {}
        for row in np.flatnonzero(np.diff(projection.indptr) == 1).tolist():
            column = int(projection.indices[projection.indptr[row]])
            own, its = (
                side[place] if place < len(side) else None
                for side, place in ((student, row), (teacher, column))
            )
            if own and its and own == its * (len(own) // len(its)):
                found.setdefault(column, {})[len(own) // len(its)] = row
        members = {
            column: dict(sorted(tokens.items()))
            for column, tokens in found.items()
            if len(tokens) > 1
        }
        copies = {
            token: (column, count)
            for column, tokens in members.items()
            for count, token in tokens.items()
        }
        return cls((len(student), len(teacher)), members, copies)

    def of_batch(
        self, alignment: AlignmentBatch, student_labels: torch.Tensor, teacher_labels: torch.Tensor
    ) -> RepeatRows:
        """Look up the rows of a batch, on the CPU; a data loader's work.

        A row counts whose label is a member that is a chunk of its own, in which the teacher writes
        every copy as a token. The teacher's row behind the chunk is read where it has a label.

        Args:
            student_labels: [B, Ts] int64: the token that each position predicts, negative for none.
            teacher_labels: [B, Tt] int64

        Raises:
            LossError: Labels of another shape than the alignment, or outside the vocabularies.
        """
        labels = []
        for side, chunk_id, given, size in (
            ("student", alignment.student_chunk_id, student_labels, self.vocab_sizes[0]),
            ("teacher", alignment.teacher_chunk_id, teacher_labels, self.vocab_sizes[1]),
        ):
            check_labels(side, chunk_id, given, size)
            labels.append(given.numpy().reshape(-1))
        _, behind = places_after(alignment, student_labels, teacher_labels)
        found = _Found()
        for row, chunk in _rows_of_one(alignment):
            column, count = self.copies.get(int(labels[0][row]), (-1, 0))
            if not count:
                continue
            begin, end = alignment.teacher_spans[chunk].tolist()
            if end - begin != count or (labels[1][begin:end] != column).any():
                continue
            steps = [*range(begin + 1, end)]
            if behind.exists[chunk]:
                steps.append(int(behind.row[chunk]))
            found.add(row, chunk, self.members[column], column, steps)
        return found.rows(alignment.chunk_count)


def _rows_of_one(alignment: AlignmentBatch) -> list[tuple[int, int]]:
    """Student rows that are alone in an exact chunk, each with it."""
    chunk = alignment.student_chunk_id.numpy().reshape(-1)
    row = np.flatnonzero(chunk != NO_CHUNK)
    spans = alignment.student_spans.numpy()
    is_alone = (spans[:, 1] - spans[:, 0] == 1) & alignment.is_exact.numpy()
    row = row[is_alone[chunk[row]]]
    return list(zip(row.tolist(), chunk[row].tolist(), strict=True))


class _Found:
    """Rows that were found so far."""

    def __init__(self) -> None:
        self._rows: list[tuple[int, int]] = []
        self._members: list[list[int]] = []
        self._reached: list[list[int]] = []
        self._steps: list[list[int]] = []
        self._pairs: list[tuple[int, int]] = []

    def add(
        self, row: int, chunk: int, members: Mapping[int, int], column: int, steps: Sequence[int]
    ) -> None:
        """Add a row, unless the teacher's rows of ``steps`` reach fewer than two members."""
        reached = [count - 1 if count <= 1 + len(steps) else -1 for count in members]
        if sum(length >= 0 for length in reached) < 2:
            return
        self._rows.append((row, chunk))
        self._members.append(list(members.values()))
        self._reached.append(reached)
        first = len(self._pairs)
        self._pairs += ((step, column) for step in steps)
        self._steps.append(list(range(first, len(self._pairs))))

    def rows(self, chunk_count: int) -> RepeatRows:
        """All that was found."""
        row, chunk = _columns(self._rows)
        teacher_row, teacher_token = _columns(self._pairs)
        return RepeatRows(
            repeats=Repeats(
                student_row=row,
                member=_padded(self._members),
                reached=_padded(self._reached),
                teacher_row=teacher_row,
                teacher_token=teacher_token,
                step=_padded(self._steps),
            ),
            chunk=chunk,
            chunk_count=chunk_count,
        )


def _columns(pairs: list[tuple[int, int]]) -> tuple[torch.Tensor, torch.Tensor]:
    table = torch.tensor(pairs, dtype=torch.int64, device="cpu")
    first, second = table.reshape(-1, 2).T.contiguous()
    return first, second


def _padded(rows: list[list[int]]) -> torch.Tensor:
    """int64 [R, longest], -1 behind each row; at least one column."""
    width = max(map(len, rows), default=1)
    padded = [[*row, *[-1] * (width - len(row))] for row in rows]
    return torch.tensor(padded, dtype=torch.int64, device="cpu").reshape(-1, width)
