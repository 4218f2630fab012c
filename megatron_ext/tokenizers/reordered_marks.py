"""Combining marks that a normaliser puts in another order than the text has them.

Shape letters: T tokens, M characters, N bytes of a text.
"""

from __future__ import annotations

import unicodedata
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Final, NamedTuple

import numpy as np

Span = tuple[int, int]

_FIRST_MARK: Final = 0x300


class ReorderedMarks(NamedTuple):
    """A character and marks behind it that are not in canonical order, as bytes of the text."""

    character: int
    """Where the character begins; a mark can be composed with it from behind others."""

    marks: int
    end: int


def spans_of_marks(spans: Sequence[Span], pieces: Sequence[bytes], text: bytes) -> list[Span]:
    """The spans [T] that a library reports, each of reordered marks widened to all of these.

    A library counts marks in the order that it gives them, so that one that has changed places is
    said to be another. The character before them goes along unless its tokens spell it.

    Args:
        spans: Bytes where each token begins and ends.
        pieces: Bytes of each token.
        text: The whole text, N bytes.
    """
    sequences = list(reordered_marks(text))
    if not sequences:
        return list(spans)
    spelled = set(_spelled_ends(spans, pieces, text))
    starts = sorted({0, *(start for start, _ in spans)})
    begins, ends = [], []
    for character, marks, end in sequences:
        # A character that was put together with the one before begins where that does.
        with_character = starts[bisect_right(starts, character) - 1]
        begins.append(marks if marks in spelled else with_character)
        ends.append(end)
    widened = []
    for (start, stop), piece in zip(spans, pieces, strict=True):
        first, last = bisect_right(ends, start), bisect_right(begins, stop - 1) - 1
        # A space that a library puts before a word may be said to be its first character.
        if start < stop and first <= last and piece != b" ":
            start, stop = min(start, begins[first]), max(stop, ends[last])
        widened.append((start, stop))
    return widened


def reordered_marks(text: bytes) -> Iterator[ReorderedMarks]:
    """Runs of marks in ``text`` that are not in canonical order, each once, ascending."""
    characters = text.decode()
    points = np.frombuffer(characters.encode("utf-32-le"), np.uint32)
    if points.max(initial=0) < _FIRST_MARK:
        return
    found, index = np.unique(points, return_inverse=True)
    # A character that is taken apart can end in a mark, too.
    parts = [unicodedata.normalize("NFD", chr(point)) for point in found.tolist()]
    first, last = (np.array([unicodedata.combining(part[i]) for part in parts]) for i in (0, -1))
    classes = first[index]
    falls = np.flatnonzero((classes[1:] > 0) & (classes[1:] < last[index][:-1]))
    if not len(falls):
        return
    widths = np.array([len(chr(point).encode()) for point in found.tolist()])[index]
    offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(widths)]).tolist()
    starters = np.flatnonzero(classes == 0)
    after = starters.searchsorted(falls, side="right")
    firsts = np.concatenate([np.full(1, -1), starters])[after]
    stops = np.append(starters, len(classes))[after]
    for begin, stop in sorted(set(zip(firsts.tolist(), stops.tolist(), strict=True))):
        yield ReorderedMarks(offsets[max(begin, 0)], offsets[begin + 1], offsets[stop])


def _spelled_ends(spans: Sequence[Span], pieces: Sequence[bytes], text: bytes) -> Iterator[int]:
    """Ends of spans whose tokens spell them."""
    for (start, stop), group in groupby(zip(spans, pieces, strict=True), key=lambda pair: pair[0]):
        if b"".join(piece for _, piece in group) == text[start:stop]:
            yield stop
