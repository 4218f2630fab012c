"""Pairs of control tokens with the same meaning in two vocabularies. T tokens, P pairs.

A control token (no bytes) is paired by its role, else by its name: ``<s>`` and
``<|begin_of_text|>`` both begin a sequence.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray

from megatron_ext.alignment.byte_alignment import ByteEnds, Indices
from megatron_ext.tokenizers.base import ByteTokenizer
from megatron_ext.tokenizers.token_bytes import TokenBytes
from megatron_ext.tokenizers.token_ids import IdArray

Role = Literal["bos", "eos", "unk", "pad"]

ROLES: Final[tuple[Role, ...]] = ("bos", "eos", "unk", "pad")
"""In order of precedence, where one id has several roles."""

NO_CLASS: Final = -1


def match_control_tokens(
    student: ByteTokenizer,
    teacher: ByteTokenizer,
    control_ids: NDArray[np.int64],
) -> dict[int, int]:
    """Teacher id of each student control token: the one of its role, else the one of its name.

    An ordinary token with the name of a control token is not matched.
    """
    matches: dict[int, int] = {}
    is_control = set(control_ids.tolist())
    for student_id, teacher_id in _same_role(student, teacher, ROLES):
        if student_id in is_control:
            matches.setdefault(student_id, teacher_id)
    for student_id in control_ids.tolist():
        namesake = None if student_id in matches else _same_name(student, teacher, student_id)
        if namesake is not None:
            matches[student_id] = namesake
    return matches


@dataclass(frozen=True, slots=True, eq=False)
class ControlClasses:
    """Classes of control tokens of both sides; tokens of one class have the same meaning."""

    student: NDArray[np.int32]
    """[Vs] class of each id, ``NO_CLASS`` where it is not paired."""

    teacher: NDArray[np.int32]
    """[Vt]"""

    @classmethod
    def of(cls, student: ByteTokenizer, teacher: ByteTokenizer) -> ControlClasses:
        """The classes of a pair of tokenizers.

        An id with two roles (GPT-2 begins and ends with ``<|endoftext|>``) is paired with both ids
        of the other side. Padding has no meaning, so it is paired only where it has another role.
        """
        pairs = list(_same_role(student, teacher, ("bos", "eos", "unk")))
        pads = student.pad_id, teacher.pad_id
        for student_id in np.flatnonzero(TokenBytes.of(student).is_control).tolist():
            teacher_id = _same_name(student, teacher, student_id)
            if teacher_id is not None and (student_id, teacher_id) != pads:
                pairs.append((student_id, teacher_id))
        sizes = student.vocab_size, teacher.vocab_size
        classes = _connected(pairs, sizes)
        for side, tokenizer in zip(classes, (student, teacher), strict=True):
            ids = np.flatnonzero(side != NO_CLASS).tolist()
            side[[i for i in ids if tokenizer.token_bytes(i) is not None]] = NO_CLASS
        return cls(*classes)

    def pair(
        self,
        student_ids: IdArray,
        student_ends: ByteEnds,
        teacher_ids: IdArray,
        teacher_ends: ByteEnds,
    ) -> tuple[Indices, Indices]:
        """Pairs of control tokens of two streams with the same meaning at the same byte.

        Of several of one class at one byte, the first is paired with the first, the second with the
        second. Pairs that cross each other (BOS, EOS against EOS, BOS) are dropped.

        Args:
            student_ids: [Ts]
            student_ends: [Ts] checked byte ends; only tokens that cover no byte are paired.
            teacher_ids: [Tt]
            teacher_ends: [Tt]

        Returns:
            Ascending indices [P] of student tokens and [P] of the teacher tokens they pair with.
        """
        student_at = _paired_kinds(student_ids, student_ends, self.student)
        teacher_at = _paired_kinds(teacher_ids, teacher_ends, self.teacher)
        if not len(student_at) or not len(teacher_at):
            return student_at[:0], teacher_at[:0]
        class_count = int(self.student.max()) + 1
        student_place = (
            student_ends[student_at] * class_count + self.student[student_ids[student_at]]
        )
        teacher_place = (
            teacher_ends[teacher_at] * class_count + self.teacher[teacher_ids[teacher_at]]
        )
        places = np.concatenate([student_place, teacher_place])
        student_number, teacher_number = np.split(
            np.unique(places, return_inverse=True)[1], [len(student_at)]
        )
        count = max(len(student_number), len(teacher_number))
        _, first, second = np.intersect1d(
            student_number * count + _occurrence(student_number),
            teacher_number * count + _occurrence(teacher_number),
            assume_unique=True,
            return_indices=True,
        )
        order = np.argsort(first)
        return _uncrossed(student_at[first[order]], teacher_at[second[order]])


def _same_role(
    student: ByteTokenizer, teacher: ByteTokenizer, roles: tuple[Role, ...]
) -> Iterator[tuple[int, int]]:
    for role in roles:
        student_id: int | None = getattr(student, f"{role}_id")
        teacher_id: int | None = getattr(teacher, f"{role}_id")
        if student_id is not None and teacher_id is not None:
            yield student_id, teacher_id


def _same_name(student: ByteTokenizer, teacher: ByteTokenizer, student_id: int) -> int | None:
    name = student.id_to_token(student_id)
    if not name:
        return None
    try:
        teacher_id = teacher.token_to_id(name)
    except KeyError:
        return None
    return teacher_id if teacher.token_bytes(teacher_id) is None else None


def _connected(
    pairs: list[tuple[int, int]], sizes: tuple[int, int]
) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """A number for each set of ids that pairs connect, on both sides."""
    classes: tuple[NDArray[np.int32], NDArray[np.int32]] = (
        np.full(sizes[0], NO_CLASS, dtype=np.int32),
        np.full(sizes[1], NO_CLASS, dtype=np.int32),
    )
    for number, (student_id, teacher_id) in enumerate(pairs):
        for old in (classes[0][student_id], classes[1][teacher_id]):
            if old != NO_CLASS:
                for side in classes:
                    side[side == old] = number
        classes[0][student_id] = classes[1][teacher_id] = number
    return classes


def _paired_kinds(ids: IdArray, ends: ByteEnds, classes: NDArray[np.int32]) -> Indices:
    """Indices of the tokens that cover no byte and have a class."""
    covers_nothing = np.empty(len(ends), dtype=np.bool_)
    covers_nothing[:1] = ends[:1] == 0
    np.equal(ends[1:], ends[:-1], out=covers_nothing[1:])
    at = np.flatnonzero(covers_nothing)
    is_paired: NDArray[np.bool_] = classes[ids[at]] != NO_CLASS
    return at[is_paired]


def _occurrence(numbers: NDArray[np.intp]) -> NDArray[np.intp]:
    """Number of equal numbers before each."""
    order = np.argsort(numbers, kind="stable")
    ordered = numbers[order]
    starts = np.flatnonzero(np.append(True, ordered[1:] != ordered[:-1]))
    sizes = np.diff(np.append(starts, len(ordered)))
    occurrence = np.empty(len(numbers), dtype=np.intp)
    occurrence[order] = np.arange(len(numbers)) - np.repeat(starts, sizes)
    return occurrence


def _uncrossed(student_at: Indices, teacher_at: Indices) -> tuple[Indices, Indices]:
    """The pairs, by ascending student index, that cross no other pair."""
    before = np.maximum.accumulate(teacher_at)
    after = np.minimum.accumulate(teacher_at[::-1])[::-1]
    straight = (teacher_at == before) & (teacher_at == after)
    return student_at[straight], teacher_at[straight]
