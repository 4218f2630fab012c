"""Aligning two streams whose texts differ a little. T tokens, R ranges, N bytes.

One tokenizer composes accents, another folds case, a third drops a character: then the streams
decode to different bytes. Ranges of characters that are equal are found, chunks are made within
them, and what differs is in no chunk and is reported.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megatron_ext.alignment.alignment import Alignment
from megatron_ext.alignment.bridging.segment_alignment import Ranges, Segments, align_segments
from megatron_ext.alignment.bridging.symbol_match import Run, match_symbols
from megatron_ext.alignment.bridging.symbol_row import SymbolRow
from megatron_ext.alignment.control_pairs import ControlClasses
from megatron_ext.alignment.tokens import Tokens


@dataclass(frozen=True, slots=True)
class TextBridge:
    """Which bytes of two texts are the same text."""

    equal: Segments
    """R ranges of whole characters that are equal, in order."""

    student_bytes: int
    """N of the student's text."""

    teacher_bytes: int

    @property
    def student_residual_bytes(self) -> int:
        """Bytes of the student's text in no equal range."""
        return self.student_bytes - int(np.diff(self.equal.student).sum())

    @property
    def teacher_residual_bytes(self) -> int:
        """Bytes of the teacher's text in no equal range."""
        return self.teacher_bytes - int(np.diff(self.equal.teacher).sum())

    @property
    def differences(self) -> Segments:
        """Ranges that differ, in order; of one side a range can be empty."""
        student = _between(self.equal.student, self.student_bytes)
        teacher = _between(self.equal.teacher, self.teacher_bytes)
        differs = (np.diff(student)[:, 0] > 0) | (np.diff(teacher)[:, 0] > 0)
        return Segments(student[differs], teacher[differs])


@dataclass(frozen=True)
class BridgedAlignment(Alignment):
    """An alignment of streams that decode to different bytes."""

    bridge: TextBridge
    """What is equal in them."""


def bridge_texts(student: bytes, teacher: bytes) -> TextBridge:
    """The characters that two texts have in common, in order."""
    rows = SymbolRow.of(student), SymbolRow.of(teacher)
    return _bridge(*rows, match_symbols(rows[0].values, rows[1].values))


def align_bridged(
    student: Tokens,
    teacher: Tokens,
    student_bytes: bytes,
    teacher_bytes: bytes,
    classes: ControlClasses | None = None,
) -> BridgedAlignment:
    """Align two streams of different bytes through what is equal in them.

    Args:
        student: Tokens and their ends in ``student_bytes``.
        teacher: The same of the teacher.
        student_bytes: What the student's tokens decode to.
        teacher_bytes: What the teacher's do.
        classes: Control tokens of one class are chunks where they stand between the same
            characters. None leaves all of them out.
    """
    student_row, teacher_row = SymbolRow.of(student_bytes), SymbolRow.of(teacher_bytes)
    student_ends, teacher_ends = student.ends, teacher.ends
    if classes is not None:
        student_row, student_ends = student_row.with_control(student, classes.student)
        teacher_row, teacher_ends = teacher_row.with_control(teacher, classes.teacher)
    runs = match_symbols(student_row.values, teacher_row.values)
    alignment = align_segments(
        student_ends,
        teacher_ends,
        Segments(
            student_row.ranges(runs, 0, control_width=1),
            teacher_row.ranges(runs, 1, control_width=1),
        ),
    )
    return BridgedAlignment(
        student_spans=alignment.student_spans,
        teacher_spans=alignment.teacher_spans,
        is_exact=alignment.is_exact,
        student_chunk_id=alignment.student_chunk_id,
        teacher_chunk_id=alignment.teacher_chunk_id,
        bridge=_bridge(student_row, teacher_row, runs),
    )


def _bridge(student: SymbolRow, teacher: SymbolRow, runs: Sequence[Run]) -> TextBridge:
    ranges = Segments(student.ranges(runs, 0), teacher.ranges(runs, 1))
    has_bytes = np.diff(ranges.student)[:, 0] > 0
    equal = Segments(ranges.student[has_bytes], ranges.teacher[has_bytes]).joined()
    return TextBridge(equal, student.byte_count, teacher.byte_count)


def _between(ranges: Ranges, total: int) -> Ranges:
    """[R + 1, 2] what lies before, between and behind ranges."""
    bounds = np.concatenate([np.zeros(1, np.int64), ranges.reshape(-1), np.array([total])])
    pairs: Ranges = bounds.reshape(-1, 2)
    return pairs
