"""Spans of pieces out of SentencePiece's serialised result, without the protobuf package.

``SentencePieceText`` holds its pieces as field 2; a piece holds id (2), begin (4) and end (5), the
offsets counted in bytes of the text before normalisation. Every release that we support can give
this message (``out_type="serialized_proto"``); the ones with objects in them come and go.
"""

from __future__ import annotations

_PIECES, _ID, _BEGIN, _END = 2, 2, 4, 5
_VARINT, _FIXED64, _LENGTH_DELIMITED, _FIXED32 = 0, 1, 2, 5


def read_spans(message: bytes) -> tuple[list[int], list[tuple[int, int]]]:
    """Ids [T], and the bytes [T] where each piece begins and ends."""
    ids = []
    spans = []
    at = 0
    while at < len(message):
        number, wire, value, at = _field(message, at)
        if number == _PIECES and wire == _LENGTH_DELIMITED:
            token_id, begin, end = _piece(message, at - value, at)
            ids.append(token_id)
            spans.append((begin, end))
    return ids, spans


def _piece(message: bytes, at: int, stop: int) -> tuple[int, int, int]:
    values = {_ID: 0, _BEGIN: 0, _END: 0}
    while at < stop:
        number, wire, value, at = _field(message, at)
        if wire == _VARINT and number in values:
            values[number] = value
    return values[_ID], values[_BEGIN], values[_END]


def _field(message: bytes, at: int) -> tuple[int, int, int, int]:
    """Number, wire type and value of the field at ``at``, and where the next one begins.

    The value of a length-delimited field is its length: its content ends where the next begins.
    """
    key, at = _varint(message, at)
    number, wire = key >> 3, key & 7
    if wire == _VARINT:
        value, at = _varint(message, at)
        return number, wire, value, at
    if wire == _LENGTH_DELIMITED:
        value, at = _varint(message, at)
        return number, wire, value, at + value
    assert wire in (_FIXED64, _FIXED32), wire
    return number, wire, 0, at + (8 if wire == _FIXED64 else 4)


def _varint(message: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = message[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7
