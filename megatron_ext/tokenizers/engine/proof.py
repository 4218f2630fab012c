"""Proof that an engine gives the ids of a library, and the characters for which it does not.

Shape letters: S code points below 0x110000.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from megatron_ext.errors import TokenizerError
from megatron_ext.tokenizers.engine.gigatoken_engine import GigatokenEngine, flat_ids
from megatron_ext.tokenizers.engine.probe_texts import (
    compared_characters,
    is_young,
    probe_texts,
    represented_by,
    unknown_characters,
)
from megatron_ext.tokenizers.token_bytes import TokenBytes
from megatron_ext.tokenizers.token_ids import IdArray

_SLICE = 1 << 22
"""Characters that are searched together."""


class Unproven:
    """Characters and names without a proof: a text with one goes to the library.

    Args:
        is_rare: Mask of the code points without a proof [S]; None where there are none.
        names: Strings that engine and library encode differently.
    """

    def __init__(self, is_rare: NDArray[np.bool_] | None, names: Sequence[str]) -> None:
        self._is_rare = is_rare
        self._names = re.compile("|".join(map(re.escape, names))) if names else None

    def covers(self, character: str) -> bool:
        """Whether a text with this character goes to the library."""
        return self._is_rare is not None and bool(self._is_rare[ord(character)])

    def texts_with(self, texts: Sequence[str]) -> list[int]:
        """Indices of the texts that have one, ascending; no text may hold a lone surrogate."""
        indices: set[int] = set()
        if self._names is not None:
            indices.update(i for i, text in enumerate(texts) if self._names.search(text))
        if self._is_rare is not None:
            for text_of, ends, characters in _slices(texts):
                codes = np.frombuffer(characters.encode("utf-32-le"), np.int32)
                hits = np.flatnonzero(self._is_rare.take(codes))
                slots = np.unique(np.searchsorted(ends, hits, side="right")).tolist()
                indices.update(text_of[slot] for slot in slots)
        return sorted(indices)


def _slices(texts: Sequence[str]) -> Iterator[tuple[list[int], list[int], str]]:
    """The characters of texts that are not ASCII, in slices.

    Yields:
        Index of each text, end of each among the characters, and the characters.
    """
    owners: list[int] = []
    ends: list[int] = []
    parts: list[str] = []
    for index, text in enumerate(texts):
        if text.isascii():
            continue
        for begin in range(0, len(text), _SLICE):
            parts.append(text[begin : begin + _SLICE])
            owners.append(index)
            ends.append((ends[-1] if ends else 0) + len(parts[-1]))
            if ends[-1] >= _SLICE:
                yield owners, ends, "".join(parts)
                owners, ends, parts = [], [], []
    if parts:
        yield owners, ends, "".join(parts)


Reference = Callable[[Sequence[str]], Iterable[Sequence[int] | IdArray]]
"""Encodes texts with the library itself."""

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
    as ordinary text. If the engine depends on Unicode properties, characters are compared one by
    one first.

    Args:
        reference: Encodes texts with the library.
        table: Bytes of each id.
        pieces: Display string of each id.
        where: The file, for errors.

    Returns:
        Characters and names on which both differ or may differ.

    Raises:
        TokenizerError: They differ on a text without these.
    """
    asks_unicode = engine.reads_classes or engine.composes
    unproven = Unproven(_rare(engine, reference) if asks_unicode else None, engine.names)
    texts = [*probe_texts(), *_names(table, pieces), *_tokens(table)]
    skipped = set(unproven.texts_with(texts))
    probes = [text for i, text in enumerate(texts) if i not in skipped]
    differing = _differing(engine, reference, probes)
    if differing:
        text = probes[differing[0]]
        raise TokenizerError(
            "gigatoken gives other ids than the library",
            got=f"{len(differing)} of {len(probes)} probes differ, such as {text[:40]!r}",
            where=where,
        )
    documents = [text.encode() for text in probes]
    together, _ = engine.encode(documents)
    alone = [engine.encode([document])[0] for document in documents]
    if not np.array_equal(together, np.concatenate(alone)):
        raise TokenizerError("gigatoken gives other ids for one text than for many", where=where)
    return unproven


def _rare(engine: GigatokenEngine, reference: Reference) -> NDArray[np.bool_]:
    """Mask of the code points that the two may treat differently [S]."""
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
        # The difference may lie in the decomposition of the character.
        for decomposed in filter(is_young, unicodedata.normalize("NFD", character)):
            is_rare[ord(decomposed)] = True
    return is_rare


def _context(character: str) -> str:
    """A text whose ids show how a pre-tokenizer classifies a character.

    Contractions and numbers are cut differently after a letter, a digit and a sign.
    """
    return f"  {character}'sx1{character}234"


def _context_with_marks(character: str) -> str:
    """A text whose ids show how pre-tokenizer and normaliser treat a character.

    U+0334 has the least and U+0345 the greatest class of combining marks: whatever has a class of
    its own changes places with one of them. A composing character is covered by the comparison of
    the composed one.
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
    """Indices of the texts for which the two give different ids."""
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
