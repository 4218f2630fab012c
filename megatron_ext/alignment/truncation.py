"""Cutting both sides of a text at one byte, so that they fit their models. T tokens, C chunks."""

from __future__ import annotations

from megatron_ext.alignment.alignment import Alignment
from megatron_ext.alignment.byte_alignment import ByteEnds
from megatron_ext.alignment.tokens import AlignedTokens
from megatron_ext.errors import AlignmentError


def truncate(
    aligned: AlignedTokens,
    *,
    student_length: int | None = None,
    teacher_length: int | None = None,
) -> AlignedTokens:
    """The first chunks of a text, as many as fit both lengths; both sides end with the same byte.

    What stands before the first byte (BOS) stays. What stands behind the last (EOS) stays where the
    whole text does, as far as it fits; where the text is cut it goes, because the text does not end
    there. Bytes behind the last common boundary, which one side alone has, go too.

    Args:
        aligned: Both sides.
        student_length: Most student tokens; None for any number.
        teacher_length: Most teacher tokens.

    Raises:
        AlignmentError: A length below 1.
    """
    student, teacher, alignment = aligned
    lengths = (
        _checked_length(student_length, len(student.ids), side="student"),
        _checked_length(teacher_length, len(teacher.ids), side="teacher"),
    )
    kept = min(
        int(alignment.student_spans[:, 1].searchsorted(lengths[0], side="right")),
        int(alignment.teacher_spans[:, 1].searchsorted(lengths[1], side="right")),
    )
    is_whole = kept == alignment.chunk_count and _last(student.ends) == _last(teacher.ends)
    if is_whole:
        counts = len(student.ids), len(teacher.ids)
    elif kept:
        counts = (
            int(alignment.student_spans[kept - 1, 1]),
            int(alignment.teacher_spans[kept - 1, 1]),
        )
    else:
        counts = _leading(student.ends), _leading(teacher.ends)
    counts = min(counts[0], lengths[0]), min(counts[1], lengths[1])
    return AlignedTokens(
        student.head(counts[0]),
        teacher.head(counts[1]),
        Alignment(
            student_spans=alignment.student_spans[:kept],
            teacher_spans=alignment.teacher_spans[:kept],
            is_exact=alignment.is_exact[:kept],
            student_chunk_id=alignment.student_chunk_id[: counts[0]],
            teacher_chunk_id=alignment.teacher_chunk_id[: counts[1]],
        ),
    )


def _checked_length(length: int | None, count: int, *, side: str) -> int:
    if length is not None and length < 1:
        raise AlignmentError(
            f"{side}_length holds no token", got=length, expected="at least 1 token"
        )
    return count if length is None else length


def _last(ends: ByteEnds) -> int:
    return int(ends[-1]) if len(ends) else 0


def _leading(ends: ByteEnds) -> int:
    """Tokens before the first byte."""
    return int(ends.searchsorted(0, side="right"))
