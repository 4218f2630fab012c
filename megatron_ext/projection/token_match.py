"""Which teacher token is a student token. V vocabularies Vs and Vt."""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from megatron_ext.projection.speller import Speller
from megatron_ext.tokenizers.byte_tokenizer import ByteTokenizer

NO_MATCH: Final = -1

_ROLES = ("bos", "eos", "unk", "pad")
"""In order of precedence, where one id has several roles."""


def match_ordinary_tokens(student: Speller, teacher: Speller) -> NDArray[np.int64]:
    """Teacher id [Vs] with the same bytes as each student id, ``NO_MATCH`` where it has none."""
    ids = (teacher.id_of(token) if token else None for token in student.tokens)
    return np.fromiter(
        (NO_MATCH if token_id is None else token_id for token_id in ids),
        dtype=np.int64,
        count=len(student.tokens),
    )


def emitted_tokens(speller: Speller) -> NDArray[np.bool_]:
    """[V] ids that have bytes, and of several ids with the same bytes only the emitted one."""
    emitted = np.zeros(len(speller.tokens), dtype=np.bool_)
    emitted[list(speller.emitted_ids)] = True
    return emitted


def match_control_tokens(
    student: ByteTokenizer,
    teacher: ByteTokenizer,
    control_ids: NDArray[np.int64],
) -> dict[int, int]:
    """Teacher id of each student control token: the one of its role, else the one of its name.

    An ordinary token that happens to show like a control token is not matched by name.
    """
    matches: dict[int, int] = {}
    is_control = set(control_ids.tolist())
    for role in _ROLES:
        student_id: int | None = getattr(student, f"{role}_id")
        teacher_id: int | None = getattr(teacher, f"{role}_id")
        if student_id in is_control and student_id is not None and teacher_id is not None:
            matches.setdefault(student_id, teacher_id)
    for student_id in control_ids.tolist():
        name = student.id_to_token(student_id)
        if student_id in matches or not name:
            continue
        try:
            teacher_id = teacher.token_to_id(name)
        except KeyError:
            continue
        if teacher.token_bytes(teacher_id) is None:
            matches[student_id] = teacher_id
    return matches
