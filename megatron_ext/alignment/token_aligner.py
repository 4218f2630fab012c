"""The facade: two tokenizers, and a text or two id streams, to an alignment."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from megatron_ext.alignment.alignment import Alignment
from megatron_ext.alignment.byte_alignment import ByteEnds, align_byte_ends
from megatron_ext.errors import AlignmentError
from megatron_ext.tokenizers.base import IdArray
from megatron_ext.tokenizers.byte_tokenizer import ByteTokenizer
from megatron_ext.tokenizers.token_bytes import TokenBytes

Ids = Sequence[int] | IdArray


class TokenAligner:
    """Aligns what a student and a teacher make of the same text.

    Args:
        student_tokenizer: Adapter of the student's tokenizer library.
        teacher_tokenizer: Adapter of the teacher's.
    """

    def __init__(
        self,
        student_tokenizer: ByteTokenizer,
        teacher_tokenizer: ByteTokenizer,
    ) -> None:
        self.student_tokenizer = student_tokenizer
        self.teacher_tokenizer = teacher_tokenizer

    def align(self, text: str) -> Alignment:
        """Tokenize ``text`` with both and align the tokens; special tokens in it are text."""
        _, student_ends = self.student_tokenizer.encode_with_byte_ends(text)
        _, teacher_ends = self.teacher_tokenizer.encode_with_byte_ends(text)
        return align_byte_ends(student_ends, teacher_ends)

    def align_ids(self, student_ids: Ids, teacher_ids: Ids) -> Alignment:
        """Align two streams that decode to the same bytes, control tokens aside.

        Args:
            student_ids: [Ts], for example a generated answer.
            teacher_ids: [Tt]

        Raises:
            AlignmentError: The streams decode to different bytes.
        """
        student_ends = self.student_tokenizer.byte_ends(student_ids)
        teacher_ends = self.teacher_tokenizer.byte_ends(teacher_ids)
        check_same_bytes(
            stream_bytes(self._student_table, np.asarray(student_ids, np.int32), student_ends),
            stream_bytes(self._teacher_table, np.asarray(teacher_ids, np.int32), teacher_ends),
        )
        return align_byte_ends(student_ends, teacher_ends)

    # Built on first use: a text is aligned without them.

    @cached_property
    def _student_table(self) -> TokenBytes:
        return _table_of(self.student_tokenizer)

    @cached_property
    def _teacher_table(self) -> TokenBytes:
        return _table_of(self.teacher_tokenizer)


def _table_of(tokenizer: ByteTokenizer) -> TokenBytes:
    return TokenBytes.from_tokens(map(tokenizer.token_bytes, range(tokenizer.vocab_size)))


def stream_bytes(table: TokenBytes, ids: IdArray, ends: ByteEnds) -> bytes:
    """The bytes that ``ids`` decode to.

    Token bytes are those of the middle of a stream. A library that drops a leading space at its
    start covers fewer bytes there, so each token gives as many of its last bytes as it covers.

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
    # Byte b of the stream is in the buffer as far before its token's stop there as in the stream.
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
