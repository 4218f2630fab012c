"""Protobuf's wire format, as much of it as SentencePiece's messages use.

A field begins with a number that holds its own number and its wire type; of a field that stands
twice in a message the last counts, unless it is a list.
"""

from __future__ import annotations

VARINT, FIXED64, LENGTH_DELIMITED, FIXED32 = 0, 1, 2, 5


def read_field(message: bytes, at: int) -> tuple[int, int, int, int]:
    """Number, wire type and value of the field at ``at``, and where the next one begins.

    The value of a length-delimited field is its length: its content ends where the next begins.
    """
    key, at = _read_varint(message, at)
    number, wire = key >> 3, key & 7
    if wire == VARINT:
        value, at = _read_varint(message, at)
        return number, wire, value, at
    if wire == LENGTH_DELIMITED:
        value, at = _read_varint(message, at)
        return number, wire, value, at + value
    assert wire in (FIXED64, FIXED32), wire
    return number, wire, 0, at + (8 if wire == FIXED64 else 4)


def varint_field(number: int, value: int) -> bytes:
    """A field that holds a number of at least 0."""
    return _varint(number << 3 | VARINT) + _varint(value)


def bytes_field(number: int, content: bytes) -> bytes:
    """A field that holds bytes, a string or a message."""
    return _varint(number << 3 | LENGTH_DELIMITED) + _varint(len(content)) + content


def _read_varint(message: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = message[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7


def _varint(value: int) -> bytes:
    groups = bytearray()
    while value > 0x7F:
        groups.append(value & 0x7F | 0x80)
        value >>= 7
    groups.append(value)
    return bytes(groups)
