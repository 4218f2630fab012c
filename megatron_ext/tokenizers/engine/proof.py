"""Whether an engine gives the ids of a library, and for which characters it may not."""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from megatron_ext.errors import TokenizerError
from megatron_ext.tokenizers.engine.flat_ids import flat_ids
from megatron_ext.tokenizers.engine.gigatoken_engine import GigatokenEngine
from megatron_ext.tokenizers.engine.probe_texts import probe_texts
from megatron_ext.tokenizers.engine.rare_characters import (
    compared_characters,
    is_young,
    represented_by,
    unknown_characters,
)
from megatron_ext.tokenizers.engine.unproven import Unproven
from megatron_ext.tokenizers.token_bytes import TokenBytes
from megatron_ext.tokenizers.token_ids import IdArray

Reference = Callable[[Sequence[str]], Iterable[Sequence[int] | IdArray]]
"""The library's own ids of each text."""

_TOGETHER = 64
"""Characters, or tokens, probed in one text."""
_TOKENS = 1 << 14
"""Tokens of the vocabulary that are probed, evenly spread."""


def prove(
    engine: GigatokenEngine,
    reference: Reference,
    table: TokenBytes,
    pieces: Sequence[str],
    where: object,
) -> Unproven:
    """Compare the engine with the library.

    The texts are those of ``probe_texts``, tokens of the vocabulary, and names of control tokens
    as ordinary text. If the engine depends on what Unicode says of a character, characters are
    compared one by one before.

    Args:
        engine: What is to be proven.
        reference: What it is to equal.
        table: Bytes of each id.
        pieces: Display string of each id.
        where: The file, for errors.

    Returns:
        Characters and names on which the two differ or may differ.

    Raises:
        TokenizerError: They differ on a text without these.
    """
    asks_unicode = engine.reads_classes or engine.composes
    unproven = Unproven(_rare(engine, reference) if asks_unicode else None, engine.names)
    texts = [*probe_texts(), *_names(table, pieces), *_tokens(table)]
    left_out = set(unproven.texts_with(texts))
    kept = [text for i, text in enumerate(texts) if i not in left_out]
    differing = _differing(engine, reference, kept)
    if differing:
        text = kept[differing[0]]
        raise TokenizerError(
            "gigatoken gives other ids than the library",
            got=f"{len(differing)} of {len(kept)} probes differ, such as {text[:40]!r}",
            where=where,
        )
    documents = [text.encode() for text in kept]
    together, _ = engine.encode(documents)
    alone = [engine.encode([document])[0] for document in documents]
    if not np.array_equal(together, np.concatenate(alone)):
        raise TokenizerError("gigatoken gives other ids for one text than for many", where=where)
    return unproven


def _rare(engine: GigatokenEngine, reference: Reference) -> NDArray[np.bool_]:
    """Whether each code point is one of which the two may know different things."""
    context = _context_with_marks if engine.composes else _context
    characters = compared_characters()
    groups = [characters[i : i + _TOGETHER] for i in range(0, len(characters), _TOGETHER)]
    differing: list[str] = []
    for index in _differing(engine, reference, ["\n".join(map(context, g)) for g in groups]):
        group = groups[index]
        alone = _differing(engine, reference, list(map(context, group)))
        differing += [group[i] for i in alone] or group
    is_rare = unknown_characters()
    is_rare[list(map(ord, characters))] = False
    for character in differing:
        around = represented_by(character)
        is_rare[around.start : around.stop] = True
        # What a character decomposes into may be what differs.
        for part in filter(is_young, unicodedata.normalize("NFD", character)):
            is_rare[ord(part)] = True
    return is_rare


def _context(character: str) -> str:
    """A text that shows in ids what a pre-tokenizer takes a character for.

    A contraction and a number show most: they are cut otherwise after a letter, a digit or a sign.
    """
    return f"  {character}'sx1{character}234"


def _context_with_marks(character: str) -> str:
    """The same, and what a normaliser takes it for.

    U+0334 has the least and U+0345 the greatest class of combining marks: whatever has a class of
    its own changes places with one of them. A character that composes with another one is compared
    where what they make is.
    """
    is_unknown = unicodedata.category(character) == "Cn"
    is_mark = unicodedata.category(character).startswith("M")
    if not (is_unknown or is_mark or unicodedata.decomposition(character)):
        return _context(character)
    apart = unicodedata.normalize("NFD", character)
    return f"{_context(character)}\u0345{character}a{character}\u0334{character}\u0301 {apart}"


def _names(table: TokenBytes, pieces: Sequence[str]) -> list[str]:
    """Each control token's name as text, alone and against letters, spaces and itself."""
    names = [pieces[i] for i in np.flatnonzero(table.is_control).tolist() if pieces[i]]
    return _grouped([f"a{name}b {name} {name}{name}" for name in names])


def _tokens(table: TokenBytes) -> list[str]:
    """Tokens from all over the vocabulary, and all of the last ones, which are often added."""
    step = -(-len(table) // _TOKENS)
    ids = {*range(0, len(table), step), *range(max(0, len(table) - _TOKENS // 8), len(table))}
    rows = [table.rows[i].decode(errors="ignore") for i in sorted(ids)]
    return [*_grouped(rows), *("".join(rows[i : i + 8]) for i in range(0, len(rows), 97))]


def _grouped(texts: Sequence[str]) -> list[str]:
    return ["\n".join(texts[i : i + _TOGETHER]) for i in range(0, len(texts), _TOGETHER)]


def _differing(engine: GigatokenEngine, reference: Reference, texts: Sequence[str]) -> list[int]:
    """Index of each text of which the two do not give the same ids."""
    ids, offsets = engine.encode([text.encode() for text in texts])
    expected, expected_offsets = flat_ids(reference(texts))
    if np.array_equal(ids, expected) and np.array_equal(offsets, expected_offsets):
        return []
    return [
        i
        for i in range(len(texts))
        if not np.array_equal(
            ids[offsets[i] : offsets[i + 1]],
            expected[expected_offsets[i] : expected_offsets[i + 1]],
        )
    ]
