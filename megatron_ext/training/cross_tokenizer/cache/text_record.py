"""An aligned text as bytes. Ts student tokens, Tt teacher tokens.

A record is a row of little-endian uint32 (Ts, the bytes of a student id, the bytes of a width, and
for each teacher Tt and the bytes of an id), then the student's ids and widths, then for each
teacher its ids and, for both sides, a bit a token for being in a chunk and a bit for beginning one.
With one teacher and vocabularies above 65,536 that is 5.25 bytes a student token and 4.25 a teacher
token.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from megatron_ext.constants import NO_CHUNK
from megatron_ext.training.cross_tokenizer.aligning.aligned_text import (
    AlignedText,
    Ids,
    TeacherTokens,
)

_SMALLEST: Final = (np.dtype("<u1"), np.dtype("<u2"), np.dtype("<i4"))


def to_record(text: AlignedText) -> bytes:
    """The record of a whole text."""
    ids, widths = _narrow(text.student_ids), _narrow(text.student_widths)
    header = [len(ids), ids.itemsize, widths.itemsize]
    parts = [ids.tobytes(), widths.tobytes()]
    for teacher in text.teachers:
        teacher_ids = _narrow(teacher.ids)
        header += [len(teacher_ids), teacher_ids.itemsize]
        parts.append(teacher_ids.tobytes())
        for chunk_id in (teacher.student_chunk_id, teacher.teacher_chunk_id):
            parts += _to_bits(chunk_id)
    return b"".join([np.array(header, "<u4").tobytes(), *parts])


def from_record(record: bytes, teacher_count: int) -> AlignedText:
    """The text of a record; its arrays point into it where they can."""
    header = np.frombuffer(record, "<u4", 3 + 2 * teacher_count).tolist()
    fields = _Fields(record, 4 * len(header))
    count, id_size, width_size = header[:3]
    ids, widths = fields.numbers(count, id_size), fields.numbers(count, width_size)
    teachers = []
    for index in range(teacher_count):
        its_count, its_size = header[3 + 2 * index : 5 + 2 * index]
        its_ids = fields.numbers(its_count, its_size)
        teachers.append(TeacherTokens(its_ids, fields.chunk_id(count), fields.chunk_id(its_count)))
    return AlignedText(ids, widths, tuple(teachers))


class _Fields:
    """Reads a record from one place on."""

    def __init__(self, record: bytes, offset: int) -> None:
        self._record = record
        self._offset = offset

    def numbers(self, count: int, size: int) -> Ids:
        kind = next(kind for kind in _SMALLEST if kind.itemsize == size)
        return self._next(kind, count).astype(np.int32, copy=False)

    def chunk_id(self, count: int) -> Ids:
        inside, begins = (
            np.unpackbits(self._next(np.dtype("u1"), -(-count // 8)), count=count) for _ in range(2)
        )
        counted = begins.cumsum(dtype=np.int32) - np.int32(1)
        return np.where(inside, counted, np.int32(NO_CHUNK))

    def _next(self, kind: np.dtype[Any], count: int) -> NDArray[Any]:
        values = np.frombuffer(self._record, kind, count, self._offset)
        self._offset += values.nbytes
        return values


def _narrow(values: NDArray[np.integer[Any]]) -> NDArray[np.integer[Any]]:
    """``values``, none negative, in the smallest kind of integer that holds them."""
    largest = int(values.max(initial=0))
    return values.astype(next(kind for kind in _SMALLEST if largest <= np.iinfo(kind).max))


def _to_bits(chunk_id: Ids) -> Iterator[bytes]:
    """Which tokens are in a chunk and which begin one, whose ids ascend from 0 without gaps."""
    inside = chunk_id != NO_CHUNK
    begins = np.zeros(len(chunk_id), np.bool_)
    within = chunk_id[inside]
    begins[inside] = np.diff(within, prepend=np.int32(NO_CHUNK)) > 0
    yield np.packbits(inside).tobytes()
    yield np.packbits(begins).tobytes()
