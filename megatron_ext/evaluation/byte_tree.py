"""The next byte of a text as a model of tokens predicts it, exactly.

A model gives probabilities to sequences of tokens, and the same bytes are many sequences. The
probability that a text begins with the bytes ``x`` is a sum over the tree of covers of ``x``: the
sequences whose bytes begin with ``x`` while those of all but the last token do not reach its end.
That of the next byte is the same sum, divided by what follows ``x`` in the last token, where there
is anything left, and by the model's next token, where there is not. The covering trees are
those of Hayase et al. 2025 (arXiv 2506.14123), here over all sequences and not only those that a
tokenizer writes, because that is what the model predicts.

Every way to read ``x`` to its end needs the model once. Most have a tiny probability; those below a
share of the sum can wait until the text goes on as nothing else does, or are left out, which is
counted.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatron_ext.errors import DataError

END: Final = 256
"""Index of the end of a text among next bytes."""

NextTokenProbabilities = Callable[[Sequence[int]], NDArray[np.float64]]
"""[V] probabilities of the next token after ids."""


class _Branch(NamedTuple):
    """Tokens that go on with one byte, in the order of a vocabulary's tokens."""

    byte: int
    begin: int
    longer: int
    """First token that does not end with the byte; those before all do."""

    end: int


class ByteVocabulary:
    """Tokens of a vocabulary in the order of their bytes.

    Args:
        tokens: Bytes of each id; None for ids that are no text.
        ends: Ids that end a text.
    """

    def __init__(self, tokens: Sequence[bytes | None], ends: Iterable[int]) -> None:
        self.ends = np.array(sorted(set(ends)), dtype=np.int64)
        not_text = set(self.ends.tolist())
        texts = [i for i, token in enumerate(tokens) if token and i not in not_text]
        order = sorted(texts, key=lambda i: (tokens[i] or b"", i))
        self.ids = np.array(order, dtype=np.int64)
        """[N] the ids, in that order."""

        self._bytes = [tokens[i] or b"" for i in order]
        self._branches: dict[tuple[int, int], list[_Branch]] = {}

    def branches(self, begin: int, end: int, depth: int) -> list[_Branch]:
        """How tokens that share ``depth`` bytes and are longer go on."""
        known = self._branches.get((begin, depth))
        if known is None:
            known = self._branches[begin, depth] = list(self._found(begin, end, depth))
        return known

    def _found(self, begin: int, end: int, depth: int) -> Iterable[_Branch]:
        while begin < end:
            prefix = self._bytes[begin][: depth + 1]
            stop, longer = end, begin
            if prefix[-1] < 255:
                behind = prefix[:-1] + bytes([prefix[-1] + 1])
                stop = bisect_left(self._bytes, behind, begin, end)
            while longer < stop and len(self._bytes[longer]) == depth + 1:
                longer += 1
            yield _Branch(prefix[-1], begin, longer, stop)
            begin = stop


class _Reading(NamedTuple):
    """One way to read the whole text so far."""

    weight: float
    ids: tuple[int, ...]


@dataclass(slots=True)
class _Node:
    """Covers whose tokens but the last are the same."""

    ids: tuple[int, ...]
    """These tokens."""

    weight: float
    """Probability of them, relative to that of the text so far."""

    probs: NDArray[np.float64]
    """[N] of the last token, in the order of the vocabulary."""

    ends: float
    """Probability that the text ends behind them, where ``depth`` is 0."""

    begin: int
    end: int
    """Range of the last tokens that begin with what is read of them."""

    depth: int
    """Bytes that are read of the last token."""


class ByteTree:
    """All readings of a text by one model, byte by byte.

    Args:
        vocabulary: The model's.
        next_probs: Its next token after ids.
        prompt: Ids that come before, read in this way alone; at least one.
        prune: Readings of the whole text with a smaller share of its probability wait.
        beam: Most readings of the whole text that do not.
    """

    def __init__(
        self,
        vocabulary: ByteVocabulary,
        next_probs: NextTokenProbabilities,
        prompt: Sequence[int],
        *,
        prune: float = 0.0,
        beam: int | None = None,
    ) -> None:
        self._vocabulary, self._next_probs = vocabulary, next_probs
        self._prune, self._beam = prune, beam
        self._left_out = 0.0
        self._waiting: list[_Reading] = []
        self._nodes = [self._grown(_Reading(1.0, tuple(prompt)))]

    @property
    def lost(self) -> float:
        """Share of the text's probability whose readings were left out, of each when it was.

        No bound for one text: what went on in a way that the readings left out explain better has
        lost more.
        """
        return 1 - (1 - self._left_out) * (1 - self._waiting_share)

    @property
    def _waiting_share(self) -> float:
        return sum(reading.weight for reading in self._waiting)

    def next_bytes(self) -> NDArray[np.float64]:
        """[257] probabilities of the next byte, and of the end of the text; they sum to 1.

        Ids that are neither bytes nor the end have no share.

        Raises:
            DataError: The model gives no probability to anything that is text.
        """
        total = self._sums()
        whole = float(total.sum())
        if not whole > 0:
            raise DataError("the model expects neither a byte nor the end of the text here")
        return total / whole

    def expect(self, byte: int) -> None:
        """Have the readings that wait take part, if a byte is less likely than all of them.

        Call it before ``next_bytes`` where the probability of a given byte is asked.
        """
        of_byte = 0.0
        for node in self._nodes:
            branch = self._branch(node, byte)
            if branch is not None:
                of_byte += node.weight * float(node.probs[branch.begin : branch.end].sum())
        if self._waiting and of_byte < self._waiting_share:
            self._nodes += [self._grown(reading) for reading in self._waiting]
            self._waiting = []

    def read(self, byte: int) -> None:
        """Go on by one byte.

        Raises:
            DataError: No token of the model goes on with it.
        """
        self.expect(byte)
        going_on: list[_Node] = []
        readings: list[_Reading] = []
        for node in self._nodes:
            branch = self._branch(node, byte)
            if branch is None:
                continue
            for place in range(branch.begin, branch.longer):
                token = int(self._vocabulary.ids[place])
                weight = node.weight * float(node.probs[place])
                readings.append(_Reading(weight, (*node.ids, token)))
            if branch.longer < branch.end:
                begin, end, depth = branch.longer, branch.end, node.depth + 1
                going_on.append(replace(node, begin=begin, end=end, depth=depth, ends=0.0))
        going_on = [node for node in going_on if _mass(node) > 0]
        total = sum(reading.weight for reading in readings) + sum(map(_mass, going_on))
        if not total > 0:
            raise DataError("no token of the model goes on with this byte", got=f"0x{byte:02x}")
        readings = sorted(
            (reading for reading in readings if reading.weight > 0),
            key=lambda reading: -reading.weight,
        )
        likely = sum(reading.weight > self._prune * total for reading in readings)
        # Where nothing else is left, even unlikely readings are followed.
        count = likely if going_on or likely else len(readings)
        count = min(count, self._beam or count)
        waiting = readings[count:][: self._beam]
        left_out = sum(reading.weight for reading in readings[count + len(waiting) :])
        self._left_out = 1 - (1 - self.lost) * (1 - left_out / total)
        # Weights are shares of what is not left out.
        total -= left_out
        grown = [
            self._grown(_Reading(reading.weight / total, reading.ids))
            for reading in readings[:count]
        ]
        self._waiting = [_Reading(reading.weight / total, reading.ids) for reading in waiting]
        for node in going_on:
            node.weight /= total
        self._nodes = going_on + grown

    def _grown(self, reading: _Reading) -> _Node:
        probs = self._next_probs(reading.ids)
        texts = probs[self._vocabulary.ids]
        ends = float(probs[self._vocabulary.ends].sum())
        return _Node(reading.ids, reading.weight, texts, ends, 0, len(texts), 0)

    def _branch(self, node: _Node, byte: int) -> _Branch | None:
        branches = self._vocabulary.branches(node.begin, node.end, node.depth)
        return next((branch for branch in branches if branch.byte == byte), None)

    def _sums(self) -> NDArray[np.float64]:
        total = np.zeros(END + 1)
        for node in self._nodes:
            branches = self._vocabulary.branches(node.begin, node.end, node.depth)
            if branches:
                starts = np.array([branch.begin for branch in branches]) - node.begin
                masses = np.add.reduceat(node.probs[node.begin : node.end], starts)
                total[[branch.byte for branch in branches]] += node.weight * masses
            total[END] += node.weight * node.ends
        return total


def _mass(node: _Node) -> float:
    return node.weight * float(node.probs[node.begin : node.end].sum())
