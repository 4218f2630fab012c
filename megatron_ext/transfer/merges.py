"""Merges that a BPE learns from a text behind those that it has.

New merges come after all old ones, so that a text is cut as before and then merged further: every
new token is two tokens that the tokenizer wrote side by side.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

from tokenizers import Tokenizer

from megatron_ext.errors import ConfigError, DataError, TokenizerError
from megatron_ext.transfer.extend import TOKENIZER_FILE, bpe_file, copy_tokenizer, next_id

_WORD: Final = re.compile("▁*[^▁]*")
"""A word of a text in which SentencePiece has written spaces."""

Pair = tuple[str, str]


@dataclass(frozen=True, slots=True)
class LearntMerges:
    """Merges in the order in which they were learnt, and what they are worth on the text."""

    pairs: list[Pair]
    tokens_before: int
    tokens_after: int


def learn_merges(folder: Path, target: Path, texts: Iterable[str], count: int) -> LearntMerges:
    """Write a tokenizer with more merges to an existing folder.

    Each merge is of the pair that is most frequent in the text by then, of several the first in the
    order of their texts; tokens of the vocabulary are not made again.

    Args:
        folder: Folder of the tokenizer.
        target: Existing folder for its files.
        texts: Text to learn from.
        count: Number of merges; fewer where no pair is there twice.

    Raises:
        TokenizerError: There is no ``tokenizer.json`` of a BPE.
        DataError: No pair of tokens is twice in the text.
    """
    if count < 1:
        raise ConfigError("no merge would be learnt", where="--merges", got=count)
    values = bpe_file(folder)
    model = values["model"]
    taken = {*model["vocab"], *(entry["content"] for entry in values["added_tokens"])}
    words = _Words(_words(folder, texts), taken=taken, unmerged=_unmerged(model))
    before = words.token_count
    pairs: list[Pair] = []
    while len(pairs) < count and (pair := words.most_frequent()) is not None:
        words.merge(pair)
        pairs.append(pair)
    if not pairs:
        raise DataError("no pair of tokens is twice in the text", fix="give more text")
    _add(values, pairs)
    copy_tokenizer(folder, target, values)
    return LearntMerges(pairs, before, words.token_count)


def _words(folder: Path, texts: Iterable[str]) -> Counter[tuple[str, ...]]:
    """Tokens of each pre-token, with its frequency."""
    tokenizer = Tokenizer.from_file(str(folder / TOKENIZER_FILE))
    if tokenizer.pre_tokenizer is None and tokenizer.normalizer is None:
        raise TokenizerError(
            "a tokenizer that does not cut texts into words learns no merges",
            where=folder / TOKENIZER_FILE,
            got="neither pre_tokenizer nor normalizer",
        )
    words: Counter[str] = Counter()
    for text in texts:
        normal = tokenizer.normalizer.normalize_str(text) if tokenizer.normalizer else text
        if tokenizer.pre_tokenizer is None:
            words.update(word for word in _WORD.findall(normal) if word)
        else:
            words.update(word for word, _ in tokenizer.pre_tokenizer.pre_tokenize_str(normal))
    cut: Counter[tuple[str, ...]] = Counter()
    for word, number in words.items():
        # Words with unknown parts may be cut alike.
        cut[tuple(token.value for token in tokenizer.model.tokenize(word))] += number
    return cut


def _unmerged(model: dict[str, Any]) -> set[str]:
    """Tokens that stand for something else than their text: bytes, and what is unknown."""
    fallback = {f"<0x{byte:02X}>" for byte in range(256)} if model.get("byte_fallback") else set()
    return fallback | {model.get("unk_token") or ""}


class _Words:
    """Words as tokens, and the frequencies of pairs in them."""

    def __init__(
        self, words: Counter[tuple[str, ...]], *, taken: set[str], unmerged: set[str]
    ) -> None:
        self._words = [list(word) for word in words]
        self._numbers = list(words.values())
        self._taken, self._unmerged = taken, unmerged
        self._counts: Counter[Pair] = Counter()
        self._places: defaultdict[Pair, set[int]] = defaultdict(set)
        for place in range(len(self._words)):
            self._count(place, 1)
        # Entries of a count that a pair no longer has are passed over.
        self._heap = [(-number, pair) for pair, number in self._counts.items()]
        heapify(self._heap)

    @property
    def token_count(self) -> int:
        """Tokens of the text."""
        return sum(len(word) * n for word, n in zip(self._words, self._numbers, strict=True))

    def most_frequent(self) -> Pair | None:
        """The next pair to merge; None where none is there twice."""
        while self._heap:
            number, pair = heappop(self._heap)
            is_current = number < -1 and self._counts[pair] == -number
            is_new = "".join(pair) not in self._taken and self._unmerged.isdisjoint(pair)
            if is_current and is_new:
                return pair
        return None

    def merge(self, pair: Pair) -> None:
        """Merge a pair wherever it is."""
        self._taken.add("".join(pair))
        changed: set[Pair] = set()
        for place in sorted(self._places[pair]):
            changed |= self._count(place, -1)
            self._words[place] = _merged(self._words[place], pair)
            changed |= self._count(place, 1)
        for other in changed & self._counts.keys():
            heappush(self._heap, (-self._counts[other], other))

    def _count(self, place: int, sign: int) -> set[Pair]:
        """Count the pairs of a word, or take them out; returns them."""
        pairs = [*pairwise(self._words[place])]
        for pair in pairs:
            self._counts[pair] += sign * self._numbers[place]
            if sign > 0:
                self._places[pair].add(place)
            else:
                self._places[pair].discard(place)
            if not self._counts[pair]:
                del self._counts[pair]
        return set(pairs)


def _merged(word: list[str], pair: Pair) -> list[str]:
    merged: list[str] = []
    for token in word:
        if merged and (merged[-1], token) == pair:
            merged[-1] += token
        else:
            merged.append(token)
    return merged


def _add(values: dict[str, Any], pairs: list[Pair]) -> None:
    """Add merges and their tokens to the contents of a ``tokenizer.json``."""
    model = values["model"]
    vocabulary, merges = model["vocab"], model["merges"]
    following = next_id(values)
    are_texts = bool(merges) and isinstance(merges[0], str)
    for number, pair in enumerate(pairs):
        vocabulary["".join(pair)] = following + number
        merges.append(" ".join(pair) if are_texts else list(pair))
