"""Characters that two releases of Unicode may see differently.

A pre-tokenizer asks Unicode what a character is, a normaliser what it composes with, and each
library brings tables of its own release: gigatoken 17, tokenizers 0.22 releases 16 (its patterns)
and 9 (its normaliser). Characters that Unicode 3.2 had are the same to all of them, unless their
category has changed since; Python knows both. Those that even this Python does not know may be
anything.

Shape letters: S code points below 0x110000.
"""

from __future__ import annotations

import unicodedata
from functools import cache

import numpy as np
from numpy.typing import NDArray

_CODE_POINTS = 0x110000
_ASSIGNED = (range(0x40000), range(0xE0000, 0xE1000))
"""Where Unicode has assigned characters, or may soon; private planes beyond are assigned whole."""
_PRIVATE_PLANES = range(0xF0000, _CODE_POINTS)
_EMOJI = range(0x1F000, 0x1FB00)
"""Blocks whose new characters are soon in every text: each is probed, known or not."""
_UNIFORM_RUN, _EVERY = 256, 64
"""Runs of one category, ideographs mostly, from this length on are probed at every 64th."""


def rare_until_proven() -> NDArray[np.bool_]:
    """Whether this Python's Unicode lacks each code point [S], a new array."""
    return ~_categories()[0].astype(np.bool_)


@cache
def probed_characters() -> str:
    """The characters to compare two libraries on, one by one."""
    now, old = _categories()
    recent = np.flatnonzero((now != old) & (now != 0))
    starts = np.flatnonzero(np.diff(recent, prepend=-2) != 1)
    starts = np.union1d(starts, np.flatnonzero(np.diff(now[recent], prepend=-1) != 0))
    chosen: list[int] = []
    for run in np.split(recent, starts[1:]):
        step = _EVERY if len(run) >= _UNIFORM_RUN else 1
        chosen += [*run[::step].tolist(), int(run[-1])]
    emoji = [point for point in _EMOJI if now[point] == 0]
    return "".join(map(chr, sorted({*chosen, *emoji})))


def is_recent(character: str) -> bool:
    """Whether a character, or its category, is younger than Unicode 3.2."""
    now, old = _categories()
    return bool(now[ord(character)] != old[ord(character)] or now[ord(character)] == 0)


@cache
def _categories() -> tuple[NDArray[np.int16], NDArray[np.int16]]:
    """A number for the category of each code point, now and in Unicode 3.2 [S]; 0 is unassigned."""
    numbers: dict[str, int] = {"Cn": 0}
    tables = []
    for database in (unicodedata, unicodedata.ucd_3_2_0):
        table = np.zeros(_CODE_POINTS, np.int16)
        table[_PRIVATE_PLANES.start :] = numbers.setdefault("Co", len(numbers))
        for block in _ASSIGNED:
            names = map(database.category, map(chr, block))
            table[block.start : block.stop] = [
                numbers.setdefault(name, len(numbers)) for name in names
            ]
        tables.append(table)
    return tables[0], tables[1]
