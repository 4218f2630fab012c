"""Texts that two models have scored chunk by chunk: their pieces, and sums over kinds of chunks.

T tokens of a text, C chunks of it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from megatron_ext.alignment.alignment import ChunkClass
from megatron_ext.alignment.audit.pair_audit import BatchText
from megatron_ext.alignment.audit.text_class import SCRIPTS, TEXT_CLASSES, TextClassifier
from megatron_ext.tokenizers import MegatronTokenizerText

_KINDS: Final = ("1:1", "1:n", "n:1", "n:m")


@dataclass(frozen=True, slots=True)
class TextPredictions:
    """A model's predictions of a text's tokens."""

    nats: NDArray[np.float64]
    """[T] surprise at each token."""
    likeliest: NDArray[np.int64]
    """[T, 5] ids in place of each token, the likeliest first."""
    probabilities: NDArray[np.float64]
    """[T, 5]"""


@dataclass(frozen=True, slots=True)
class ScoredText:
    """A text's chunks, with the predictions of both models at their tokens."""

    kind: NDArray[np.int8]
    """[C] ``ChunkClass`` of each chunk."""
    bounds: NDArray[np.int64]
    """[C, 2] first byte of each chunk and one past its last."""
    nats: tuple[NDArray[np.float64], NDArray[np.float64]]
    """[C] of the student and of the teacher."""
    first: tuple[NDArray[np.int64], NDArray[np.int64]]
    """[C] first token of each chunk, of the student and of the teacher."""
    predictions: Sequence[TextPredictions]


def pieces_of(
    text: str, scored: ScoredText, tokenizers: tuple[MegatronTokenizerText, MegatronTokenizerText]
) -> Iterator[list[Any]]:
    """Runs of chunks that spell whole characters, and what lies between chunks."""
    raw, start, stop = text.encode(), 0, 0
    nats = [0.0, 0.0]
    tops: list[Any] = []
    for chunk, (begin, end) in enumerate(scored.bounds.tolist()):
        if begin > stop:
            yield [raw[stop:begin].decode(errors="replace"), begin - stop, None, None, [], []]
            start = begin
        if not tops:
            start, nats = begin, [0.0, 0.0]
            tops = [_top(scored, side, chunk, tokenizers[side]) for side in (0, 1)]
        nats = [total + float(side[chunk]) for total, side in zip(nats, scored.nats, strict=True)]
        stop = end
        try:
            spelled = raw[start:stop].decode()
        except UnicodeDecodeError:
            continue
        if spelled:
            yield [spelled, stop - start, *(round(value, 3) for value in nats), *tops]
            tops = []


def _top(
    scored: ScoredText, side: int, chunk: int, tokenizer: MegatronTokenizerText
) -> list[list[Any]]:
    """The likeliest tokens of a model where a chunk begins, with per cents."""
    place, predictions = int(scored.first[side][chunk]), scored.predictions[side]
    return [
        [_shown(tokenizer, token), round(100 * probability, 1)]
        for token, probability in zip(
            predictions.likeliest[place].tolist(),
            predictions.probabilities[place].tolist(),
            strict=True,
        )
    ]


def _shown(tokenizer: MegatronTokenizerText, token: int) -> str:
    spelled = tokenizer.token_bytes(token)
    if spelled is None:
        return tokenizer.id_to_token(token)
    try:
        return spelled.decode()
    except UnicodeDecodeError:
        return f"<{spelled.hex(' ')}>"


@dataclass(slots=True)
class ChunkGroups:
    """Sums over chunks by script, class and kind."""

    same: NDArray[np.int64]
    """``validation.same_tokens``."""
    _classifier: TextClassifier = field(default_factory=TextClassifier)
    _sums: dict[tuple[str, str], NDArray[np.float64]] = field(default_factory=dict)

    def add(self, text: str, scored: ScoredText) -> None:
        """Count the chunks of a text that cover bytes."""
        covers = scored.bounds[:, 1] > scored.bounds[:, 0]
        if not covers.any():
            return
        bounds = scored.bounds[covers]
        batch = BatchText([text.encode()])
        script, text_class = self._classifier.classify(
            batch.code_points, batch.documents, *batch.characters(bounds)
        )
        kind = scored.kind[covers]
        choices = [
            side.likeliest[first[covers], 0]
            for side, first in zip(scored.predictions, scored.first, strict=True)
        ]
        is_single = kind == ChunkClass.ONE_TO_ONE
        agrees = (self.same[choices[0]] == choices[1]) & is_single
        values = np.stack(
            [
                np.ones(len(bounds)),
                bounds[:, 1] - bounds[:, 0],
                *(side[covers] for side in scored.nats),
                is_single,
                agrees,
            ],
            axis=1,
        ).astype(np.float64)
        self._add("script", np.array(SCRIPTS)[script], values)
        self._add("class", np.array(list(TEXT_CLASSES.values()))[text_class], values)
        self._add("chunk", np.array(_KINDS)[kind], values)

    def _add(self, by: str, names: NDArray[Any], values: NDArray[np.float64]) -> None:
        for name in np.unique(names).tolist():
            key = by, str(name)
            total = values[names == name].sum(axis=0)
            self._sums[key] = self._sums.get(key, np.zeros(len(total))) + total

    def rows(self) -> list[dict[str, Any]]:
        """Groups, the largest first; bits per byte, and agreement over 1:1 chunks or None."""
        rows = []
        for (by, name), sums in self._sums.items():
            chunks, count, student, teacher, single, agreeing = sums.tolist()
            rows.append(
                {
                    "by": by,
                    "name": name,
                    "bytes": int(count),
                    "chunks": int(chunks),
                    "student": student / math.log(2) / count,
                    "teacher": teacher / math.log(2) / count,
                    "agreement": agreeing / single if single else None,
                }
            )
        order = ("script", "class", "chunk")
        return sorted(rows, key=lambda row: (order.index(str(row["by"])), -int(row["bytes"])))
