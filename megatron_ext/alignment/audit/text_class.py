"""Classification of chunks by script and by kind: numbers, letters, punctuation, space, code.

M characters, C chunks. All steps work on whole arrays: a corpus has millions of chunks.
"""

from __future__ import annotations

import unicodedata
from typing import Final

import numpy as np
from numpy.typing import NDArray

from megatron_ext.imports import needed_packages

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
"""Names by number. Common, which includes Inherited, holds what all scripts share: digits,
punctuation, white space, emoji. The last two are for scripts not listed, and for chunks of several
scripts."""

COMMON: Final = 0
OTHER_SCRIPT: Final = len(SCRIPTS) - 2
SEVERAL_SCRIPTS: Final = len(SCRIPTS) - 1

_CODE_POINTS: Final = 0x110000


class CharacterTable:
    """Look-up table of the script number and the kind bit of each character.

    Raises:
        MissingDependencyError: regex is not installed.
    """

    def __init__(self) -> None:
        with needed_packages("telling scripts apart"):
            import regex
        self._patterns = [regex.compile(rf"\p{{Script={name}}}+") for name in _MODERN]
        self._common = regex.compile(r"[\p{Script=Common}\p{Script=Inherited}]+")
        self._scripts = np.zeros(_CODE_POINTS, np.uint8)
        # No kind is 0, which marks characters that have not been looked up.
        self._kinds = np.zeros(_CODE_POINTS, np.uint8)

    def look_up(self, code_points: CodePoints) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
        """Scripts [M] and kinds [M] of the characters of a text."""
        kinds = self._kinds[code_points]
        if not kinds.all():
            self._fill(np.unique(code_points[kinds == 0]))
            kinds = self._kinds[code_points]
        return self._scripts[code_points], kinds

    def _fill(self, code_points: CodePoints) -> None:
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


TEXT_CLASSES: Final = {
    "digits-1": "1-digit numbers",
    "digits-2": "2-digit numbers",
    "digits-3": "3-digit numbers",
    "digits-4+": "numbers of 4 or more digits",
    "letters": "letters",
    "punctuation": "punctuation and symbols",
    "whitespace": "white space",
    "code": "code-like",
    "mixed": "several of these",
    "other": "none of these",
}
"""Name and meaning of each class, by number.

White space counts only in a chunk that holds nothing else, so that `` the`` is letters. The length
of a digit run is that of the number in the text, not of the chunk. Code-like is a chunk

- with one of the signs in ``CODE_SIGNS``, which prose hardly has;
- of an identifier: a run of ASCII letters, digits and ``_`` with a letter in it that has a ``_``,
  or a capital right after a small letter (as some names have, too);
- of white space alone, in the indentation of a line: a tab, or two spaces or more.

A chunk of digits alone is digits, wherever it stands.
"""

DIGITS_1, LETTERS, PUNCTUATION, WHITESPACE, CODE, MIXED, NOTHING = 0, 4, 5, 6, 7, 8, 9

CODE_SIGNS: Final = "#*+<=>@[\\]^_`{|}~"

_CODE_FLAG: Final = 32
_INDENT_FLAG: Final = 64
_RUN_FLAGS: Final = 128
"""Flag of a digit run of length 1; lengths 2, 3 and 4 or more are the bits above it."""

Flags = NDArray[np.uint16]
Mask = NDArray[np.bool_]
Indices = NDArray[np.int64]


class TextClassifier:
    """Classifier of chunks by script and class.

    Raises:
        MissingDependencyError: regex is not installed.
    """

    def __init__(self) -> None:
        self._table = CharacterTable()

    def classify(
        self, code_points: CodePoints, documents: Indices, begins: Indices, ends: Indices
    ) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
        """Numbers in ``SCRIPTS`` [C] and in ``TEXT_CLASSES`` [C].

        Args:
            code_points: The texts of some documents, one after another [M].
            documents: Index of the first character of each document.
            begins: First character of each chunk [C]; a part of a character counts as all of it.
            ends: One past its last [C].
        """
        scripts, kinds = self._table.look_up(code_points)
        flags = _flags(code_points, kinds, documents)
        bounds = np.stack([begins, ends], axis=1).ravel()
        # One character more, so that the last end is a valid index.
        padded = np.append(scripts, np.uint8(COMMON))
        highest = np.maximum.reduceat(padded, bounds)[::2]
        padded[padded == COMMON] = SEVERAL_SCRIPTS
        lowest = np.minimum.reduceat(padded, bounds)[::2]
        is_one = (highest == COMMON) | (highest == lowest)
        script = np.where(is_one, highest, np.uint8(SEVERAL_SCRIPTS))
        chunk_flags = np.bitwise_or.reduceat(np.append(flags, np.uint16(0)), bounds)[::2]
        return script, _classes(chunk_flags)


def _classes(flags: Flags) -> NDArray[np.uint8]:
    """Class of each chunk from the union of its characters' flags [C]."""
    content = flags & (DIGIT | LETTER | SIGN)
    classes = np.full(len(flags), MIXED, np.uint8)
    classes[content == LETTER] = LETTERS
    classes[content == SIGN] = PUNCTUATION
    is_code = (flags & _CODE_FLAG) > 0
    classes[is_code] = CODE
    is_blank = content == 0
    is_space = is_blank & ((flags & SPACE) > 0)
    classes[is_blank] = NOTHING
    classes[is_space] = WHITESPACE
    classes[is_space & ((flags & _INDENT_FLAG) > 0)] = CODE
    is_number = content == DIGIT
    runs = flags[is_number] // _RUN_FLAGS
    classes[is_number] = DIGITS_1 + np.searchsorted([2, 4, 8], runs, side="right")
    return classes


def _flags(code_points: CodePoints, kinds: NDArray[np.uint8], documents: Indices) -> Flags:
    """Flags of each character [M]: its kind, digit run, identifier and indentation."""
    flags = kinds.astype(np.uint16)
    is_first = np.zeros(len(code_points), np.bool_)
    is_first[documents[documents < len(code_points)]] = True
    is_digit = kinds == DIGIT
    _, lengths = _runs(is_digit, is_first)
    run_flags = _RUN_FLAGS << np.minimum(lengths - 1, 3)
    flags[is_digit] |= np.repeat(run_flags, lengths).astype(np.uint16)
    is_code = _CODE_SIGN_AT[np.minimum(code_points, 127)] | _in_identifier(code_points, is_first)
    flags[is_code] |= _CODE_FLAG
    flags[_in_indentation(code_points, is_first)] |= _INDENT_FLAG
    return flags


def _runs(is_member: Mask, is_first: Mask) -> tuple[Indices, Indices]:
    """Begin and length of each run of members; the start of a document begins a new run."""
    starts_run = is_member.copy()
    starts_run[1:] &= ~is_member[:-1] | is_first[1:]
    starts = np.flatnonzero(starts_run)
    members = np.flatnonzero(is_member)
    firsts = np.searchsorted(members, starts)
    return starts, np.diff(np.append(firsts, len(members)))


def _in_identifier(code_points: CodePoints, is_first: Mask) -> Mask:
    ascii_points = np.minimum(code_points, 127)
    is_word = _WORD_AT[ascii_points]
    inside: Mask = np.zeros(len(code_points), np.bool_)
    starts, lengths = _runs(is_word, is_first)
    if not len(starts):
        return inside
    small, capital = _SMALL_AT[ascii_points], _CAPITAL_AT[ascii_points]
    turns = np.zeros(len(code_points), np.bool_)
    turns[1:] = capital[1:] & small[:-1] & ~is_first[1:]
    members = np.flatnonzero(is_word)
    firsts = np.cumsum(lengths) - lengths

    def any_of(mask: Mask) -> Mask:
        of_runs: Mask = np.logical_or.reduceat(mask[members], firsts)
        return of_runs

    has_mark = any_of(code_points == ord("_")) | any_of(turns)
    inside[members] = np.repeat(has_mark & any_of(small | capital), lengths)
    return inside


def _in_indentation(code_points: CodePoints, is_first: Mask) -> Mask:
    is_tab = code_points == ord("\t")
    is_blank = is_tab | (code_points == ord(" "))
    inside: Mask = np.zeros(len(code_points), np.bool_)
    starts, lengths = _runs(is_blank, is_first)
    if not len(starts):
        return inside
    members = np.flatnonzero(is_blank)
    has_tab = np.logical_or.reduceat(is_tab[members], np.cumsum(lengths) - lengths)
    begins_line = is_first[starts] | (code_points[starts - 1] == ord("\n"))
    inside[members] = np.repeat(begins_line & (has_tab | (lengths > 1)), lengths)
    return inside


def _ascii(characters: str) -> Mask:
    """Mask of the ASCII characters that are in ``characters`` [128]."""
    table: Mask = np.zeros(128, np.bool_)
    table[[ord(character) for character in characters]] = True
    return table


_SMALL_AT: Final = _ascii("abcdefghijklmnopqrstuvwxyz")
_CAPITAL_AT: Final = _ascii("ABCDEFGHIJKLMNOPQRSTUVWXYZ")
_WORD_AT: Final = _SMALL_AT | _CAPITAL_AT | _ascii("0123456789_")
_CODE_SIGN_AT: Final = _ascii(CODE_SIGNS)
