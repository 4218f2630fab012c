"""Token streams, and alignments of tokens that spell other bytes than they cover.

T tokens, C chunks.

A tokenizer may normalise a text before it cuts it. Byte ends then say which bytes of the text a
token stands for, not which bytes it has: a decomposed character becomes several tokens, of which
the last covers it, and a lower-case letter covers the capital.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from itertools import accumulate
from typing import Any, Final, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from megatron_ext.alignment.alignment import Alignment, spans_of
from megatron_ext.alignment.byte_alignment import ByteEnds, Indices, check_byte_ends
from megatron_ext.constants import NO_CHUNK
from megatron_ext.errors import AlignmentError
from megatron_ext.tokenizers.base import ByteTokenizer
from megatron_ext.tokenizers.token_bytes import TokenBytes
from megatron_ext.tokenizers.token_ids import IdArray

Ids = Sequence[int] | IdArray


class Tokens(NamedTuple):
    """The tokens of one side."""

    ids: IdArray
    """[T] int32"""

    ends: ByteEnds
    """[T] int64 byte ends, non-decreasing."""

    spells_text: bool = False
    """Every token is known to spell exactly the bytes that it covers."""

    @classmethod
    def of_stream(cls, ids: Ids, tokenizer: ByteTokenizer, *, side: str) -> Tokens:
        """A given stream, with its ends in the bytes that it decodes to.

        Raises:
            AlignmentError: An id is outside the vocabulary.
        """
        checked = checked_ids(ids, tokenizer.vocab_size, side=side)
        return cls(checked, tokenizer.byte_ends(checked), spells_text=True)

    @classmethod
    def checked(cls, ids: Ids, ends: ByteEnds, vocab_size: int, *, side: str) -> Tokens:
        """Ids and their ends as a caller gives them.

        Raises:
            AlignmentError: They differ in number, an id is outside the vocabulary, or ends go
                backwards.
        """
        tokens = cls(checked_ids(ids, vocab_size, side=side), check_byte_ends(ends, side=side)[0])
        if len(tokens.ids) != len(tokens.ends):
            raise AlignmentError(
                f"{side} ids and byte ends differ in number",
                got=f"{len(tokens.ids)} ids and {len(tokens.ends)} ends",
                fix="pass both as encode_with_byte_ends returns them",
            )
        return tokens

    @property
    def empty(self) -> Indices:
        """Tokens that cover no byte, ascending."""
        empty = np.flatnonzero(self.ends[1:] == self.ends[:-1]) + 1
        return np.append(0, empty) if len(self.ends) and not self.ends[0] else empty

    def head(self, count: int) -> Tokens:
        """The first ``count`` tokens."""
        return Tokens(self.ids[:count], self.ends[:count], self.spells_text)


class AlignedTokens(NamedTuple):
    """Both sides of one text."""

    student: Tokens
    teacher: Tokens
    alignment: Alignment


def checked_ids(ids: Ids, vocab_size: int, *, side: str) -> IdArray:
    """``ids`` as int32 [T], each inside the vocabulary.

    Raises:
        AlignmentError: They are not one row of integers, or one is outside the vocabulary.
    """
    array = np.asarray(ids)
    if array.ndim != 1 or (array.size and not np.issubdtype(array.dtype, np.integer)):
        raise AlignmentError(
            f"{side} ids are not a row of integers",
            got=f"shape {array.shape} of {array.dtype}",
            expected="shape [T] of int32",
            fix="pass several samples to align_batch" if array.ndim == 2 else None,
        )
    outside = (array < 0) | (array >= vocab_size)
    if outside.any():
        at = int(np.argmax(outside))
        raise AlignmentError(
            f"{side} id {int(array[at])} at token {at} is outside the vocabulary",
            expected=f"0 to {vocab_size - 1}",
            fix=f"pass ids of the {side}'s own tokenizer, without padding such as -100",
        )
    return array.astype(np.int32, copy=False)


AnyAlignment = TypeVar("AnyAlignment", bound=Alignment)
ChunkIds = NDArray[np.int32]

_SPACE: Final = b" "
"""Bytes of the library's dummy prefix, where such a token covers nothing."""


class Spelling:
    """Bytes that the tokens of one tokenizer spell.

    Args:
        tokenizer: The tokenizer.
    """

    def __init__(self, tokenizer: ByteTokenizer) -> None:
        self._tokenizer = tokenizer

    @cached_property
    def table(self) -> TokenBytes:
        """The bytes of each id."""
        return TokenBytes.of(self._tokenizer)

    def __getstate__(self) -> dict[str, Any]:
        # The table is quicker to rebuild than to pickle.
        return {"_tokenizer": self._tokenizer}

    def rows(self, ids: IdArray) -> list[bytes]:
        """The bytes of each of ``ids``."""
        return [self.table.rows[i] for i in ids.tolist()]

    def stream(self, ids: IdArray) -> tuple[bytes, ByteEnds]:
        """The bytes that ``ids`` decode to, and where each ends in them."""
        ends = self._tokenizer.byte_ends(ids)
        return stream_bytes(self.table, ids, ends), ends


class SpelledSide(NamedTuple):
    """One side of an alignment."""

    tokens: Tokens
    spelling: Spelling

    def pieces(self) -> list[int]:
        """Indices of tokens that have bytes and cover none: parts of the character that follows."""
        empty = self.tokens.empty
        rows = self.spelling.rows(self.tokens.ids[empty])
        return [
            at for at, row in zip(empty.tolist(), rows, strict=True) if row not in (b"", _SPACE)
        ]


def as_spelled(alignment: AnyAlignment, student: SpelledSide, teacher: SpelledSide) -> AnyAlignment:
    """The alignment of one text by its byte ends, corrected for what its tokens spell.

    Parts of a character are in the chunk of the token that covers it; where both sides take it
    apart alike, they are aligned part by part. A chunk is exact where both sides spell the same, as
    control tokens do.
    """
    aligned = _aligned_pieces(_joined_pieces(alignment, student, teacher), student, teacher)
    streams, bounds = [], []
    for side, spans in ((student, aligned.student_spans), (teacher, aligned.teacher_spans)):
        stream, ends = side.spelling.stream(side.tokens.ids)
        streams.append(stream)
        bounds.append(np.concatenate([np.zeros(1, np.int64), ends])[spans])
    if streams[0] == streams[1] and np.array_equal(*bounds):
        return replace(aligned, is_exact=np.ones(aligned.chunk_count, dtype=np.bool_))
    places = zip(*(side_bounds.tolist() for side_bounds in bounds), strict=True)
    same = (streams[0][a:b] == streams[1][c:d] for (a, b), (c, d) in places)
    return replace(aligned, is_exact=np.fromiter(same, np.bool_, aligned.chunk_count))


def _joined_pieces(
    alignment: AnyAlignment, student: SpelledSide, teacher: SpelledSide
) -> AnyAlignment:
    """The alignment with the parts of a character in the chunk of the token that covers it.

    A chunk that gets some counts as exact as it was.
    """
    pieces = student.pieces(), teacher.pieces()
    if not any(pieces):
        return alignment
    ids = alignment.student_chunk_id.copy(), alignment.teacher_chunk_id.copy()
    for chunk_id, parts in zip(ids, pieces, strict=True):
        # From last to first: of several parts, each precedes one that already has its chunk.
        for at in reversed(parts):
            chunk_id[at] = chunk_id[at + 1] if at + 1 < len(chunk_id) else NO_CHUNK
    return _of_ids(alignment, *ids, alignment.is_exact)


def _aligned_pieces(
    alignment: AnyAlignment, student: SpelledSide, teacher: SpelledSide
) -> AnyAlignment:
    """The alignment with chunks cut at common ends of their tokens, where they have parts of a
    character on both sides and spell the same."""
    sides, ids = (student, teacher), (alignment.student_chunk_id, alignment.teacher_chunk_id)
    with_parts = [
        set(chunk_id[side.pieces()].tolist()) - {NO_CHUNK}
        for side, chunk_id in zip(sides, ids, strict=True)
    ]
    if not with_parts[0] & with_parts[1]:
        return alignment
    cuts = np.zeros(alignment.chunk_count, dtype=np.int64)
    spans = alignment.student_spans, alignment.teacher_spans
    begins = [np.zeros(len(chunk_id), dtype=np.int32) for chunk_id in ids]
    for chunk in with_parts[0] & with_parts[1]:
        tokens = [
            first + np.flatnonzero(chunk_id[first:stop] == chunk)
            for chunk_id, (first, stop) in zip(ids, (side[chunk] for side in spans), strict=True)
        ]
        rows = [
            side.spelling.rows(side.tokens.ids[at]) for side, at in zip(sides, tokens, strict=True)
        ]
        if b"".join(rows[0]) == b"".join(rows[1]):
            inner = [list(accumulate(map(len, tokens_of_side)))[:-1] for tokens_of_side in rows]
            common = set(inner[0]).intersection(inner[1])
            cuts[chunk] = len(common)
            for begin, at, sums in zip(begins, tokens, inner, strict=True):
                begin[[int(at[sums.index(total) + 1]) for total in common]] = 1
    # Both sides have the same number of new chunks before each old one.
    student_id, teacher_id = (
        np.where(side == NO_CHUNK, NO_CHUNK, side + np.cumsum(begin, dtype=np.int32))
        for side, begin in zip(ids, begins, strict=True)
    )
    is_exact = np.repeat(alignment.is_exact, cuts + 1)
    return _of_ids(alignment, student_id.astype(np.int32), teacher_id.astype(np.int32), is_exact)


def _of_ids(
    alignment: AnyAlignment, student: ChunkIds, teacher: ChunkIds, is_exact: NDArray[np.bool_]
) -> AnyAlignment:
    """The alignment with other chunk ids [T]."""
    return replace(
        alignment,
        student_spans=spans_of(student, len(is_exact)),
        teacher_spans=spans_of(teacher, len(is_exact)),
        is_exact=is_exact,
        student_chunk_id=student,
        teacher_chunk_id=teacher,
    )


def stream_bytes(table: TokenBytes, ids: IdArray, ends: ByteEnds) -> bytes:
    """The bytes that ``ids`` decode to.

    The table holds bytes of tokens in the middle of a stream. A library that drops a leading space
    covers fewer bytes there, so each token contributes as many of its last bytes as it covers.

    Args:
        table: Bytes of every id of the tokenizer.
        ids: [T]
        ends: [T] where each ends in the stream.

    Raises:
        AlignmentError: A token that covers more bytes than it has.
    """
    widths = np.diff(ends, prepend=0)
    short = widths > table.lengths[ids]
    if short.any():
        at = int(np.argmax(short))
        raise AlignmentError(
            f"token {at} of the stream, id {int(ids[at])}, covers more bytes than it stands for",
            got=f"{widths[at]} bytes",
            expected=f"at most {table.lengths[ids[at]]}",
            fix="align the text instead of the ids",
        )
    total = int(ends[-1]) if len(ends) else 0
    # A byte is as far before the stop of its token in the buffer as in the stream.
    shift = np.repeat(table.offsets[ids + 1] - ends, widths)
    stream: NDArray[np.uint8] = table.buffer[shift + np.arange(total)]
    return stream.tobytes()


def check_same_bytes(student_bytes: bytes, teacher_bytes: bytes) -> None:
    """Refuse two streams of different bytes.

    Raises:
        AlignmentError: They differ; the text says where.
    """
    if student_bytes == teacher_bytes:
        return
    length = min(len(student_bytes), len(teacher_bytes))
    unequal = np.flatnonzero(
        np.frombuffer(student_bytes[:length], np.uint8)
        != np.frombuffer(teacher_bytes[:length], np.uint8)
    )
    where = int(unequal[0]) if len(unequal) else length
    raise AlignmentError(
        f"student and teacher ids decode to different bytes from byte {where} on",
        got=_excerpt(student_bytes, where),
        expected=f"{_excerpt(teacher_bytes, where)} as the teacher has it",
        fix="tokenize the same text with both, or cut both streams at a common byte",
    )


def _excerpt(stream: bytes, where: int) -> str:
    following = stream[where : where + 16]
    return f"{following!r}" if following else f"the end after {len(stream)} bytes"
