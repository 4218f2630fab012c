"""Characters that two releases of Unicode may see differently.

A pre-tokenizer asks Unicode what a character is, a normaliser what it composes with, and each
library brings tables of its own release: gigatoken 0.10 those of Unicode 17, tokenizers 0.22 those
of 16 for its patterns and of 9 for its normaliser. So libraries are compared on each character
that this Python knows. One that it does not know may be anything and is rare until proven.

Shape letters: S code points below 0x110000.
"""

from __future__ import annotations

import unicodedata
from bisect import bisect_left
from collections.abc import Iterator
from functools import cache

import numpy as np
from numpy.typing import NDArray

_CODE_POINTS = 0x110000
_ASSIGNED = (range(0x40000), range(0xE0000, 0xE1000))
"""Where Unicode has assigned characters, or may soon; private planes beyond are assigned whole."""
_PRIVATE_PLANES = range(0xF0000, _CODE_POINTS)
_SURROGATES = range(0xD800, 0xE000)
_EMOJI = range(0x1F000, 0x1FB00)
"""Blocks whose new characters are soon in every text: each is compared, known or not."""
_UNIFORM_RUN, _EVERY = 256, 64
"""Neighbours of one category, ideographs mostly: so many or more are compared at every 64th."""


def unknown_characters() -> NDArray[np.bool_]:
    """Whether this Python's Unicode lacks each code point [S], a new array."""
    is_unknown: NDArray[np.bool_] = _categories() == 0
    return is_unknown


@cache
def compared_characters() -> str:
    """The characters to compare two libraries on, one by one, in ascending order."""
    categories = _categories()
    chosen = [point for point in _EMOJI if categories[point] == 0]
    for run in _runs():
        step = _EVERY if len(run) >= _UNIFORM_RUN else 1
        chosen += [*run[::step], run[-1]]
    return "".join(map(chr, sorted(set(chosen))))


def represented_by(character: str) -> range:
    """A compared character and those beside it that are not compared but taken to be alike."""
    compared = compared_characters()
    at = bisect_left(compared, character)
    before = ord(compared[at - 1]) + 1 if at else 0
    after = ord(compared[at + 1]) if at + 1 < len(compared) else ord(character) + 1
    return range(before, after)


def is_young(character: str) -> bool:
    """Whether Unicode 3.2 lacked a character, which a normaliser may therefore not know."""
    return unicodedata.ucd_3_2_0.category(character) == "Cn"


def _runs() -> Iterator[range]:
    """Maximal runs of known characters of one category, in ascending order."""
    categories = _categories()
    starts = np.flatnonzero(np.diff(categories, prepend=-1) != 0).tolist()
    for start, stop in zip(starts, [*starts[1:], _CODE_POINTS], strict=True):
        if categories[start] != 0 and start not in _SURROGATES:
            yield range(start, stop)


@cache
def _categories() -> NDArray[np.int16]:
    """A number for the category of each code point [S]; 0 where none is assigned."""
    numbers = {"Cn": 0, "Co": 1}
    table = np.zeros(_CODE_POINTS, np.int16)
    table[_PRIVATE_PLANES.start :] = numbers["Co"]
    for block in _ASSIGNED:
        names = map(unicodedata.category, map(chr, block))
        table[block.start : block.stop] = [numbers.setdefault(n, len(numbers)) for n in names]
    return table
