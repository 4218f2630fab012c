"""Where control tokens are written in a text."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple


@dataclass(frozen=True, slots=True)
class ControlToken:
    """A name that becomes one id, wherever control tokens are read."""

    name: str
    """How it is written."""
    token_id: int
    """What it becomes."""
    lstrip: bool = False
    """It swallows the white space before it."""
    rstrip: bool = False
    """It swallows the white space after it."""
    single_word: bool = False
    """It counts only where no word character touches it."""


class ControlMatch(NamedTuple):
    """A control token in a text: the characters from ``begin`` up to ``end``."""

    begin: int
    end: int
    token_id: int


class ControlTokens:
    """The control tokens of a vocabulary.

    Args:
        tokens: In any order; of two with one name the first counts.
    """

    def __init__(self, tokens: Sequence[ControlToken]) -> None:
        self.by_name: dict[str, ControlToken] = {}
        for token in tokens:
            if token.name:
                self.by_name.setdefault(token.name, token)
        self.ids = frozenset(token.token_id for token in tokens)
        self._named: dict[frozenset[str], ControlTokens] = {}

    def named(self, names: frozenset[str]) -> ControlTokens:
        """Those of them that have one of ``names``."""
        if names not in self._named:
            few = [token for name, token in self.by_name.items() if name in names]
            self._named[names] = ControlTokens(few)
        return self._named[names]

    def find(
        self, text: str, spans: Sequence[tuple[int, int]] | None = None
    ) -> Iterator[ControlMatch]:
        """Control tokens in ``text``: the leftmost first, of several there the longest.

        Args:
            text: Any string.
            spans: Half-open character ranges, in order and apart; a name counts only whole inside
                one of them. Everywhere when None.
        """
        if self._pattern is None:
            return
        find, plain = self._pattern.finditer, self._plain_ids
        done = 0
        for start, stop in ((0, len(text)),) if spans is None else spans:
            # A pattern that is given an end sees no character beyond it.
            for match in find(text, start if start > done else done, stop):
                begin, end = match.span()
                name = match[0]
                if name in plain:
                    yield ControlMatch(begin, end, plain[name])
                    done = end
                    continue
                token = self.by_name[name]
                if token.single_word and _touches_a_word(text, begin, end):
                    continue
                if token.lstrip:
                    begin = max(done, len(text[done:begin].rstrip()) + done)
                if token.rstrip:
                    end += _leading_space(text, end)
                yield ControlMatch(begin, end, token.token_id)
                done = end

    @cached_property
    def _plain_ids(self) -> dict[str, int]:
        """Id of each name that is a control token wherever it stands, and swallows nothing."""
        return {
            name: token.token_id
            for name, token in self.by_name.items()
            if not (token.lstrip or token.rstrip or token.single_word)
        }

    @cached_property
    def _pattern(self) -> re.Pattern[str] | None:
        if not self.by_name:
            return None
        return re.compile(_any_of(list(self.by_name)))


def _any_of(names: Sequence[str]) -> str:
    """A regular expression for the longest of ``names``, which differ.

    Names are told apart character by character: in a plain list of them each would be tried at
    every ``<`` of a text, of which there may be a thousand.
    """
    if len(names) == 1:
        return re.escape(names[0])
    tails: dict[str, list[str]] = {}
    for name in names:
        tails.setdefault(name[:1], []).append(name[1:])
    # The name that ends here comes last: a longer one that begins with it counts before.
    ways = [re.escape(first) + _any_of(tails[first]) for first in sorted(tails, reverse=True)]
    return ways[0] if len(ways) == 1 else f"(?:{'|'.join(ways)})"


def _leading_space(text: str, begin: int) -> int:
    """Number of white-space characters of ``text`` from ``begin`` on."""
    end = begin
    while end < len(text) and text[end].isspace():
        end += 1
    return end - begin


def _touches_a_word(text: str, begin: int, end: int) -> bool:
    before = text[begin - 1 : begin]
    after = text[end : end + 1]
    return bool(re.match(r"\w", before) or re.match(r"\w", after))
