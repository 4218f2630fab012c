"""Documents of an audit, and rankings of their chunks that are not 1:1. J such chunks, T tokens.

Chunks are counted as one where the ids of both sides are equal. Memory is bounded: a counted chunk
is a few numbers, and an example is made only of those that lead a ranking.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import accumulate, pairwise
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

Hashes = NDArray[np.uint64]
Counts = NDArray[np.int64]

LISTED: Final = 25
"""Chunks in each ranking."""

MOST_TRACKED: Final = 1 << 20
"""Distinct chunks counted; past it the half that concerns the fewest tokens is dropped."""

_MIX: Final = tuple(
    np.uint64(value)
    for value in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB, 0xD6E8FEB86659FD93)
)
"""Odd constants of SplitMix64 and one more."""


@dataclass(frozen=True, slots=True)
class Piece:
    """One token of a chunk."""

    token_id: int
    text: str
    """The text it covers; bytes of an incomplete character in angle brackets."""


@dataclass(frozen=True, slots=True)
class Example:
    """One occurrence of a chunk, in its context."""

    student: tuple[Piece, ...]
    teacher: tuple[Piece, ...]
    text: str
    before: str
    """Text in front of it, at most ``CONTEXT_BYTES``; so is the text after it."""
    after: str
    place: str
    """``file:line``"""


@dataclass(frozen=True, slots=True)
class MultiTokenChunk:
    """A chunk that is not 1:1, and how often it occurs."""

    count: int
    tokens: int
    """Tokens of both sides in all of its chunks."""
    example: Example

    def as_row(self) -> dict[str, Any]:
        """The chunk as a JSON object."""
        return asdict(self)


@dataclass(slots=True)
class ChunkRanking:
    """Counts of chunks that are not 1:1, added block by block.

    A chunk that leads a ranking at the end also led it in the last block in which it occurred,
    because the others have only grown since. So its example is made then, and no text is kept.
    """

    _hashes: Hashes
    """[E], ascending."""
    _counts: Counts
    _sizes: Counts
    """Tokens of both sides in one such chunk."""
    _examples: dict[int, Example]
    are_exact: bool = True
    """Counts include every chunk; they are lower bounds once some chunks were dropped."""

    @classmethod
    def none(cls) -> ChunkRanking:
        """The ranking before the first block."""
        empty = np.zeros(0, np.int64)
        return cls(np.zeros(0, np.uint64), empty, empty, {})

    def add(
        self, hashes: Hashes, sizes: NDArray[np.int64], example: Callable[[int], Example]
    ) -> None:
        """Count the chunks of a block that are not 1:1.

        Args:
            hashes: Hash of both sides' ids in each chunk [J].
            sizes: Number of tokens of both sides in each chunk [J].
            example: Makes the example of the ``j``-th chunk.
        """
        block, first, counts = np.unique(hashes, return_index=True, return_counts=True)
        both = np.concatenate([self._hashes, block])
        self._hashes, inverse = np.unique(both, return_inverse=True)
        inverse = inverse.ravel()
        total = np.zeros(len(self._hashes), np.int64)
        np.add.at(total, inverse, np.concatenate([self._counts, counts]))
        all_sizes = np.zeros(len(self._hashes), np.int64)
        all_sizes[inverse] = np.concatenate([self._sizes, sizes[first]])
        self._counts, self._sizes = total, all_sizes
        if len(self._hashes) > MOST_TRACKED:
            self._drop_half()
        self._take_examples(dict(zip(block.tolist(), first.tolist(), strict=True)), example)

    def by_tokens(self) -> list[MultiTokenChunk]:
        """The chunks that concern the most tokens, most first."""
        return self._listed(self._tokens())

    def by_size(self) -> list[MultiTokenChunk]:
        """The longest chunks, in tokens; of equal ones the most frequent first."""
        return self._listed(self._lengths())

    def _tokens(self) -> Counts:
        return self._counts * self._sizes

    def _lengths(self) -> Counts:
        most = np.int64(2**31 - 1)
        score: Counts = np.minimum(self._sizes, most) * (most + 1)
        score += np.minimum(self._counts, most)
        return score

    def _take_examples(self, firsts: dict[int, int], example: Callable[[int], Example]) -> None:
        leading = {int(self._hashes[i]) for s in self._scores() for i in _leaders(s)}
        existing = {key: self._examples[key] for key in leading if key in self._examples}
        new = {key: example(firsts[key]) for key in leading - existing.keys() if key in firsts}
        self._examples = existing | new

    def _scores(self) -> tuple[Counts, Counts]:
        return self._tokens(), self._lengths()

    def _listed(self, score: Counts) -> list[MultiTokenChunk]:
        tokens = self._tokens()
        return [
            MultiTokenChunk(
                int(self._counts[i]), int(tokens[i]), self._examples[int(self._hashes[i])]
            )
            for i in _leaders(score)
            if int(self._hashes[i]) in self._examples
        ]

    def _drop_half(self) -> None:
        kept = np.sort(np.argpartition(self._tokens(), -MOST_TRACKED // 2)[-MOST_TRACKED // 2 :])
        leading = np.concatenate([_leaders(score) for score in self._scores()])
        kept = np.union1d(kept, leading)
        self._hashes, self._counts, self._sizes = (
            self._hashes[kept],
            self._counts[kept],
            self._sizes[kept],
        )
        self.are_exact = False


def _leaders(score: Counts) -> NDArray[np.intp]:
    """Indices of the highest scores, highest first; ties in the order of their hashes."""
    if len(score) > LISTED:
        least = np.partition(score, -LISTED)[-LISTED]
        candidates = np.flatnonzero(score >= least)
    else:
        candidates = np.arange(len(score))
    order = np.argsort(-score[candidates], kind="stable")
    leaders: NDArray[np.intp] = candidates[order[:LISTED]]
    return leaders


def pair_hashes(
    student_ids: NDArray[np.int32],
    student_spans: NDArray[np.int32],
    teacher_ids: NDArray[np.int32],
    teacher_spans: NDArray[np.int32],
) -> Hashes:
    """A 64-bit hash of the ids of both sides in each span pair [J]; equal ids, equal hash."""
    student = _span_hashes(student_ids, student_spans)
    teacher = _span_hashes(teacher_ids, teacher_spans)
    return _mixed(student * _MIX[3] + teacher)


def _span_hashes(ids: NDArray[np.int32], spans: NDArray[np.int32]) -> Hashes:
    if not len(spans):
        return np.zeros(0, np.uint64)
    lengths = (spans[:, 1] - spans[:, 0]).astype(np.int64)
    firsts = np.cumsum(lengths) - lengths
    within = np.arange(int(lengths.sum())) - np.repeat(firsts, lengths)
    tokens = ids[np.repeat(spans[:, 0].astype(np.int64), lengths) + within]
    keys = tokens.astype(np.uint64) * _MIX[0] + within.astype(np.uint64) * _MIX[3]
    hashes: Hashes = np.add.reduceat(_mixed(keys), firsts)
    return hashes


def _mixed(keys: Hashes) -> Hashes:
    """SplitMix64's finaliser."""
    keys = (keys ^ (keys >> np.uint64(30))) * _MIX[1]
    keys = (keys ^ (keys >> np.uint64(27))) * _MIX[2]
    mixed: Hashes = keys ^ (keys >> np.uint64(31))
    return mixed


PIECE_CHARACTERS: Final = 1 << 20
"""A document much longer than this is tokenized in pieces of about this size."""

_LINE_START: Final = re.compile(r"\n(?=\S)")


@dataclass(frozen=True, slots=True)
class AuditDocument:
    """One document, or a piece of a long one."""

    text: str
    source: str
    """Name of the file."""
    line: int = 1
    """Line or row of the file where it begins."""
    is_whole_file: bool = False
    """The line feeds of ``text`` are lines of the file; those of a record are not."""
    begins_document: bool = True
    """The piece is the first of its document."""

    def place(self, character: int) -> str:
        """``file:line`` of a character."""
        below = self.text.count("\n", 0, character) if self.is_whole_file else 0
        return f"{self.source}:{self.line + below}"

    def pieces(self) -> Iterator[AuditDocument]:
        """The document in pieces that fit in memory many times over.

        It is cut in front of lines that begin with no white space: hardly any tokenizer has a token
        that reaches over such a boundary. Text without such lines stays whole.
        """
        if len(self.text) <= 2 * PIECE_CHARACTERS:
            yield self
            return
        begin, line, begins = 0, self.line, self.begins_document
        while len(self.text) - begin > 2 * PIECE_CHARACTERS:
            cut = _LINE_START.search(self.text, begin + PIECE_CHARACTERS)
            if cut is None:
                break
            yield replace(
                self, text=self.text[begin : cut.end()], line=line, begins_document=begins
            )
            begins = False
            if self.is_whole_file:
                line += self.text.count("\n", begin, cut.end())
            begin = cut.end()
        yield replace(self, text=self.text[begin:], line=line, begins_document=begins)


def document_batches(
    documents: Iterable[AuditDocument], characters: int
) -> Iterator[list[AuditDocument]]:
    """The documents, in pieces, in lists of about ``characters``; empty ones are left out."""
    batch: list[AuditDocument] = []
    size = 0
    for document in documents:
        for piece in document.pieces():
            if piece.text:
                batch.append(piece)
                size += len(piece.text)
            if size >= characters:
                yield batch
                batch, size = [], 0
    if batch:
        yield batch


CONTEXT_BYTES: Final = 40
"""Bytes of the text shown on either side."""

MOST_PIECES: Final = 40
"""Most tokens shown of a chunk."""

MOST_TEXT: Final = 200
"""Most characters shown of a chunk."""


@dataclass(frozen=True, slots=True)
class SpannedTokens:
    """The tokens of one side, and the spans of the counted chunks. J spans, T tokens."""

    ids: NDArray[np.int32]
    """[T]"""
    ends: NDArray[np.int64]
    """[T] in bytes of the batch."""
    spans: NDArray[np.int32]
    """[J, 2]"""


class ExampleMaker:
    """Makes examples of chunks in a batch.

    Args:
        batch: The documents.
        raws: Their UTF-8.
        sides: Tokens of the student and of the teacher, with the spans of the chunks.
    """

    def __init__(
        self,
        batch: Sequence[AuditDocument],
        raws: Sequence[bytes],
        sides: tuple[SpannedTokens, SpannedTokens],
    ) -> None:
        self._batch = batch
        self._raws = raws
        self._begins = [0, *accumulate(map(len, raws))]
        self._sides = sides

    def example(self, chunk: int) -> Example:
        """The example of the ``chunk``-th span."""
        student = self._sides[0]
        first, stop = student.spans[chunk].tolist()
        begin = int(student.ends[first - 1]) if first else 0
        index = bisect_right(self._begins, begin) - 1
        shift = self._begins[index]
        raw, document = self._raws[index], self._batch[index]
        begin, end = begin - shift, int(student.ends[stop - 1]) - shift
        before = raw[max(begin - CONTEXT_BYTES, 0) : begin].decode(errors="ignore")
        after = raw[end : end + CONTEXT_BYTES].decode(errors="ignore")
        sides = [self._pieces(side, chunk, raw, shift) for side in self._sides]
        return Example(
            student=sides[0],
            teacher=sides[1],
            text=shown_bytes(raw[begin:end])[:MOST_TEXT],
            before=before,
            after=after,
            place=document.place(len(raw[:begin].decode(errors="ignore"))),
        )

    @staticmethod
    def _pieces(side: SpannedTokens, chunk: int, raw: bytes, shift: int) -> tuple[Piece, ...]:
        first, stop = side.spans[chunk].tolist()
        stop = min(stop, first + MOST_PIECES)
        start = int(side.ends[first - 1]) if first else 0
        bounds = [start - shift, *(side.ends[first:stop] - shift).tolist()]
        return tuple(
            Piece(token_id, shown_bytes(raw[begin:end]))
            for token_id, (begin, end) in zip(
                side.ids[first:stop].tolist(), pairwise(bounds), strict=True
            )
        )


def shown_bytes(covered: bytes) -> str:
    """Bytes as text; bytes of an incomplete character in angle brackets."""
    try:
        return covered.decode()
    except UnicodeDecodeError:
        return f"<{covered.hex(' ')}>"
