"""The facade: two tokenizers, and a text or two id streams, to an alignment."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from megatron_ext.alignment.alignment import Alignment
from megatron_ext.alignment.byte_alignment import ByteEnds, align_byte_ends
from megatron_ext.errors import AlignmentError
from megatron_ext.tokenizers.base import MegatronTokenizerTextAbstract

Ids = Sequence[int] | NDArray[np.int32]


class TokenAligner:
    """Aligns what a student and a teacher make of the same text.

    Args:
        student_tokenizer: Adapter of the student's tokenizer library.
        teacher_tokenizer: Adapter of the teacher's.
    """

    def __init__(
        self,
        student_tokenizer: MegatronTokenizerTextAbstract,
        teacher_tokenizer: MegatronTokenizerTextAbstract,
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
            stream_bytes(self.student_tokenizer, student_ids, student_ends),
            stream_bytes(self.teacher_tokenizer, teacher_ids, teacher_ends),
        )
        return align_byte_ends(student_ends, teacher_ends)


def stream_bytes(tokenizer: MegatronTokenizerTextAbstract, ids: Ids, ends: ByteEnds) -> bytes:
    """The bytes that ``ids`` decode to.

    Token bytes are those of the middle of a stream. A library that drops a leading space at its
    start covers fewer bytes there, so each token gives as many of its last bytes as it covers.

    Raises:
        AlignmentError: A token that covers more bytes than it has.
    """
    pieces = []
    for token_id, width in zip(ids, np.diff(ends, prepend=0).tolist(), strict=True):
        piece = (tokenizer.token_bytes(int(token_id)) or b"") if width else b""
        if len(piece) < width:
            raise AlignmentError(
                f"token id {int(token_id)} of the {tokenizer.library} tokenizer",
                got=f"{width} bytes of the stream",
                expected=f"at most the {len(piece)} bytes that the id stands for",
                fix="align the text instead of the ids",
            )
        pieces.append(piece[len(piece) - width :])
    return b"".join(pieces)


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
