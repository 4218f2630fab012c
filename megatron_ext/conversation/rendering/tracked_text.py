"""Provenance string: text that keeps the source of each character through all that a template does.

``TrackedText`` is a ``str`` to a template. Text whose source cannot be told is marked ``UNKNOWN``,
never guessed. Text consumes from the limits of the render as it is made, piece by piece; what can
make far more than it is given, such as ``text * 9``, consumes first.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, chain, count
from string import Formatter
from typing import Any, Final, SupportsIndex

from megatron_ext.conversation.rendering.provenance import UNKNOWN, Provenance, Run, merged
from megatron_ext.conversation.rendering.template_limits import (
    TemplateLimitError,
    check_bits,
    consume,
    consume_reading,
    consumed,
    pay,
)


class TrackedText(str):
    """A string with the provenance of each run of its characters.

    Args:
        text: The characters.
        runs: Pairs of length and provenance; the lengths sum to ``len(text)``.
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
        """The texts between pairs of positions, which are in order and do not overlap."""
        runs = self.runs
        consume(len(runs) >> 2)
        ends = list(accumulate(length for length, _ in runs))
        at = 0
        for start, stop in bounds:
            cut_runs: list[Run] = []
            begin = start
            while begin < stop:
                if ends[at] <= begin:
                    at += 1
                    continue
                end = min(ends[at], stop)
                cut_runs.append((end - begin, runs[at][1]))
                begin = end
            text = str.__getitem__(self, slice(start, stop))
            yield TrackedText(text, tuple(cut_runs)) if cut_runs else EMPTY

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
            consume(1)
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
        self._consume_pieces(sep)
        return self._locate(str.split(self, sep, maxsplit), 0 if sep is None else len(sep))

    def rsplit(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[str]:
        self._consume_pieces(sep)
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
        lines = str.splitlines(self, keepends)
        consume(len(lines))
        for line, whole in zip(lines, str.splitlines(self, True), strict=True):
            bounds.append((begin, begin + len(line)))
            begin += len(whole)
        return list(self._cuts(bounds))

    def _consume_pieces(self, sep: str | None) -> None:
        # A short text has few pieces; those between white space consume when they are located.
        if sep and len(self) > 2**16:
            consume(str.count(self, sep))

    def _locate(self, pieces: Sequence[str], gap: int) -> list[str]:
        """``pieces`` with their runs; they are in order, at least ``gap`` characters apart."""
        consume(len(pieces))
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
        consume((len(self.runs) - 1) * times >> 2, len(self) * times)
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
        occurrences = str.count(self, old)
        consume(
            0,
            (occurrences if count.__index__() < 0 else min(occurrences, count.__index__()))
            * len(new),
        )
        return as_tracked(new).join(self.split(old, count))

    def _replace_nothing(self, new: str, count: int) -> TrackedText:
        """The text with ``new`` before each of its characters, ``count`` times, as in ``str``."""
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
        """The text after ``change``, which changes the case of letters.

        Where a letter becomes two (``ß`` in capitals), runs are changed one by one; where that
        gives another text, the ends of runs are unknown, and the result is a plain string.
        """
        text = change(str.__str__(self))
        consume(len(self.runs) >> 2, len(text))
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
        return format_percent(self, values)


def track(text: str, provenance: Provenance) -> TrackedText:
    """``text`` with one provenance."""
    if not text:
        return EMPTY
    # Equivalent to a call of the class, but faster: every text of every message comes here.
    tracked = str.__new__(TrackedText, text)
    tracked.runs = ((len(text), provenance),)
    return tracked


def as_tracked(text: str) -> TrackedText:
    """``text`` if it has provenance, else ``text`` of unknown source."""
    return text if isinstance(text, TrackedText) else track(text, UNKNOWN)


def join(pieces: Iterable[str]) -> TrackedText:
    """Concatenation of ``pieces``; plain strings are of unknown source."""
    texts: list[TrackedText] = []
    characters = runs = 0
    for piece in pieces:
        tracked = piece if isinstance(piece, TrackedText) else track(piece, UNKNOWN)
        texts.append(tracked)
        characters += len(tracked)
        runs += len(tracked.runs)
    consume(runs >> 1, characters)
    return TrackedText("".join(texts), merged([run for tracked in texts for run in tracked.runs]))


EMPTY = TrackedText("", ())
"""The empty text."""


def add(left: Any, right: Any) -> Any:
    """``left + right``; the sum of two lists or tuples consumes its size."""
    if isinstance(left, (list, tuple, bytes)):
        consume(1 + (len(left) + len(right) >> 3), len(left) if isinstance(left, bytes) else 0)
    return consumed(left + right)


def subtract(left: Any, right: Any) -> Any:
    """``left - right`` for numbers, or for the keys of two mappings."""
    if not isinstance(left, (int, float)):
        pay("length", (left, right))
    return consumed(left - right)


def multiply(left: Any, right: Any) -> Any:
    """``left * right`` for numbers, or for a text or list and a number."""
    if isinstance(left, int) and isinstance(right, int):
        check_bits(left.bit_length() + right.bit_length())
    for value, times in ((left, right), (right, left)):
        if isinstance(value, str):
            return as_tracked(value) * times
        if isinstance(value, (bytes, list, tuple)) and isinstance(times, int):
            made = len(value) * max(0, times)
            consume(1 + (made >> 3), made)
    return left * right


def power(left: Any, right: Any) -> Any:
    """``left ** right`` for numbers."""
    if isinstance(left, int) and isinstance(right, int):
        check_bits(left.bit_length() * abs(right))
    return left**right


def remainder(left: Any, right: Any) -> Any:
    """``left % right`` for numbers, or for a text and the values to format."""
    if isinstance(left, bytes):
        raise TemplateLimitError("formats bytes")
    return (as_tracked(left) if isinstance(left, str) else left) % right


_DIRECTIVE = re.compile(r"%(?:\((?P<name>[^)]*)\))?[-+ #0]*(?P<stars>\*?(?:\.\*)?)[\d.]*[a-zA-Z%]")
_WIDTHS = re.compile(r"%(?:\([^)]*\))?[-+ #0]*(\d*)\*?(?:\.(\d*))?")
_NAME_IN_NAME = re.compile(r"%\([^)]*\(")


def format_percent(form: TrackedText, values: Any) -> TrackedText:
    """``form % values`` for one value, a tuple of them, or a mapping.

    Raises:
        TemplateLimitError: The text would exceed the budget.
    """
    _consume_percent(form, values)
    whole = str.__mod__(form, values)
    pieces: list[str] = []
    done = index = 0
    for match in _DIRECTIVE.finditer(form):
        pieces.append(form.cut(done, match.start()))
        done = match.end()
        if match[0].endswith("%"):
            pieces.append(form.cut(done - 1, done))
            continue
        if match["stars"]:
            return track(whole, UNKNOWN)
        if match["name"] is not None:
            value, argument = values[match["name"]], values
        elif isinstance(values, tuple):
            value, argument = values[index], (values[index],)
        else:
            value, argument = values, (values,)
        index += 1
        own = form.cut(match.start(), match.start() + 1).runs[0][1]
        pieces.append(formatted(value, str(match[0]) % argument, own))
    pieces.append(form.cut(done, len(form)))
    # Forms that are parsed differently here (a name with brackets) are of unknown source.
    joined = join(pieces)
    return joined if joined == whole else track(whole, UNKNOWN)


def _consume_percent(form: TrackedText, values: Any) -> None:
    """Consume the widths in ``form``, and the values as often as it can print them."""
    if _NAME_IN_NAME.search(form):
        raise TemplateLimitError("formats a name with brackets in it")
    directives = _WIDTHS.findall(form)
    consume_widths([width for pair in directives for width in pair])
    times = 1 if isinstance(values, tuple) else len(directives)
    consume(4 * len(directives) + (len(form) >> 6), times * consume_reading(values))
    if isinstance(values, tuple) and "*" in form:
        # A star takes its width from among the values.
        consume_widths([str(value) for value in values if isinstance(value, int)])


def consume_widths(widths: Iterable[str]) -> None:
    """Consume the widths and precisions of a format."""
    for width in filter(None, widths):
        if len(width) > 9:
            raise TemplateLimitError("formats a value wider than any text may be")
        consume(0, abs(int(width)))


def format_braces(
    form: TrackedText,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    formatter: Formatter,
    numbers: Iterator[int] | None = None,
) -> TrackedText:
    """``form.format(*args, **kwargs)`` by ``formatter``, whose fields consume their size.

    ``numbers`` counts the fields without a name, those in a field's specification too.
    """
    is_inner = numbers is not None
    numbers = count() if numbers is None else numbers
    own = form.runs[0][1] if len(form.runs) == 1 else UNKNOWN
    pieces: list[str] = []
    consume(len(form) >> 6)
    for literal, name, spec, conversion in formatter.parse(str.__str__(form)):
        consume(2)
        pieces.append(track(literal, own))
        if name is None:
            continue
        if is_inner and spec:
            raise ValueError("fields in fields of a format string are nested too deeply")
        if name[:1] in ("", ".", "["):
            name = f"{next(numbers)}{name}"
        value = formatter.get_field(name, args, kwargs)[0]
        size = consume_reading(value)
        consume(0, size)
        value = formatter.convert_field(value, conversion)
        is_plain = not spec or "{" not in spec
        if spec:
            spec = format_braces(track(spec, own), args, kwargs, formatter, numbers)
            consume_widths(_NUMBERS.findall(spec))
        text = str(formatter.format_field(value, str.__str__(spec or "")))
        # A width that is a field itself may come from anywhere.
        pieces.append(formatted(value, text, own) if is_plain else track(text, UNKNOWN))
    return join(pieces)


_NUMBERS: Final = re.compile(r"\d+")


def formatted(value: object, text: str, own: Provenance) -> TrackedText:
    """``text`` that a format string with provenance ``own`` has made of ``value``."""
    if isinstance(value, TrackedText):
        if text == value:
            return value
        return track(text, value.runs[0][1] if len(value.runs) == 1 else UNKNOWN)
    is_number = value is None or isinstance(value, (bool, int, float))
    return track(text, own if is_number else UNKNOWN)
