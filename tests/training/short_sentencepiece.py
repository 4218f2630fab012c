"""The head of a SentencePiece vocabulary, with all its characters, as a model file of its own.

The file is a protobuf message whose field 1 is repeated, a piece each.
"""

from __future__ import annotations

from collections.abc import Iterator

_PIECE = 0x0A
"""Field 1, of a length that follows."""


def short_sentencepiece(model: bytes, pieces: int) -> bytes:
    """``model`` with its first ``pieces`` pieces, and every later one that is a single character.

    Merges come in the order in which they were learnt and the characters last, so that what is
    kept merges as before.
    """
    kept, number = [], 0
    for tag, field in _fields(model):
        if tag == _PIECE:
            number += 1
            if number > pieces and len(_piece_of(field)) > 1:
                continue
        kept.append(bytes([tag]) + _varint(len(field)) + field)
    return b"".join(kept)


def _fields(message: bytes) -> Iterator[tuple[int, bytes]]:
    """Tag and bytes of each field; all of a model are of a length that is said."""
    place = 0
    while place < len(message):
        tag = message[place]
        assert tag & 7 == 2
        length, place = _read_varint(message, place + 1)
        yield tag, message[place : place + length]
        place += length


def _piece_of(field: bytes) -> str:
    assert field[0] == _PIECE
    length, place = _read_varint(field, 1)
    return field[place : place + length].decode()


def _read_varint(message: bytes, place: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = message[place]
        place += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, place
        shift += 7


def _varint(value: int) -> bytes:
    found = bytearray()
    while value >= 0x80:
        found.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*found, value])
