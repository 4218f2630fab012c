"""A text of numbers with white space between."""

from __future__ import annotations

import re
from collections.abc import Iterable

from megatron_ext.errors import TokenizerError
from megatron_ext.tokenizers.control_tokens import ControlMatch

_WORD = re.compile(r"\S+")
_ONLY_NUMBERS = re.compile(r"[0-9 \t\r\n]*")
# Python refuses to read numbers of thousands of digits; no vocabulary needs more than these.
_MOST_DIGITS = 18


class NumberText:
    """Reads the numbers below ``size``."""

    def __init__(self, size: int) -> None:
        self.size = size

    def value(self, word: str) -> int | None:
        """The number that ``word`` is; None when it is none, or one too large."""
        if not (word.isascii() and word.isdecimal()):
            return None
        digits = word.lstrip("0") or "0"
        number = int(digits) if len(digits) <= _MOST_DIGITS else self.size
        return number if number < self.size else None

    def values(self, text: str) -> list[int]:
        """The numbers in ``text``.

        Raises:
            TokenizerError: Something else is in it, or a number that is too large.
        """
        if _ONLY_NUMBERS.fullmatch(text) is not None:
            words = text.split()
            if max(map(len, words), default=0) <= _MOST_DIGITS:
                numbers = list(map(int, words))
                if max(numbers, default=0) < self.size:
                    return numbers
        # What is wrong, and where.
        return self.read(text, ())[0]

    def read(self, text: str, matches: Iterable[ControlMatch]) -> tuple[list[int], list[int]]:
        """Numbers and control ids of ``text`` [T], and the character at which each ends [T].

        White space belongs to the id before it; at the begin of the text, to the first one.

        Raises:
            TokenizerError: Between ``matches`` is something else, or a number that is too large.
        """
        ids: list[int] = []
        begins: list[int] = []
        done = 0
        for match in [*matches, None]:
            for word in _WORD.finditer(text, done, len(text) if match is None else match.begin):
                ids.append(self._number(word))
                begins.append(word.start())
            if match is not None:
                ids.append(match.token_id)
                begins.append(match.begin)
                done = match.end
        return ids, [*begins[1:], len(text)][: len(ids)]

    def _number(self, word: re.Match[str]) -> int:
        number = self.value(word[0])
        if number is not None:
            return number
        shown = word[0] if len(word[0]) <= 40 else f"{word[0][:40]}..."
        raise TokenizerError(
            "the number is outside the vocabulary"
            if word[0].isascii() and word[0].isdecimal()
            else "the text is not all numbers",
            got=f"{shown!r} at character {word.start()}",
            expected=f"0 to {self.size - 1}",
        )
