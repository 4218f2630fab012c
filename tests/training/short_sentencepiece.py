"""The head of a SentencePiece vocabulary, with all its characters, as a model file of its own."""

from functools import cache

from megatron_ext.tokenizers.libraries.sentencepiece_model import (
    LENGTH_DELIMITED,
    bytes_field,
    read_field,
)

_PIECE = 1
"""Number of the field that is repeated, a piece each; and within a piece of its text."""


@cache
def short_sentencepiece(model, pieces):
    """``model`` with its first ``pieces`` pieces, and every later one that is a single character.

    Merges come in the order in which they were learnt and the characters last, so that what is
    kept merges as before.
    """
    kept, place = [], 0
    for number, content in _fields(model):
        if number == _PIECE:
            place += 1
            text = next(value for name, value in _fields(content) if name == _PIECE)
            if place > pieces and len(text.decode()) > 1:
                continue
        kept.append(bytes_field(number, content))
    return b"".join(kept)


def _fields(message):
    """Number and content of each field that is of a length which is said."""
    at = 0
    while at < len(message):
        number, wire, size, end = read_field(message, at)
        if wire == LENGTH_DELIMITED:
            yield number, message[end - size : end]
        at = end
