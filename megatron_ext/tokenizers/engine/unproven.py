"""What keeps a text from the engine.

Shape letters: S code points below 0x110000.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

_SLICE = 1 << 22
"""Characters looked at together."""


class Unproven:
    """Characters and names of which nothing is proven: a text with one goes to the library.

    Args:
        is_rare: Whether each code point is such a character [S]; None where there are none.
        names: What engine and library read differently where a text spells it.
    """

    def __init__(self, is_rare: NDArray[np.bool_] | None, names: Sequence[str]) -> None:
        self._is_rare = is_rare
        self._names = re.compile("|".join(map(re.escape, names))) if names else None

    def covers(self, character: str) -> bool:
        """Whether a text with this character goes to the library."""
        return self._is_rare is not None and bool(self._is_rare[ord(character)])

    def texts_with(self, texts: Sequence[str]) -> list[int]:
        """Index of each text that has one, ascending; a text must not hold a lone surrogate."""
        found: set[int] = set()
        if self._names is not None:
            found.update(i for i, text in enumerate(texts) if self._names.search(text))
        if self._is_rare is not None:
            for owners, ends, characters in _slices(texts):
                codes = np.frombuffer(characters.encode("utf-32-le"), np.int32)
                hits = np.flatnonzero(self._is_rare.take(codes))
                slots = np.unique(np.searchsorted(ends, hits, side="right")).tolist()
                found.update(owners[slot] for slot in slots)
        return sorted(found)


def _slices(texts: Sequence[str]) -> Iterator[tuple[list[int], list[int], str]]:
    """The characters of texts that are not ASCII, some texts at a time.

    Yields:
        Index of each text, where each ends among the characters, and the characters.
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
