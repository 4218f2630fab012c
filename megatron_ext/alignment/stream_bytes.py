"""The bytes that a stream of ids decodes to. T tokens."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from megatron_ext.alignment.byte_alignment import ByteEnds
from megatron_ext.errors import AlignmentError
from megatron_ext.tokenizers.token_bytes import TokenBytes
from megatron_ext.tokenizers.token_ids import IdArray


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
