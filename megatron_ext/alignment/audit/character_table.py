"""Script and kind of every Unicode character, looked up once for each that a text holds.

Scripts are those of the Unicode property Script (UAX #24), as the ``regex`` package knows them.
"""

from __future__ import annotations

import unicodedata
from typing import Final

import numpy as np
from numpy.typing import NDArray

from megatron_ext.extras import needed_packages

CodePoints = NDArray[np.uint32]

DIGIT: Final = 1
"""A decimal digit (category Nd)."""
LETTER: Final = 2
"""A letter, or a mark that belongs to a script: a vowel sign of Devanagari."""
SPACE: Final = 4
"""White space."""
SIGN: Final = 8
"""Punctuation or a symbol (categories P and S), emoji among them."""
OTHER: Final = 16
"""Controls, joiners, marks of no script, numbers that are no decimal digits, unassigned."""

# fmt: off
_MODERN: Final = (
    "Arabic", "Armenian", "Bengali", "Bopomofo", "Cyrillic", "Devanagari", "Ethiopic", "Georgian",
    "Greek", "Gujarati", "Gurmukhi", "Han", "Hangul", "Hebrew", "Hiragana", "Kannada", "Katakana",
    "Khmer", "Lao", "Latin", "Malayalam", "Myanmar", "Oriya", "Sinhala", "Tamil", "Telugu",
    "Thaana", "Thai", "Tibetan",
    "Adlam", "Balinese", "Canadian_Aboriginal", "Cherokee", "Javanese", "Mongolian", "Nko",
    "Ol_Chiki", "Sundanese", "Syriac", "Tai_Le", "Tifinagh", "Vai", "Yi",
)
# fmt: on
"""Scripts in everyday use, from tables 5 and 7 of UAX #31."""

SCRIPTS: Final = ("Common", *_MODERN, "other scripts", "several scripts")
"""Names by number. Common, with Inherited in it, is what all scripts share: digits, punctuation,
white space, emoji. The last two are scripts not listed, and of a chunk that it holds several."""

COMMON: Final = 0
OTHER_SCRIPT: Final = len(SCRIPTS) - 2
SEVERAL_SCRIPTS: Final = len(SCRIPTS) - 1

_CODE_POINTS: Final = 0x110000


class CharacterTable:
    """Number of the script and bit of the kind of each character.

    Raises:
        MissingDependencyError: regex is not installed.
    """

    def __init__(self) -> None:
        with needed_packages("telling scripts apart"):
            import regex
        self._patterns = [regex.compile(rf"\p{{Script={name}}}+") for name in _MODERN]
        self._common = regex.compile(r"[\p{Script=Common}\p{Script=Inherited}]+")
        self._scripts = np.zeros(_CODE_POINTS, np.uint8)
        # No kind is 0, which marks what has not been looked up.
        self._kinds = np.zeros(_CODE_POINTS, np.uint8)

    def look_up(self, code_points: CodePoints) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
        """Scripts [M] and kinds [M] of the characters of a text."""
        kinds = self._kinds[code_points]
        if not kinds.all():
            self._learn(np.unique(code_points[kinds == 0]))
            kinds = self._kinds[code_points]
        return self._scripts[code_points], kinds

    def _learn(self, code_points: CodePoints) -> None:
        text = code_points.tobytes().decode("utf-32-le", "surrogatepass")
        scripts = np.full(len(text), OTHER_SCRIPT, np.uint8)
        for number, pattern in enumerate((self._common, *self._patterns), COMMON):
            for match in pattern.finditer(text):
                scripts[match.start() : match.end()] = number
        self._scripts[code_points] = scripts
        self._kinds[code_points] = [
            _kind(character, has_script=script != COMMON)
            for character, script in zip(text, scripts.tolist(), strict=True)
        ]


def _kind(character: str, *, has_script: bool) -> int:
    if character.isspace():
        return SPACE
    category = unicodedata.category(character)
    if category == "Nd":
        return DIGIT
    if category[0] == "L" or (category[0] == "M" and has_script):
        return LETTER
    return SIGN if category[0] in "PS" else OTHER
