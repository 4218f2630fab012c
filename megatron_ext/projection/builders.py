"""Building a projection from two vocabularies alone. V vocabularies Vs and Vt, K top-k.

A student token that the teacher has is one entry of 1. Another is spelled with the teacher's
tokens, piece ``i`` weighing ``0.9 * 0.1**i`` before its row is normalised, because what the student
predicts at once is what the teacher predicts first: ``201`` is ``2``, ``0``, ``1`` with shares
0.9009, 0.0901, 0.0090.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from megatron_ext.projection.entries import check_top_k
from megatron_ext.projection.sparse_projection import SparseProjection
from megatron_ext.projection.speller import Speller
from megatron_ext.projection.token_match import (
    NO_MATCH,
    match_control_tokens,
    match_ordinary_tokens,
)
from megatron_ext.registry import Registry
from megatron_ext.tokenizers.byte_tokenizer import ByteTokenizer

ProjectionMethod = Literal["exact", "retokenized"]

FIRST_PIECE_WEIGHT = 0.9
NEXT_PIECE_FACTOR = 0.1

PROJECTION_METHODS: Registry[Callable[[Speller, Sequence[bytes]], list[list[int]]]] = Registry(
    "projection method"
)
"""How the tokens that the teacher lacks are spelled with those it has: no pieces, an empty row."""

PROJECTION_METHODS.register("exact", lambda speller, tokens: [[] for _ in tokens])
PROJECTION_METHODS.register("retokenized", Speller.spell)


def build_projection(
    student: ByteTokenizer,
    teacher: ByteTokenizer,
    *,
    method: ProjectionMethod = "retokenized",
    top_k: int = 4,
) -> SparseProjection:
    """The projection of a pair; see ``SparseProjection.from_tokenizers``.

    Control tokens are matched by role, then by name; one that the teacher lacks has an empty row.
    """
    spell = PROJECTION_METHODS[method]
    check_top_k(top_k)
    student_bytes = [student.token_bytes(token_id) for token_id in range(student.vocab_size)]
    speller = Speller(teacher)
    matches = match_ordinary_tokens(student_bytes, speller)
    control = np.flatnonzero([token is None for token in student_bytes]).astype(np.int64)
    for student_id, teacher_id in match_control_tokens(student, teacher, control).items():
        matches[student_id] = teacher_id

    is_exact_row = matches != NO_MATCH
    exact_rows = np.flatnonzero(is_exact_row)
    lacking = [row for row, token in enumerate(student_bytes) if token and not is_exact_row[row]]
    pieces = [ids[:top_k] for ids in spell(speller, [student_bytes[row] or b"" for row in lacking])]
    piece_counts = np.array([len(ids) for ids in pieces], dtype=np.int64)
    spelled_rows = np.repeat(np.array(lacking, dtype=np.int64), piece_counts)
    spelled_columns = np.fromiter(chain.from_iterable(pieces), dtype=np.int64)
    return SparseProjection.from_entries(
        np.concatenate([exact_rows, spelled_rows]),
        np.concatenate([matches[exact_rows], spelled_columns]),
        np.concatenate([np.ones(len(exact_rows)), piece_weights(piece_counts)]),
        (student.vocab_size, teacher.vocab_size),
        {
            "method": method,
            "options": json.dumps({"top_k": top_k}),
            **_identity("student", student),
            **_identity("teacher", teacher),
        },
        is_exact_row=is_exact_row,
    )


def _identity(role: str, tokenizer: ByteTokenizer) -> dict[str, str]:
    """What a projection says of the tokenizer it was built for."""
    return {
        f"{role}_fingerprint": tokenizer.fingerprint(),
        f"{role}_vocab_size": str(tokenizer.vocab_size),
    }


def piece_weights(piece_counts: NDArray[np.int64]) -> NDArray[np.float64]:
    """Weight of every piece of every token [sum of counts], before a row is normalised."""
    starts = np.cumsum(piece_counts) - piece_counts
    place = np.arange(piece_counts.sum()) - np.repeat(starts, piece_counts)
    return FIRST_PIECE_WEIGHT * NEXT_PIECE_FACTOR ** place.astype(np.float64)
