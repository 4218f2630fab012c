"""An aligned text as bytes. Ts student tokens, Tt teacher tokens.

A record is a header of little-endian uint32 (1 for a conversation, Ts, the bytes of a student id,
the bytes of a width, and for each teacher Tt and the bytes of an id), then the student's ids and
widths, then for each teacher its ids and the marks of both sides. A conversation has, behind the
student's widths and behind each teacher's marks, which tokens are trained. Each field is filled up
to a multiple of four bytes, so that records one after another are read without copying. With one
teacher and vocabularies above 65,536 that is 6 bytes a student token and 5 a teacher token.

Shape letters: D records, H numbers of a header, F fields.
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
    fields = [ids, widths, _written(text.trained)]
    for teacher in text.teachers:
        teacher_ids = _narrow(teacher.ids)
        header += [len(teacher_ids), teacher_ids.itemsize]
        fields += [teacher_ids, teacher.student_marks, teacher.teacher_marks]
        fields.append(_written(teacher.trained))
    parts = [np.array(header, "<u4").tobytes()]
    for field in fields:
        parts += [field.tobytes(), bytes(-field.nbytes % _ALIGNMENT)]
    return b"".join(parts)


def from_records(records: Sequence[bytes], teacher_count: int) -> list[AlignedText]:
    """The texts of D records; their arrays point into one copy of all of them."""
    content = b"".join(records)
    views = {kind.itemsize: np.frombuffer(content, kind) for kind in _SMALLEST}
    begins = np.cumsum([0, *map(len, records)])[:-1]
    places = np.arange(4 + 2 * teacher_count)
    numbers = np.frombuffer(content, "<u4")
    headers = numbers[begins[:, None] // _ALIGNMENT + places].astype(np.int64)
    counts, sizes = _fields(headers)
    bytes_taken = -(-counts * sizes // _ALIGNMENT) * _ALIGNMENT
    behind = begins + _ALIGNMENT * len(places) + bytes_taken.cumsum(axis=0)
    firsts = (behind - bytes_taken) // sizes
    columns = (firsts.T.tolist(), (firsts + counts).T.tolist(), sizes.T.tolist())
    return [
        _text([views[size][first:stop] for first, stop, size in zip(*row, strict=True)], is_talk)
        for *row, is_talk in zip(*columns, headers[:, 0].tolist(), strict=True)
    ]


def _fields(headers: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Numbers and bytes of a number of all fields, in their order [F, D], from headers [D, H]."""
    is_conversation, count, id_size, width_size, *teachers = headers.T
    one = np.ones_like(count)
    fields = [(count, id_size), (count, width_size), (count * is_conversation, one)]
    for its_count, its_size in zip(teachers[::2], teachers[1::2], strict=True):
        fields += [(its_count, its_size), (count, one), (its_count, one)]
        fields.append((its_count * is_conversation, one))
    counts, sizes = zip(*fields, strict=True)
    return np.stack(counts), np.stack(sizes)


def _text(fields: list[NDArray[Any]], is_conversation: int) -> AlignedText:
    ids, widths, trained, *others = fields
    teachers = []
    for at in range(0, len(others), 4):
        its_ids, marks, its_marks, its_trained = others[at : at + 4]
        its = TeacherTokens(its_ids, marks, its_marks, _read(its_trained, is_conversation))
        teachers.append(its)
    return AlignedText(ids, widths, tuple(teachers), True, _read(trained, is_conversation))


def _written(trained: Trained) -> NDArray[Any]:
    return np.zeros(0, np.bool_) if trained is None else trained


def _read(trained: NDArray[Any], is_conversation: int) -> Trained:
    return trained.view(np.bool_) if is_conversation else None


def _narrow(values: Ids) -> Ids:
    """``values``, none negative, in the smallest kind of integer that holds them."""
    largest = int(values.max(initial=0))
    return values.astype(next(kind for kind in _SMALLEST if largest <= np.iinfo(kind).max))
