"""Builder of a projection from two tokenizers alone. Vs Vt vocabularies, K top-k.

A student token that the teacher has is one entry of 1. Another is spelled with the teacher's
tokens, piece ``i`` with weight ``decay**i`` before its row is normalised, because the student's
one prediction corresponds to the teacher's first: ``201`` is ``2``, ``0``, ``1`` with shares
0.9009, 0.0901, 0.0090.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from itertools import chain
from typing import Final

import numpy as np
from numpy.typing import NDArray

from megatron_ext.alignment.control_pairs import match_control_tokens
from megatron_ext.constants import __version__
from megatron_ext.projection.compressed_rows import Entries, concatenated
from megatron_ext.projection.nearest_tokens import most_similar, nearest_tokens
from megatron_ext.projection.projection_matrix import ProjectionMatrix
from megatron_ext.projection.speller import ProjectionOptions, Speller
from megatron_ext.registry import Registry
from megatron_ext.tokenizers.base import ByteTokenizer

NO_MATCH: Final = -1


def match_ordinary_tokens(student: Speller, teacher: Speller) -> NDArray[np.int64]:
    """Teacher id [Vs] with the same bytes as each student id, ``NO_MATCH`` where there is none."""
    ids = (teacher.id_of(token) if token else None for token in student.tokens)
    return np.fromiter(
        (NO_MATCH if token_id is None else token_id for token_id in ids),
        dtype=np.int64,
        count=len(student.tokens),
    )


def emitted_tokens(speller: Speller) -> NDArray[np.bool_]:
    """Mask [V] of ids with bytes; of several ids with the same bytes only the emitted one."""
    emitted = np.zeros(len(speller.tokens), dtype=np.bool_)
    emitted[list(speller.emitted_ids)] = True
    return emitted


Spellings = list[list[int]]

PROJECTION_METHODS: Registry[Callable[[Speller, Sequence[bytes]], Spellings]] = Registry(
    "projection method"
)
"""Speller of the tokens that the teacher lacks, by method: no pieces give an empty row."""

PROJECTION_METHODS.register("exact", lambda speller, tokens: [[] for _ in tokens])
PROJECTION_METHODS.register("retokenized", Speller.spell)
PROJECTION_METHODS.register(
    "first_piece", lambda speller, tokens: [ids[:1] for ids in speller.spell(tokens)]
)
PROJECTION_METHODS.register("mined", nearest_tokens)


def build_matrix(
    student: ByteTokenizer, teacher: ByteTokenizer, options: ProjectionOptions | None = None
) -> ProjectionMatrix:
    """Build the projection of a pair.

    Control tokens are matched by role, then by name, then, if the options say so, by the similarity
    of names. One without a match has an empty row.

    Raises:
        UnknownNameError: Unknown method.
    """
    options = ProjectionOptions() if options is None else options
    spell = PROJECTION_METHODS[options.method]
    students, teachers = Speller(student), Speller(teacher)
    matches = match_ordinary_tokens(students, teachers)
    is_emitted = emitted_tokens(students)
    for student_id, teacher_id in match_control_tokens(
        student, teacher, students.control_ids
    ).items():
        matches[student_id], is_emitted[student_id] = teacher_id, True

    matched = np.flatnonzero(matches != NO_MATCH)
    lacking = _lacking(students, matches == NO_MATCH)
    parts = [
        Entries(matched, matches[matched], np.ones(len(matched))),
        _spelled(lacking, spell(teachers, _bytes_of(students, lacking)), options),
    ]
    if options.reverse_pass:
        parts.append(_reverse_spelled(students, teachers, matches, options))
    if options.control_similarity is not None:
        parts.append(_similar_controls(student, teacher, students, teachers, matches, options))
    projection = ProjectionMatrix.from_entries(
        *concatenated(parts),
        (student.vocab_size, teacher.vocab_size),
        is_exact_row=is_emitted & (matches != NO_MATCH),
    )
    return replace(
        projection.top_k(options.row_limit), metadata=build_metadata(student, teacher, options)
    )


def build_metadata(
    student: ByteTokenizer, teacher: ByteTokenizer, options: ProjectionOptions
) -> dict[str, str]:
    """Metadata of the building of a projection."""
    given = asdict(options)
    return {
        "method": given.pop("method"),
        "options": json.dumps(given),
        **identity(student, teacher),
    }


def identity(student: ByteTokenizer, teacher: ByteTokenizer) -> dict[str, str]:
    """Metadata of the pair that a projection was built for, and of its builder."""
    return {
        "builder": f"megatron-ext {__version__}",
        "student_fingerprint": student.fingerprint(),
        "student_vocab_size": str(student.vocab_size),
        "teacher_fingerprint": teacher.fingerprint(),
        "teacher_vocab_size": str(teacher.vocab_size),
    }


def piece_weights(piece_counts: NDArray[np.int64], decay: float) -> NDArray[np.float64]:
    """Weight of every piece of every token [sum of counts]; those of a token sum to 1."""
    starts = np.cumsum(piece_counts) - piece_counts
    owner = np.repeat(np.arange(len(piece_counts)), piece_counts)
    weights = decay ** (np.arange(len(owner)) - starts[owner]).astype(np.float64)
    sums = np.bincount(owner, weights=weights, minlength=len(piece_counts))
    return weights / sums[owner]


def _lacking(speller: Speller, unmatched: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Unmatched ids that have bytes, ascending."""
    has_bytes = np.array([bool(token) for token in speller.tokens], dtype=np.bool_)
    return np.flatnonzero(unmatched & has_bytes).astype(np.int64)


def _bytes_of(speller: Speller, ids: NDArray[np.int64]) -> list[bytes]:
    return [speller.tokens[token_id] or b"" for token_id in ids.tolist()]


def _spelled(ids: NDArray[np.int64], spellings: Spellings, options: ProjectionOptions) -> Entries:
    """One entry for each piece: the spelled token, the piece and its weight."""
    cut = [pieces[: options.piece_limit] for pieces in spellings]
    counts = np.fromiter(map(len, cut), dtype=np.int64, count=len(cut))
    return Entries(
        np.repeat(ids, counts),
        np.fromiter(chain.from_iterable(cut), dtype=np.int64, count=int(counts.sum())),
        piece_weights(counts, options.decay),
    )


def _reverse_spelled(
    students: Speller, teachers: Speller, matches: NDArray[np.int64], options: ProjectionOptions
) -> Entries:
    """Entries of the teacher tokens that the student lacks, in rows that have no match."""
    unmatched = np.ones(len(teachers.tokens), dtype=np.bool_)
    unmatched[matches[matches != NO_MATCH]] = False
    lacking = _lacking(teachers, unmatched & emitted_tokens(teachers))
    columns, rows, weights = _spelled(
        lacking, students.spell(_bytes_of(teachers, lacking)), options
    )
    open_rows = matches[rows] == NO_MATCH
    return Entries(rows[open_rows], columns[open_rows], weights[open_rows])


def _similar_controls(
    student: ByteTokenizer,
    teacher: ByteTokenizer,
    students: Speller,
    teachers: Speller,
    matches: NDArray[np.int64],
    options: ProjectionOptions,
) -> Entries:
    """Entries of control tokens without a match, weighted by the similarity of names."""
    assert options.control_similarity is not None
    candidates = {i: teacher.id_to_token(i) for i in teachers.control_ids.tolist()}
    candidates = {token_id: name for token_id, name in candidates.items() if name}
    similar = [
        (student_id, teacher_id, similarity)
        for student_id in students.control_ids.tolist()
        if matches[student_id] == NO_MATCH and student.id_to_token(student_id)
        for teacher_id, similarity in most_similar(
            student.id_to_token(student_id),
            candidates,
            min_similarity=options.control_similarity,
            most=options.row_limit,
        ).items()
    ]
    table = np.array(similar, dtype=np.float64).reshape(-1, 3)
    return Entries(table[:, 0].astype(np.int64), table[:, 1].astype(np.int64), table[:, 2])
