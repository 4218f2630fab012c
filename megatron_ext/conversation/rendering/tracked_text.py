"""Text that remembers where each of its characters came from.

``TrackedText`` is a ``str`` to a template: whatever a template does with text, the result knows its
sources. What it cannot know it says: text of unknown source is marked ``UNKNOWN``, never guessed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate, chain
from typing import Any, SupportsIndex

from megatron_ext.conversation.rendering.provenance import UNKNOWN, Provenance, Run, merged
from megatron_ext.conversation.rendering.template_limits import spend


class TrackedText(str):
    """A string made of runs, each from one source.

    Args:
        text: The characters.
        runs: Number of characters and their provenance; the numbers sum to ``len(text)``.
    """

    __slots__ = ("runs",)

    runs: tuple[Run, ...]

    def __new__(cls, text: str, runs: tuple[Run, ...]) -> TrackedText:
        self = super().__new__(cls, text)
        self.runs = runs
        return self

    def __str__(self) -> str:
        # str(text), which templates and Jinja itself call at many places, keeps the runs.
        return self

    # Cutting.

    def cut(self, start: int, stop: int) -> TrackedText:
        """Characters from ``start`` up to ``stop``, both inside the text."""
        if start == 0 and stop == len(self):
            return self
        if len(self.runs) <= 1:
            text = str.__getitem__(self, slice(start, stop))
            return TrackedText(text, ((len(text), self.runs[0][1]),)) if text else EMPTY
        return next(self._cuts([(start, stop)]))

    def _cuts(self, bounds: Iterable[tuple[int, int]]) -> Iterator[TrackedText]:
        """The texts from each first to each second position; in order, none over another."""
        runs = self.runs
        spend(len(runs) >> 2)
        ends = list(accumulate(length for length, _ in runs))
        at = 0
        for start, stop in bounds:
            kept: list[Run] = []
            begin = start
            while begin < stop:
                if ends[at] <= begin:
                    at += 1
                    continue
                end = min(ends[at], stop)
                kept.append((end - begin, runs[at][1]))
                begin = end
            text = str.__getitem__(self, slice(start, stop))
            yield TrackedText(text, tuple(kept)) if kept else EMPTY

    def __getitem__(self, key: SupportsIndex | slice) -> TrackedText:
        if not isinstance(key, slice):
            at = range(len(self))[key]
            return self.cut(at, at + 1)
        positions = range(len(self))[key]
        if positions.step == 1:
            return self.cut(positions.start, max(positions.start, positions.stop))
        characters = list(self) if len(positions) > 1 else self
        return join(characters[at] for at in positions)

    def __iter__(self) -> Iterator[TrackedText]:
        for character in self._cuts((at, at + 1) for at in range(len(self))):
            spend(1)
            yield character

    def lstrip(self, chars: str | None = None, /) -> TrackedText:
        return self.cut(len(self) - len(str.lstrip(self, chars)), len(self))

    def rstrip(self, chars: str | None = None, /) -> TrackedText:
        return self.cut(0, len(str.rstrip(self, chars)))

    def strip(self, chars: str | None = None, /) -> TrackedText:
        return self.rstrip(chars).lstrip(chars)

    def removeprefix(self, prefix: str, /) -> TrackedText:
        return self.cut(len(prefix), len(self)) if self.startswith(prefix) else self

    def removesuffix(self, suffix: str, /) -> TrackedText:
        return self.cut(0, len(self) - len(suffix)) if suffix and self.endswith(suffix) else self

    def split(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[str]:
        self._spend_on_pieces(sep)
        return self._locate(str.split(self, sep, maxsplit), 0 if sep is None else len(sep))

    def rsplit(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[str]:
        self._spend_on_pieces(sep)
        return self._locate(str.rsplit(self, sep, maxsplit), 0 if sep is None else len(sep))

    def partition(self, sep: str, /) -> tuple[str, str, str]:
        head, middle, tail = self._locate(str.partition(self, sep), 0)
        return head, middle, tail

    def rpartition(self, sep: str, /) -> tuple[str, str, str]:
        head, middle, tail = self._locate(str.rpartition(self, sep), 0)
        return head, middle, tail

    def splitlines(self, keepends: bool = False) -> list[str]:
        bounds = []
        begin = 0
        kept = str.splitlines(self, keepends)
        spend(len(kept))
        for line, whole in zip(kept, str.splitlines(self, True), strict=True):
            bounds.append((begin, begin + len(line)))
            begin += len(whole)
        return list(self._cuts(bounds))

    def _spend_on_pieces(self, sep: str | None) -> None:
        # A short text has few pieces, and those that white space separates are paid for later.
        if sep and len(self) > 2**16:
            spend(str.count(self, sep))

    def _locate(self, pieces: Sequence[str], gap: int) -> list[str]:
        """``pieces`` with their runs; they lie in order, at least ``gap`` characters apart."""
        spend(len(pieces))
        bounds = []
        begin = 0
        for piece in pieces:
            begin = self.index(piece, begin)
            bounds.append((begin, begin + len(piece)))
            begin += len(piece) + gap
        return list(self._cuts(bounds))

    # Joining.

    def __add__(self, other: str, /) -> TrackedText:
        return join((self, other)) if isinstance(other, str) else NotImplemented

    def __radd__(self, other: str, /) -> TrackedText:
        return join((other, self)) if isinstance(other, str) else NotImplemented

    def __mul__(self, count: SupportsIndex, /) -> TrackedText:
        times = max(0, count.__index__())
        spend((len(self.runs) - 1) * times >> 2, len(self) * times)
        text = str.__mul__(self, times)
        if len(self.runs) == 1:
            return track(text, self.runs[0][1])
        return TrackedText(text, merged(self.runs * times))

    __rmul__ = __mul__

    def join(self, pieces: Iterable[str], /) -> TrackedText:
        separated = list(chain.from_iterable((self, piece) for piece in pieces))
        return join(separated[1:])

    def replace(self, old: str, new: str, count: SupportsIndex = -1, /) -> TrackedText:
        if not old:
            return self._replace_nothing(new, count.__index__())
        if old not in self:
            return self
        found = str.count(self, old)
        spend(0, (found if count.__index__() < 0 else min(found, count.__index__())) * len(new))
        return as_tracked(new).join(self.split(old, count))

    def _replace_nothing(self, new: str, count: int) -> TrackedText:
        """``new`` before each of the first ``count`` characters and, if any is left, at the end."""
        room = len(self) + 1
        count = room if count < 0 else min(count, room)
        before = [piece for character in self[:count] for piece in (new, character)]
        return join([*before, *([new] if count == room else []), self[count:]])

    # Changing the case.

    def upper(self) -> str:
        return self.recased(str.upper)

    def lower(self) -> str:
        return self.recased(str.lower)

    def capitalize(self) -> str:
        return self.recased(str.capitalize)

    def title(self) -> str:
        return self.recased(str.title)

    def swapcase(self) -> str:
        return self.recased(str.swapcase)

    def casefold(self) -> str:
        return self.recased(str.casefold)

    def recased(self, change: Callable[[str], str]) -> str:
        """``change`` of this text, which changes letters where they stand.

        Where a letter becomes two (``ß`` in capitals), runs are changed one by one; where that
        gives another text, nobody knows where each run ends: the result is a plain string.
        """
        text = change(str.__str__(self))
        spend(len(self.runs) >> 2, len(text))
        if len(text) == len(self):
            return TrackedText(text, self.runs)
        pieces = [track(change(piece), provenance) for piece, provenance in self.pieces()]
        return join(pieces) if "".join(pieces) == text else text

    def pieces(self) -> Iterator[tuple[str, Provenance]]:
        """Text and provenance of each run."""
        begin = 0
        for length, provenance in self.runs:
            yield str.__getitem__(self, slice(begin, begin + length)), provenance
            begin += length

    # Formatting.

    def __mod__(self, values: Any, /) -> TrackedText:
        from megatron_ext.conversation.rendering.tracked_format import format_percent

        return format_percent(self, values)


def track(text: str, provenance: Provenance) -> TrackedText:
    """``text``, all of it from one source."""
    if not text:
        return EMPTY
    # As a call of the class, which every text of every message would have to make.
    tracked = str.__new__(TrackedText, text)
    tracked.runs = ((len(text), provenance),)
    return tracked


def as_tracked(text: str) -> TrackedText:
    """``text`` if it knows its sources, else ``text`` of unknown source."""
    return text if isinstance(text, TrackedText) else track(text, UNKNOWN)


def join(pieces: Iterable[str]) -> TrackedText:
    """``pieces`` one after another; those that are plain strings are of unknown source."""
    known: list[TrackedText] = []
    characters = runs = 0
    for piece in pieces:
        text = piece if isinstance(piece, TrackedText) else track(piece, UNKNOWN)
        known.append(text)
        characters += len(text)
        runs += len(text.runs)
    spend(runs >> 2, characters)
    return TrackedText("".join(known), merged([run for text in known for run in text.runs]))


EMPTY = TrackedText("", ())
"""No text, of no source."""
