"""Numbers as a person reads them."""

from __future__ import annotations

from typing import Any, Final

from megatron_ext.alignment.audit import share_in_words

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
