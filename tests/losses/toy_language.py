"""A random distribution over all texts of one length, and what a tokenizer's model says under it.

Small enough to enumerate: the probability of an event is the sum over the texts in which it occurs.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import accumulate, product
from typing import Any

import numpy as np
import torch

from megatron_ext.alignment.batch import AlignmentBatch
from megatron_ext.distributed.vocab_parallel import VocabShard
from tests.ops.kernel_case import EVERY_COMBINATION

Tokens = tuple[int, ...]

TEXTS = (b"caabb", b"aacbb", b"abbca", b"babca", b"cabac")
"""What is read; all texts that are enumerated go on behind it."""

OPTIONS: tuple[dict[str, Any], ...] = (
    {"direction": "forward", "temperature": 1.0},
    {"direction": "reverse", "temperature": 1.7},
    {"direction": "jensen_shannon", "temperature": 0.8, "mixture": 0.3},
)


def read_in_turn(vocabularies: Iterable[str]) -> list[tuple[str, bytes, dict[str, Any]]]:
    """All vocabularies with all options, each over another text; over all of them where every
    combination is run."""
    cases = []
    for number, (name, options) in enumerate(product(vocabularies, OPTIONS)):
        texts = TEXTS if EVERY_COMBINATION else [TEXTS[number % len(TEXTS)]]
        cases += [(name, text, options) for text in texts]
    return cases


def tokenize(text: bytes, vocabulary: Sequence[bytes]) -> Tokens:
    """The longest token at each place, from the left; an end that no token spells is left out."""
    ids, at = [], 0
    while at < len(text):
        fitting = [i for i, token in enumerate(vocabulary) if text.startswith(token, at)]
        if not fitting:
            break
        ids.append(max(fitting, key=lambda i: len(vocabulary[i])))
        at += len(vocabulary[ids[-1]])
    return tuple(ids)


@dataclass(frozen=True)
class ToyLanguage:
    """P(text) of every text of ``length`` bytes over ``alphabet``."""

    alphabet: bytes = b"abc"
    length: int = 7
    seed: int = 0

    @cached_property
    def texts(self) -> list[bytes]:
        return [bytes(text) for text in product(self.alphabet, repeat=self.length)]

    @cached_property
    def probabilities(self) -> np.ndarray:
        return np.random.default_rng(self.seed).dirichlet(np.full(len(self.texts), 0.3))


@cache
def toy_model(seed: int, vocabulary: tuple[bytes, ...]) -> ToyModel:
    """One of each, since making one tokenizes every text."""
    return ToyModel(ToyLanguage(seed=seed), vocabulary)


class ToyModel:
    """The token-level model that ``language`` is for one vocabulary, exactly."""

    def __init__(self, language: ToyLanguage, vocabulary: Sequence[bytes]) -> None:
        self.vocabulary = vocabulary
        self._streams = [tokenize(text, vocabulary) for text in language.texts]
        self._probabilities = language.probabilities
        self._masses: dict[Tokens, float] = defaultdict(float)
        for stream, probability in zip(self._streams, self._probabilities, strict=True):
            for end in range(len(stream) + 1):
                self._masses[stream[:end]] += float(probability)

    def mass(self, tokens: Tokens) -> float:
        """Probability of the texts whose tokens begin with these."""
        return self._masses.get(tokens, 0.0)

    def probability(self, tokens: Tokens, context: Tokens) -> float:
        """Of ``tokens`` coming next."""
        return self.mass(context + tokens) / self.mass(context)

    def others(self, events: Sequence[Tokens], context: Tokens) -> float:
        """Probability that none of ``events`` comes next."""
        left = sum(
            p
            for stream, p in zip(self._streams, self._probabilities, strict=True)
            if stream[: len(context)] == context
            and not any(
                stream[len(context) : len(context) + len(event)] == event for event in events
            )
        )
        return float(left) / self.mass(context)

    def logits(self, tokens: Tokens) -> torch.Tensor:
        """fp64 [T, V]: row ``i`` predicts token ``i`` behind those before it."""
        rows = [
            [self.probability((v,), tokens[:i]) for v in range(len(self.vocabulary))]
            for i in range(len(tokens))
        ]
        return torch.tensor(rows, dtype=torch.float64).log()


class TwoReadings:
    """One text read by two models, up to the last place where tokens of both end."""

    def __init__(
        self, text: bytes, vocabularies: tuple[tuple[bytes, ...], ...], seeds: tuple[int, int]
    ) -> None:
        self.vocabularies = vocabularies
        self.models = [toy_model(*its) for its in zip(seeds, vocabularies, strict=True)]
        streams = [tokenize(text, vocabulary) for vocabulary in vocabularies]
        ends = [
            list(accumulate(len(vocabulary[token]) for token in stream))
            for vocabulary, stream in zip(vocabularies, streams, strict=True)
        ]
        common = sorted(set(ends[0]) & set(ends[1]))
        last = common[-1] if common else 0
        self.ends = [[end for end in side if end <= last] for side in ends]
        self.streams = [s[: len(side)] for s, side in zip(streams, self.ends, strict=True)]
        self.chunk_ids = [np.searchsorted(common, side).astype(np.int64) for side in self.ends]

    @cached_property
    def logits(self) -> list[torch.Tensor]:
        """fp64 [1, T, V] of both models."""
        return [m.logits(s)[None] for m, s in zip(self.models, self.streams, strict=True)]

    @property
    def labels(self) -> list[torch.Tensor]:
        return [torch.tensor(stream, dtype=torch.int64)[None] for stream in self.streams]

    @property
    def shards(self) -> list[VocabShard]:
        """The whole vocabularies."""
        sizes = map(len, self.vocabularies)
        return [VocabShard(start=0, stop=size, vocab_size=size) for size in sizes]

    @property
    def alignment(self) -> AlignmentBatch:
        return AlignmentBatch.from_chunk_ids(
            *(torch.from_numpy(ids)[None] for ids in self.chunk_ids)
        )
