"""Text, paths and numbers as a person reads them."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from typing import Any, Final

from megatron_ext.alignment.audit import share_in_words

_SHAPED_BY_FONTS: Final = "\u200c\u200d\u3000"
"""Joiners, without which Persian, Hindi and emoji fall apart, and the wide space of Chinese."""


def visible_text(text: str) -> str:
    """``text`` with its control characters shown; a line feed also breaks the line."""
    if text.isprintable():
        return text
    return "".join(
        "␤\n" if c == "\n" else c if c.isprintable() else _escaped_character(c) for c in text
    )


def readable_text(text: str) -> str:
    """``visible_text`` for reading in lines, not token by token: what fonts shape stays."""
    if text.isprintable():
        return text
    return "".join(c if c in _SHAPED_BY_FONTS else visible_text(c) for c in text)


def one_line(text: str) -> str:
    """``readable_text`` that stays in its line."""
    return readable_text(text).replace("\n", "")


def _escaped_character(character: str) -> str:
    """A picture of an ASCII control character; of any other character its code point."""
    code = ord(character)
    return chr(0x2400 + code) if code < 0x20 else f"\\u{code:04x}"


_ABSOLUTE: Final = re.compile(r"(?<![\w.:/])(?:/[^\s/:;,'\"]+){2,}")


def short_paths(paths: Iterable[str], *, least: int = 1) -> dict[str, str]:
    """The ends of paths: ``least`` components, or as many more as tell all paths apart."""
    parts = {path: [part for part in path.split(os.sep) if part] for path in paths}
    longest = max(map(len, parts.values()), default=0)
    for length in range(least, max(least, longest) + 1):
        short = {path: os.sep.join(its[-length:]) or path for path, its in parts.items()}
        if len(set(short.values())) == len(short):
            break
    return short


def with_short_paths(text: str) -> str:
    """A sentence with the last two components of each absolute path in it."""
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


def short_number(value: float) -> str:
    """A round number in little room."""
    for size, letter in ((1e9, "G"), (1e6, "M")):
        if size <= abs(value) < 1e3 * size:
            return f"{value / size:g}{letter}"
    return number(value)


def share(part: float, whole: float) -> str:
    """A part in percent."""
    return share_in_words(part / whole) if whole else NOTHING


def memory(size: float | None) -> str:
    """Bytes in the unit that suits them."""
    if size is None:
        return NOTHING
    for unit in _BYTE_UNITS[:-1]:
        if size < 1024:
            return f"{size:,.3g} {unit}" if unit != "bytes" else f"{size:,.0f} bytes"
        size /= 1024
    return f"{size:,.3g} {_BYTE_UNITS[-1]}"


def duration(seconds: float | None) -> str:
    """Seconds, minutes or hours."""
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
