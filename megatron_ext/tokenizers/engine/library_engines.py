"""Engines of a ``tokenizer.json``, a SentencePiece model and a tiktoken rank list in gigatoken.

gigatoken reads control pieces out of text and merges into the unknown piece; SentencePiece does
neither. The copy of the model that gigatoken gets has neither piece: their names begin with a space
in it, which no text has once spaces are written as U+2581. Both read user-defined pieces out of
text, but gigatoken puts the dummy prefix after each of them, and SentencePiece in front of the
whole text.
gigatoken takes the last normaliser of a model where SentencePiece merges several.
"""

from __future__ import annotations

import json
import re
import tempfile
from binascii import b2a_base64
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from megatron_ext.errors import TokenizerError
from megatron_ext.tokenizers.engine.gigatoken_engine import GigatokenEngine, building
from megatron_ext.tokenizers.libraries.sentencepiece_model import (
    CONTROL,
    NAME,
    NORMALIZER,
    PIECE,
    TYPE,
    UNKNOWN,
    UNUSED,
    USER_DEFINED,
    bytes_field,
    fields,
    piece_name,
    piece_type,
    varint_field,
)
from megatron_ext.tokenizers.libraries.tiktoken_file import CL100K, LLAMA_3, O200K, PATTERNS, R50K
from megatron_ext.tokenizers.token_bytes import TokenBytes

_NORMALIZERS = frozenset({"Sequence", "NFC", "Prepend", "Replace"})
"""Normalisers that do not depend on the Unicode release, or whose dependence is probed."""
_SPACE = re.compile(r"[\s,:]*")


def huggingface_engine(document: str, where: object) -> GigatokenEngine:
    """The engine of a ``tokenizer.json`` in which text spells no special token.

    Args:
        document: The tokenizer as the tokenizers library writes it (``Tokenizer.to_str()``).
        where: The file it came from, for errors.

    Raises:
        TokenizerError: gigatoken does not have its model, normaliser or pre-tokenizer.
        MissingDependencyError: gigatoken is not installed.
    """
    head = _head(document)
    normalizers = {part["type"] for part in _parts(head.get("normalizer"))}
    if not normalizers <= _NORMALIZERS:
        raise TokenizerError(
            "gigatoken is not known to normalise as the tokenizer does",
            got=", ".join(sorted(normalizers - _NORMALIZERS)),
            expected="no normaliser but NFC, Prepend and Replace",
            where=where,
        )
    with building(where) as gigatoken:
        return GigatokenEngine(
            lambda: gigatoken.Tokenizer.from_json(document),
            composes="NFC" in normalizers,
        )


def _head(document: str) -> dict[str, Any]:
    """The entries before the model, which is large and which the library writes last."""
    decoder = json.JSONDecoder()
    head: dict[str, Any] = {}
    at = _skip(document, document.index("{") + 1)
    while document[at] != "}":
        key, at = decoder.raw_decode(document, at)
        if key == "model":
            break
        head[key], at = decoder.raw_decode(document, _skip(document, at))
        at = _skip(document, at)
    return head


def _skip(document: str, at: int) -> int:
    """Index at which the next key or value begins."""
    space = _SPACE.match(document, at)
    assert space is not None
    return space.end()


def _parts(part: Mapping[str, Any] | None) -> Iterator[Mapping[str, Any]]:
    """A normaliser and, recursively, the normalisers of a sequence."""
    if part is None:
        return
    yield part
    for inner in part.get("normalizers", ()):
        yield from _parts(inner)


_CHARACTER_MAP, _ADD_DUMMY_PREFIX, _REMOVE_EXTRA_SPACES = 2, 3, 4


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
    for number, length, begin, end in fields(model):
        content = model[end - length : end]
        if number == PIECE:
            kind = piece_type(content)
            rest.append(bytes_field(PIECE, _ordinary(content, kind, where)))
            if kind == USER_DEFINED:
                names.append(piece_name(content).decode())
        elif number == NORMALIZER:
            normalizer += content
        else:
            rest.append(model[begin:end])
    has_prefix = _check_normalizer(normalizer, where)
    with building(where) as gigatoken:
        copy = b"".join([*rest, bytes_field(NORMALIZER, normalizer)])
        return GigatokenEngine(
            lambda: gigatoken.Tokenizer.from_sentencepiece(copy),
            names=_checked_names(names, where) if has_prefix else (),
        )


def _check_normalizer(message: bytes, where: object) -> bool:
    """Whether a normaliser adds a dummy prefix to a text; refuses one that does anything else."""
    values = {number: value for number, value, _, _ in fields(message)}
    # Options that a model does not state are on; without a character map its length is 0.
    if values.get(_CHARACTER_MAP) or values.get(_REMOVE_EXTRA_SPACES, 1):
        raise TokenizerError(
            "gigatoken is not known to normalise as the model does",
            got="a model that maps characters or removes spaces",
            where=where,
        )
    return bool(values.get(_ADD_DUMMY_PREFIX, 1))


def _checked_names(names: list[str], where: object) -> list[str]:
    """Names of user-defined pieces; refuses names with spaces, which most texts hold."""
    spaces = next((name for name in names if "▁" in name), None)
    if spaces is not None:
        raise TokenizerError(
            "gigatoken adds a space behind user-defined pieces", got=repr(spaces), where=where
        )
    return names


def _ordinary(piece: bytes, kind: int, where: object) -> bytes:
    """The message of a piece of a type for gigatoken's copy of the model."""
    if kind == UNUSED:
        raise TokenizerError("gigatoken encodes into unused pieces", where=where)
    if kind not in (UNKNOWN, CONTROL):
        return piece
    # Of a field that stands twice the last counts. To gigatoken an unused piece is an ordinary one.
    renamed = bytes_field(NAME, b" " + piece_name(piece))
    return piece + renamed + varint_field(TYPE, UNUSED)


_SCHEMES: Mapping[str, str] = {
    R50K: "gpt2",
    CL100K: "gpt4",
    O200K: "o200k",
    LLAMA_3: "olmo3",
    LLAMA_3.replace("{1,3}", ""): "qwen2",
    PATTERNS["v2"]: "nemotron",
    # Other spellings of the first two.
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+": "gpt2",
    r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+": "gpt2",
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]|\s+(?!\S)|\s+": "gpt4",
}
"""gigatoken's name of each pattern. The proof at load decides whether both cut alike."""


def tiktoken_engine(table: TokenBytes, pattern: str, where: object) -> GigatokenEngine:
    """The engine of a rank list.

    Args:
        table: Bytes of each id; the ids that are no control tokens merge in id order.
        pattern: Regular expression that cuts a text before merging.
        where: The file it came from, for errors.

    Raises:
        TokenizerError: gigatoken does not have the pattern, or cannot rebuild the merges.
        MissingDependencyError: gigatoken is not installed.
    """
    scheme = _SCHEMES.get(pattern)
    if scheme is None:
        raise TokenizerError("gigatoken does not have the pattern", got=repr(pattern), where=where)
    ids = np.flatnonzero(~table.is_control).astype(np.int32)
    ranked = [table.rows[i] for i in ids.tolist()]
    if sorted(ranked[:256]) != [bytes([byte]) for byte in range(256)]:
        # gigatoken takes the ranks of single bytes for bytes.
        raise TokenizerError("the first 256 ranks are not the single bytes", where=where)
    lines = (b"%s %d\n" % (b2a_base64(row, newline=False), i) for i, row in enumerate(ranked))
    with building(where) as gigatoken, tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "ranks.tiktoken")
        file.write_bytes(b"".join(lines))
        return GigatokenEngine(
            lambda: gigatoken.Tokenizer.from_tiktoken(file, pretokenizer=scheme),
            ids=ids,
        )
