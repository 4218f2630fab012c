"""``TokenView``, tokens of a text for display; text, numbers and tables for a terminal."""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from megatron_ext.alignment.audit import share_in_words
from megatron_ext.tokenizers.base import ByteTokenizer
from megatron_ext.tokenizers.token_ids import ByteEnds

_SHAPED_BY_FONTS: Final = "\u200c\u200d\u3000"
"""Joiners, needed to shape Persian, Hindi and emoji, and the ideographic space."""


def visible_text(text: str) -> str:
    """``text`` with control characters shown; a line feed also breaks the line."""
    if text.isprintable():
        return text
    return "".join(
        "␤\n" if c == "\n" else c if c.isprintable() else _escaped_character(c) for c in text
    )


def readable_text(text: str) -> str:
    """``visible_text`` for running text: characters that fonts shape are unchanged."""
    if text.isprintable():
        return text
    return "".join(c if c in _SHAPED_BY_FONTS else visible_text(c) for c in text)


def one_line(text: str) -> str:
    """``readable_text`` on one line."""
    return readable_text(text).replace("\n", "")


def _escaped_character(character: str) -> str:
    """Picture of an ASCII control character, or the code point of another character."""
    code = ord(character)
    return chr(0x2400 + code) if code < 0x20 else f"\\u{code:04x}"


_ABSOLUTE: Final = re.compile(r"(?<![\w.:/])(?:/[^\s/:;,'\"]+){2,}")


def short_paths(paths: Iterable[str], *, least: int = 1) -> dict[str, str]:
    """The last components of paths, at least ``least`` and enough to distinguish all paths."""
    parts = {path: [part for part in path.split(os.sep) if part] for path in paths}
    longest = max(map(len, parts.values()), default=0)
    for length in range(least, max(least, longest) + 1):
        short = {path: os.sep.join(its[-length:]) or path for path, its in parts.items()}
        if len(set(short.values())) == len(short):
            break
    return short


def with_short_paths(text: str) -> str:
    """A sentence with each absolute path shortened to its last two components."""
    return _ABSOLUTE.sub(lambda found: "/".join(found[0].split("/")[-2:]), text)


_BYTE_UNITS: Final = ("bytes", "KiB", "MiB", "GiB", "TiB")
NOTHING: Final = "–"


def number(value: float | None) -> str:
    """Four digits; whole numbers in full."""
    if value is None:
        return NOTHING
    if float(value).is_integer() and abs(value) < 1e15:
        return f"{int(value):,}"
    if 1e-3 <= abs(value) < 1e5:
        return f"{value:,.4g}" if abs(value) < 1e4 else f"{value:,.0f}"
    return f"{value:.3g}"


def bits(value: float | None) -> str:
    """Bits per byte: three places, so that those of several models can be compared at a glance."""
    return NOTHING if value is None else f"{value:,.3f}"


def short_number(value: float) -> str:
    """A round number in compact form."""
    for size, letter in ((1e9, "G"), (1e6, "M")):
        if size <= abs(value) < 1e3 * size:
            return f"{value / size:g}{letter}"
    return number(value)


def share(part: float, whole: float) -> str:
    """A fraction in percent."""
    return share_in_words(part / whole) if whole else NOTHING


def memory(size: float | None) -> str:
    """Bytes in a suitable unit."""
    if size is None:
        return NOTHING
    unit = 0
    while size >= 1024 and unit < len(_BYTE_UNITS) - 1:
        size /= 1024
        unit += 1
    places = ",.0f" if unit == 0 or size >= 999.5 else ".3g"
    return f"{size:{places}} {_BYTE_UNITS[unit]}"


def duration(seconds: float | None) -> str:
    """A duration in seconds, minutes or hours."""
    if seconds is None:
        return NOTHING
    if seconds < 60:
        return f"{seconds:.3g} s"
    if seconds < 3600:
        return f"{seconds / 60:.1f} min"
    return f"{seconds / 3600:,.1f} h"


def setting(value: Any) -> str:
    """A value of a configuration."""
    if value is None:
        return NOTHING
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, list | tuple):
        return ", ".join(map(setting, value)) or "none"
    return str(value)


BOLD: Final = "\x1b[1m"
BOLD_UNDERLINED: Final = "\x1b[1;4m"
WARNING: Final = "\x1b[1;38;5;221m"
GREY: Final = "\x1b[38;5;245m"
VIOLET: Final = "\x1b[38;5;141m"
BLUE: Final = "\x1b[38;5;75m"
ORANGE: Final = "\x1b[38;5;215m"
GREEN: Final = "\x1b[38;5;114m"
PINK: Final = "\x1b[38;5;211m"
TEAL: Final = "\x1b[38;5;80m"
RED: Final = "\x1b[38;5;203m"
_RESET: Final = "\x1b[0m"


def add_color_argument(parser: argparse._ActionsContainer) -> None:
    """Add the flag ``--color``."""
    parser.add_argument(
        "--color", choices=("auto", "always", "never"), default="auto", help="when to use colours"
    )


def use_colors(when: str) -> bool:
    """Whether to use colours: always, never, or auto (a terminal without ``NO_COLOR``)."""
    if when == "auto":
        return sys.stdout.isatty() and not os.environ.get("NO_COLOR")
    return when == "always"


def styled(style: str, text: str, *, color: bool = True) -> str:
    """The text in a style; applied line by line, since pagers reset styles at line ends."""
    if not color:
        return text
    return "\n".join(f"{style}{line}{_RESET}" if line else "" for line in text.split("\n"))


def columns(rows: Sequence[Sequence[str]], sides: str) -> list[list[str]]:
    """The cells of each row, padded to the width of their column.

    Args:
        rows: Rows of equally many cells; those beyond ``sides`` are unchanged.
        sides: ``<`` for each left-aligned column, ``>`` for each right-aligned one.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    formats = [f"{side}{width}" for side, width in zip(sides, widths, strict=False)]
    formats += [""] * (len(widths) - len(formats))
    return [[format(*cell) for cell in zip(row, formats, strict=True)] for row in rows]


def table_lines(rows: Sequence[Sequence[str]], sides: str) -> list[str]:
    """Lines of a table; ``sides`` as for ``columns``."""
    return ["  ".join(row).rstrip() for row in columns(rows, sides)]


_BACKGROUNDS = ("\x1b[48;5;24m", "\x1b[48;5;58m")
_TRAINED = "\x1b[1;38;5;120m"
_PLAIN = "\x1b[38;5;252m"
_BOUNDARY = "│"


@dataclass(frozen=True, slots=True)
class TokenView:
    """One token of a text."""

    token_id: int
    piece: str
    """Piece of the vocabulary, as displayed."""
    begin: int
    """First byte of the text that the token covers."""
    end: int
    """One past the last byte that the token covers."""
    covered: bytes
    """The covered bytes."""
    trained: bool | None
    """Whether the token is trained; None for a plain text."""

    @property
    def shown(self) -> str:
        """The covered text; bytes of a partial character in angle brackets."""
        try:
            return self.covered.decode()
        except UnicodeDecodeError:
            return f"<{self.covered.hex(' ')}>"

    def as_row(self) -> dict[str, Any]:
        """Plain values for JSON."""
        row: dict[str, Any] = {
            "id": self.token_id,
            "piece": self.piece,
            "bytes": [self.begin, self.end],
            "text": self.shown,
        }
        return row if self.trained is None else row | {"trained": self.trained}


def token_views(
    tokenizer: ByteTokenizer,
    text: str,
    ids: NDArray[np.integer[Any]],
    ends: ByteEnds,
    trained: Sequence[bool] | None = None,
) -> list[TokenView]:
    """A view of each token.

    Args:
        tokenizer: Source of the pieces.
        text: The text, N bytes in UTF-8.
        ids: Token ids [T].
        ends: End of each token in bytes [T].
        trained: Whether each token is trained [T].
    """
    raw = text.encode()
    marks: Sequence[bool | None] = [None] * len(ids) if trained is None else trained
    spans = pairwise([0, *ends.tolist()])
    return [
        TokenView(token_id, tokenizer.id_to_token(token_id), begin, end, raw[begin:end], mark)
        for token_id, (begin, end), mark in zip(ids.tolist(), spans, marks, strict=True)
    ]


def ribbon(views: Sequence[TokenView], *, color: bool) -> str:
    """The text with token boundaries: alternating backgrounds, or bars without colour.

    Trained tokens are bold and green; without colour they are in double angle brackets.
    """
    return "".join(_coloured(views) if color else _barred(views))


def _coloured(views: Sequence[TokenView]) -> Iterator[str]:
    for number, view in enumerate(views):
        style = _BACKGROUNDS[number % 2] + (_TRAINED if view.trained else _PLAIN)
        yield styled(style, _visible(view))
    yield "\n"


def _barred(views: Sequence[TokenView]) -> Iterator[str]:
    inside = False
    for view in views:
        if bool(view.trained) != inside:
            inside = bool(view.trained)
            yield "⟪" if inside else "⟫"
        yield _visible(view) + _BOUNDARY
    yield "⟫\n" if inside else "\n"


def _visible(view: TokenView) -> str:
    return visible_text(view.shown) or "∅"


def table(views: Sequence[TokenView]) -> str:
    """One line a token: number, id, bytes, training state, piece and text."""
    rows = [("#", "id", "bytes", "trained", "piece", "text")]
    for number, view in enumerate(views):
        mark = {None: "", True: "yes", False: "-"}[view.trained]
        span = f"{view.begin}-{view.end}"
        rows.append(
            (str(number), str(view.token_id), span, mark, repr(view.piece), repr(view.shown))
        )
    if all(row[3] == "" for row in rows[1:]):
        rows = [(*row[:3], *row[4:]) for row in rows]  # type: ignore[misc]
    return "\n".join(table_lines(rows, "<" * len(rows[0]))) + "\n"


def listing(views: Sequence[TokenView], *, limit: int, color: bool) -> str:
    """Ribbon and table of the first tokens, and the number of others.

    Args:
        limit: Most tokens to list; 0 for all.
        color: As for ``ribbon``.
    """
    shown = views[:limit] if limit else views
    more = len(views) - len(shown)
    rest = f"... {more:,} tokens more; --limit 0 shows all\n" if more else ""
    return f"{ribbon(shown, color=color)}\n{table(shown)}{rest}"
