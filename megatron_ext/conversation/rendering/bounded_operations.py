"""Operators and methods whose results can be far larger than what they are given."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

from megatron_ext.conversation.rendering.template_limits import (
    INTEGER_BITS,
    TemplateLimitError,
    spend,
    spend_on,
)
from megatron_ext.conversation.rendering.tracked_text import as_tracked

_WIDENING: Final = frozenset({"center", "expandtabs", "ljust", "rjust", "zfill"})
"""Methods of text that take a number of characters."""
_SEARCHING: Final = frozenset(
    {"lstrip", "rfind", "rindex", "rpartition", "rsplit", "rstrip", "strip"}
)
"""Methods whose time is the text's length times the argument's."""
_CODING: Final = frozenset({"decode", "encode"})
"""Methods that take the name of an encoding, some of which are slow."""
_COMPARING: Final = frozenset({"count", "index"})
"""Methods of lists that read the items, however deep."""


def add(left: Any, right: Any) -> Any:
    """``left + right``; two lists or tuples are paid for."""
    if isinstance(left, (list, tuple)) and isinstance(right, (list, tuple)):
        spend(1 + (len(left) + len(right) >> 3))
    return checked(left + right)


def multiply(left: Any, right: Any) -> Any:
    """``left * right`` for numbers, or for a text or list and a number."""
    if isinstance(left, int) and isinstance(right, int):
        _check_bits(left.bit_length() + right.bit_length())
    for value, times in ((left, right), (right, left)):
        if isinstance(value, str):
            return as_tracked(value) * times
        if isinstance(value, (bytes, list, tuple)) and isinstance(times, int):
            made = len(value) * max(0, times)
            spend(1 + (made >> 3), made)
    return left * right


def power(left: Any, right: Any) -> Any:
    """``left ** right`` for numbers."""
    if isinstance(left, int) and isinstance(right, int):
        _check_bits(left.bit_length() * abs(right))
    return left**right


def remainder(left: Any, right: Any) -> Any:
    """``left % right`` for numbers, or a text and what to put into it."""
    if isinstance(left, bytes):
        raise TemplateLimitError("formats bytes")
    return (as_tracked(left) if isinstance(left, str) else left) % right


def checked(value: Any) -> Any:
    """``value``, unless it is too large an integer."""
    if type(value) is int:
        _check_bits(value.bit_length())
    return value


def paid(value: Any) -> Any:
    """``value``, which has been made, once it is paid for."""
    if isinstance(value, (str, bytes)):
        spend(1, len(value))
    elif isinstance(value, (list, tuple)):
        spend(1 + (len(value) >> 3))
    return checked(value)


def spend_on_method(
    owner: object, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> None:
    """Pay for a call of a method of a text or a list before it is made."""
    if not isinstance(owner, (str, bytes)):
        # They may be compared, or looked up in a mapping.
        spend(1)
        spend_on(*args, *kwargs.values())
        if name in _COMPARING:
            spend_on(owner)
        return
    size = len(owner)
    spend(1 + (size >> 10))
    values = [*args, *kwargs.values()]
    if name in _WIDENING:
        spend_on_widths(values, 1 + owner.count("\t") if isinstance(owner, str) else 1)
    elif name in _SEARCHING:
        spend(size * sum(len(value) for value in values if isinstance(value, str)) >> 12)
    elif name in _CODING and values:
        spend(size * size >> 8)


def spend_on_widths(values: Sequence[Any], times: int = 1) -> None:
    """Pay as many characters as each integer says, ``times`` over."""
    spend(0, times * sum(abs(value) for value in values if isinstance(value, int)))


def spend_on_width_texts(widths: Sequence[str]) -> None:
    """Pay for the widths and precisions of a format, as it writes them."""
    if any(len(width) > 9 for width in widths):
        raise TemplateLimitError("formats a value wider than any text may be")
    spend(0, sum(int(width) for width in widths if width))


_WIDTHS_OF_BRACES: Final = re.compile(r"\d+")


def spend_on_field(value: object, spec: str) -> None:
    """Pay for a field of ``str.format``: its value and the widths in ``spec``."""
    spend_on_width_texts(_WIDTHS_OF_BRACES.findall(spec))
    spend(1, spend_on(value))


def _check_bits(bits: int) -> None:
    if bits > INTEGER_BITS:
        raise TemplateLimitError(f"makes an integer of more than {INTEGER_BITS:,} bits")
