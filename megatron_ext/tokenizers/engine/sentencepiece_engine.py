"""A SentencePiece model in gigatoken.

gigatoken reads control pieces out of text, which SentencePiece does not, and merges into the
unknown piece, which SentencePiece does not either. The copy of the model that it gets has neither:
in it their names begin with a space, which no text has once spaces are written as U+2581.

User-defined pieces both read out of text, but gigatoken puts the dummy prefix after each of them,
and SentencePiece in front of the whole text.

A ``ModelProto`` holds its pieces as field 1 and its normaliser as field 3; a piece holds its name
(1), score (2) and type (3). gigatoken takes the last normaliser where SentencePiece merges several.
"""

from __future__ import annotations

from collections.abc import Iterator

from megatron_ext.errors import TokenizerError
from megatron_ext.tokenizers.engine.gigatoken_engine import GigatokenEngine, building
from megatron_ext.tokenizers.libraries.sentencepiece.wire import (
    LENGTH_DELIMITED,
    bytes_field,
    read_field,
    varint_field,
)

_PIECE, _NORMALIZER = 1, 3
_NAME, _TYPE = 1, 3
_CHARACTER_MAP, _ADD_DUMMY_PREFIX, _REMOVE_EXTRA_SPACES = 2, 3, 4
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED = 1, 2, 3, 4, 5


def sentencepiece_engine(model: bytes, where: object) -> GigatokenEngine:
    """The engine of a BPE model with byte fallback that leaves text as it is.

    Args:
        model: The serialised ``ModelProto``.
        where: The file it came from, for errors.

    Raises:
        TokenizerError: It is another kind of model, or one that normalises.
        MissingDependencyError: gigatoken is not installed.
    """
    rest: list[bytes] = []
    names: list[str] = []
    normalizer = b""
    for number, begin, content_begin, end in _fields(model):
        content = model[content_begin:end]
        if number == _PIECE:
            rest.append(bytes_field(_PIECE, _ordinary(content, where)))
            names += _user_defined(content)
        elif number == _NORMALIZER:
            normalizer += content
        else:
            rest.append(model[begin:end])
    has_prefix = _check_normalizer(normalizer, where)
    with building(where) as gigatoken:
        copy = b"".join([*rest, bytes_field(_NORMALIZER, normalizer)])
        return GigatokenEngine(
            lambda: gigatoken.Tokenizer.from_sentencepiece(copy),
            names=_checked_names(names, where) if has_prefix else (),
        )


def _check_normalizer(message: bytes, where: object) -> bool:
    """Whether a normaliser, which must do nothing else, puts a dummy prefix before a text."""
    said: dict[int, int] = {}
    at = 0
    while at < len(message):
        number, _, value, at = read_field(message, at)
        said[number] = value
    # What a model does not say of its normaliser is on; the length of its map is 0 without one.
    if said.get(_CHARACTER_MAP) or said.get(_REMOVE_EXTRA_SPACES, 1):
        raise TokenizerError(
            "gigatoken is not known to normalise as the model does",
            got="a model that maps characters or removes spaces",
            where=where,
        )
    return bool(said.get(_ADD_DUMMY_PREFIX, 1))


def _checked_names(names: list[str], where: object) -> list[str]:
    """Names of user-defined pieces, none of which may be in most texts."""
    spaces = next((name for name in names if "▁" in name), None)
    if spaces is not None:
        raise TokenizerError(
            "gigatoken adds a space behind user-defined pieces", got=repr(spaces), where=where
        )
    return names


def _ordinary(piece: bytes, where: object) -> bytes:
    """The message of a piece as the copy has it."""
    kind = _type(piece)
    if kind == _UNUSED:
        raise TokenizerError("gigatoken encodes into unused pieces", where=where)
    if kind not in (_UNKNOWN, _CONTROL):
        return piece
    # Of a field that stands twice the last counts. To gigatoken an unused piece is an ordinary one.
    renamed = bytes_field(_NAME, b" " + _name(piece))
    return piece + renamed + varint_field(_TYPE, _UNUSED)


def _user_defined(piece: bytes) -> list[str]:
    return [_name(piece).decode()] if _type(piece) == _USER_DEFINED else []


def _type(piece: bytes) -> int:
    kind = _NORMAL
    at = 0
    while at < len(piece):
        number, _, value, at = read_field(piece, at)
        if number == _TYPE:
            kind = value
    return kind


def _name(piece: bytes) -> bytes:
    name = b""
    for number, _, content_begin, end in _fields(piece):
        if number == _NAME:
            name = piece[content_begin:end]
    return name


def _fields(message: bytes) -> Iterator[tuple[int, int, int, int]]:
    """Number of each field, where it begins, where its content does, and where both end."""
    at = 0
    while at < len(message):
        begin = at
        number, wire, value, at = read_field(message, at)
        yield number, begin, at - value if wire == LENGTH_DELIMITED else begin, at
