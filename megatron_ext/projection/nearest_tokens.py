"""Nearest tokens in spelling, and control tokens of the most similar names. N tokens.

Spelling is compared by edit distance over bytes: the map of MinED (FuseLLM, arXiv 2401.10491). The
search is exact, over every token of the least number of inserted, deleted and replaced bytes; three
lower bounds on the distance leave few to compute. Names are those such as ``<|eot_id|>`` and
``<end_of_turn>``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from difflib import SequenceMatcher
from typing import Final

import numpy as np
from numpy.typing import NDArray

from megatron_ext.projection.speller import Speller

WORD_BITS: Final = 64
"""Most bytes of a token to compare: one bit each in the columns of Myers' algorithm."""

_WORDS: Final = tuple(map(np.dtype, (np.uint8, np.uint16, np.uint32, np.uint64)))


class NearestTokens:
    """Index of tokens for nearest-neighbour search in spelling.

    Args:
        tokens: Id and bytes of each token; bytes are not empty and all different.
    """

    def __init__(self, tokens: Iterable[tuple[int, bytes]]) -> None:
        # By length, so that tokens of similar lengths are adjacent; of equals the lowest id.
        ordered = sorted(tokens, key=lambda pair: (len(pair[1]), pair[0]))
        self._ids = [token_id for token_id, _ in ordered]
        self._tokens = [token for _, token in ordered]
        self._id_of = {token: token_id for token_id, token in ordered}
        self._lengths = np.array([len(token) for token in self._tokens], dtype=np.int64)
        self._starts = np.cumsum(self._lengths) - self._lengths
        self._buffer = np.frombuffer(b"".join(self._tokens), dtype=np.uint8)
        self._marks = _marks(self._buffer, self._starts)

    def nearest(self, token: bytes) -> int | None:
        """Id of the token nearest to ``token``; None if there are no tokens.

        Ties go to the longest common prefix with ``token``, then to the lowest id. For a token of
        more than ``WORD_BITS`` bytes it is the longest one that it begins with, or None.
        """
        if not self._ids or token in self._id_of:
            return self._id_of.get(token)
        prefix = self._longest_prefix(token)
        if len(token) > WORD_BITS:
            return self._id_of.get(prefix)
        # Upper bound: the distance of the prefix, or of replacing every byte of the shortest token.
        best = max(len(token), len(self._tokens[0]))
        if prefix:
            best = len(token) - len(prefix)
        return self._ids[self._search(token, best)]

    def _longest_prefix(self, token: bytes) -> bytes:
        """Longest token that ``token`` begins with; empty where there is none."""
        lengths = range(len(token), 0, -1)
        return next((token[:n] for n in lengths if token[:n] in self._id_of), b"")

    def _search(self, token: bytes, best: int) -> int:
        """Place of the nearest token, at a distance of at most ``best``."""
        first, last = np.searchsorted(self._lengths, [len(token) - best, len(token) + best + 1])
        gaps = np.abs(self._lengths[first:last] - len(token))
        marks = _marks(np.frombuffer(token, dtype=np.uint8), np.zeros(1, dtype=np.int64))
        # An edit removes and adds at most one byte value, and at most two pairs of neighbours.
        values, pairs = _bits(self._marks[:, first:last] ^ marks)
        bounds = np.maximum(gaps, np.maximum((values + 1) // 2, (pairs + 3) // 4))
        ties: list[int] = []
        for bound in range(best + 1):
            if bound > best:
                break
            places = first + np.flatnonzero(bounds == bound)
            if not len(places):
                continue
            distances = self._distances(token, places)
            least = int(distances.min())
            if least < best:
                best, ties = least, []
            ties.extend(places[distances == best].tolist())
        return min(ties, key=lambda at: (-_common_prefix(self._tokens[at], token), self._ids[at]))

    def _distances(self, token: bytes, places: NDArray[np.int64]) -> NDArray[np.int64]:
        """Edit distance of ``token`` to each of the tokens at ``places``, ascending, all at once.

        Myers 1999, "A fast bit-vector algorithm for approximate string matching", as Hyyro 2003
        states it: a column of the table is two words, where the distance rises and where it falls.
        """
        word = next(word for word in _WORDS if len(token) <= 8 * word.itemsize).type
        occurs = np.zeros(256, dtype=word)
        for at, byte in enumerate(token):
            occurs[byte] |= word(1 << at)
        one, top = word(1), word(1 << (len(token) - 1))
        rises = np.full(len(places), word(2 ** len(token) - 1))
        falls = np.zeros(len(places), dtype=word)
        starts, lengths = self._starts[places], self._lengths[places]
        distances = np.full(len(places), len(token), dtype=np.int64)
        done = 0
        for at in range(int(lengths[-1])):
            # The shorter ones come first.
            over = int(np.searchsorted(lengths, at, side="right"))
            rises, falls, done = rises[over - done :], falls[over - done :], over
            equal = occurs[self._buffer[starts[done:] + at]]
            either = equal | falls
            level = (((equal & rises) + rises) ^ rises) | equal
            up, down = falls | ~(level | rises), rises & level
            distances[done:] += (up & top) != 0
            distances[done:] -= (down & top) != 0
            up = (up << one) | one
            rises, falls = (down << one) | ~(either | up), up & either
        return distances


def nearest_tokens(speller: Speller, tokens: Sequence[bytes]) -> list[list[int]]:
    """Id of the speller's nearest token for each of ``tokens``, alone in a list."""
    index = NearestTokens((i, speller.tokens[i] or b"") for i in speller.emitted_ids)
    nearest = (index.nearest(token) for token in tokens)
    return [[] if token_id is None else [token_id] for token_id in nearest]


def _marks(values: NDArray[np.uint8], starts: NDArray[np.int64]) -> NDArray[np.uint64]:
    """Byte values of each token, and pairs of neighbours, as bit sets [2, N] of hashes; tokens
    begin at ``starts``."""
    if not len(starts):
        return np.zeros((2, 0), dtype=np.uint64)
    one, value = np.uint64(1), values.astype(np.uint64)
    pair = np.append(value[:-1] * np.uint64(31) + value[1:], one)
    bits = one << np.stack([value, pair]) % np.uint64(64)
    # The last byte of a token has no neighbour in it.
    bits[1, np.append(starts[1:], len(values)) - 1] = 0
    marks: NDArray[np.uint64] = np.bitwise_or.reduceat(bits, starts, axis=1)
    return marks


_BITS_OF_16: Final = np.array([value.bit_count() for value in range(1 << 16)], dtype=np.uint8)


def _bits(words: NDArray[np.uint64]) -> NDArray[np.uint8]:
    """Number of set bits in each word."""
    if hasattr(np, "bitwise_count"):
        return np.bitwise_count(words)
    # Before numpy 2.
    of_16 = _BITS_OF_16[words.view(np.uint16).reshape(*words.shape, 4)]
    counts: NDArray[np.uint8] = of_16.sum(axis=-1, dtype=np.uint8)
    return counts


def _common_prefix(one: bytes, other: bytes) -> int:
    return next(
        (at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b),
        min(len(one), len(other)),
    )


CHARACTER_SHARE = 0.6
WORD_SHARE = 0.4
"""Weight of common words in a similarity, which is at most 1; characters have the rest."""

_NUMBER = re.compile(r"\d+")
_WORD = re.compile(r"[^\W\d_]{3,}")


def most_similar(
    name: str, candidates: Mapping[int, str], *, min_similarity: float, most: int
) -> dict[int, float]:
    """Candidates whose names are most similar to ``name``, the most similar first.

    Of names that differ in a number alone (``<unused0>``, ``<unused1>``) only the lowest id counts.

    Args:
        name: A control token of the student.
        candidates: Teacher id -> name.
        min_similarity: Least similarity that counts.
        most: Most candidates to return; of equally similar ones the lowest ids.

    Returns:
        Teacher id -> similarity.
    """
    matcher = SequenceMatcher(autojunk=False)
    matcher.set_seq2(name.casefold())
    words = _words(name)
    similar: list[tuple[float, int]] = []
    for teacher_id, candidate in _one_of_each_number(candidates).items():
        matcher.set_seq1(candidate.casefold())
        similarity = CHARACTER_SHARE * matcher.ratio() + WORD_SHARE * _jaccard(
            words, _words(candidate)
        )
        if similarity >= min_similarity:
            similar.append((-similarity, teacher_id))
    return {teacher_id: -negative for negative, teacher_id in sorted(similar)[:most]}


def _one_of_each_number(names: Mapping[int, str]) -> dict[int, str]:
    first: dict[str, int] = {}
    for token_id in sorted(names):
        first.setdefault(_NUMBER.sub("0", names[token_id]), token_id)
    return {token_id: names[token_id] for token_id in first.values()}


def _words(name: str) -> frozenset[str]:
    return frozenset(_WORD.findall(name.casefold()))


def _jaccard(left: frozenset[str], right: frozenset[str]) -> float:
    return len(left & right) / len(left | right) if left or right else 0.0
