"""A ``tokenizer.json`` in gigatoken."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from megatron_ext.errors import TokenizerError
from megatron_ext.tokenizers.engine.gigatoken_engine import GigatokenEngine, building

_NORMALIZERS = frozenset({"Sequence", "NFC", "Prepend", "Replace"})
"""Those whose result does not depend on the release of Unicode, or whose dependence is probed."""
_SPACE = re.compile(r"[\s,:]*")


def huggingface_engine(document: str, where: object) -> GigatokenEngine:
    """The engine of a tokenizer in which no added token can be spelled that should not be.

    Args:
        document: What the tokenizers library writes of a tokenizer (``Tokenizer.to_str()``).
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
    """Where the next key or value begins."""
    space = _SPACE.match(document, at)
    assert space is not None
    return space.end()


def _parts(part: Mapping[str, Any] | None) -> Iterator[Mapping[str, Any]]:
    """A normaliser and, where it is a sequence, what is in it."""
    if part is None:
        return
    yield part
    for inner in part.get("normalizers", ()):
        yield from _parts(inner)
