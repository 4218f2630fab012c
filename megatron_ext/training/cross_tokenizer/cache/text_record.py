"""An aligned text as bytes. Ts student tokens, Tt teacher tokens.

A record is a header of little-endian uint32 (1 for a conversation, Ts, the bytes of a student id,
the bytes of a width, and for each teacher Tt and the bytes of an id), then the student's ids and
widths, then for each teacher its ids and the marks of both sides. A conversation has, behind the
student's widths and behind each teacher's marks, which tokens are trained. Each field is filled up
to a multiple of four bytes, so that records one after another are read without copying. With one
teacher and vocabularies above 65,536 that is 6 bytes a student token and 5 a teacher token.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from megatron_ext.training.cross_tokenizer.aligning.aligned_text import (
    AlignedText,
    Ids,
    TeacherTokens,
    Trained,
)

_SMALLEST: Final = (np.dtype("<u1"), np.dtype("<u2"), np.dtype("<i4"))
_ALIGNMENT: Final = 4


def to_record(text: AlignedText) -> bytes:
    """The record of a whole text."""
    ids, widths = _narrow(text.student_ids), _narrow(text.student_widths)
    header = [text.is_conversation, len(ids), ids.itemsize, widths.itemsize]
    fields = [ids, widths, *_written(text.trained)]
    for teacher in text.teachers:
        teacher_ids = _narrow(teacher.ids)
        header += [len(teacher_ids), teacher_ids.itemsize]
        fields += [teacher_ids, teacher.student_marks, teacher.teacher_marks]
        fields += _written(teacher.trained)
    parts = [np.array(header, "<u4").tobytes()]
    for field in fields:
        parts += [field.tobytes(), bytes(-field.nbytes % _ALIGNMENT)]
    return b"".join(parts)


def from_records(records: Sequence[bytes], teacher_count: int) -> list[AlignedText]:
    """The texts of records; their arrays point into one copy of all of them."""
    fields = _Fields(b"".join(records))
    return [_text(fields, teacher_count) for _ in records]


def _text(fields: _Fields, teacher_count: int) -> AlignedText:
    is_conversation, count, id_size, width_size, *others = fields.header(4 + 2 * teacher_count)
    ids, widths = fields.next(count, id_size), fields.next(count, width_size)
    trained = fields.trained(count) if is_conversation else None
    teachers = []
    for its_count, its_size in zip(others[::2], others[1::2], strict=True):
        its_ids = fields.next(its_count, its_size)
        marks, its_marks = fields.next(count, 1), fields.next(its_count, 1)
        its_trained = fields.trained(its_count) if is_conversation else None
        teachers.append(TeacherTokens(its_ids, marks, its_marks, its_trained))
    return AlignedText(ids, widths, tuple(teachers), trained=trained)


class _Fields:
    """Reads fields one after another."""

    def __init__(self, content: bytes) -> None:
        self._header = np.frombuffer(content, "<u4")
        self._of_size = {kind.itemsize: np.frombuffer(content, kind) for kind in _SMALLEST}
        self._offset = 0

    def header(self, count: int) -> list[int]:
        first = self._offset // _ALIGNMENT
        self._offset += _ALIGNMENT * count
        numbers: list[int] = self._header[first : first + count].tolist()
        return numbers

    def next(self, count: int, size: int) -> NDArray[Any]:
        first = self._offset // size
        self._offset += -(-count * size // _ALIGNMENT) * _ALIGNMENT
        return self._of_size[size][first : first + count]

    def trained(self, count: int) -> NDArray[np.bool_]:
        return self.next(count, 1).view(np.bool_)


def _narrow(values: Ids) -> Ids:
    """``values``, none negative, in the smallest kind of integer that holds them."""
    largest = int(values.max(initial=0))
    return values.astype(next(kind for kind in _SMALLEST if largest <= np.iinfo(kind).max))


def _written(trained: Trained) -> list[NDArray[Any]]:
    return [] if trained is None else [trained]
