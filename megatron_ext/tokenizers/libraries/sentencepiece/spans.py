"""Spans of pieces out of SentencePiece's serialised result, without the protobuf package.

``SentencePieceText`` holds its pieces as field 2; a piece holds id (2), begin (4) and end (5), the
offsets counted in bytes of the text before normalisation. Every release that we support can give
this message (``out_type="serialized_proto"``); the ones with objects in them come and go.
"""

from __future__ import annotations

from megatron_ext.tokenizers.libraries.sentencepiece.wire import (
    LENGTH_DELIMITED,
    VARINT,
    read_field,
)

_PIECES, _ID, _BEGIN, _END = 2, 2, 4, 5


def read_spans(message: bytes) -> tuple[list[int], list[tuple[int, int]]]:
    """Ids [T], and the bytes [T] where each piece begins and ends."""
    ids = []
    spans = []
    at = 0
    while at < len(message):
        number, wire, value, at = read_field(message, at)
        if number == _PIECES and wire == LENGTH_DELIMITED:
            token_id, begin, end = _piece(message, at - value, at)
            ids.append(token_id)
            spans.append((begin, end))
    return ids, spans


def _piece(message: bytes, at: int, stop: int) -> tuple[int, int, int]:
    values = {_ID: 0, _BEGIN: 0, _END: 0}
    while at < stop:
        number, wire, value, at = read_field(message, at)
        if wire == VARINT and number in values:
            values[number] = value
    return values[_ID], values[_BEGIN], values[_END]
