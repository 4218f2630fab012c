"""Jinja's filters that would lose where text came from, and ``tojson`` as transformers has it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Final

from jinja2.environment import Environment
from jinja2.filters import do_title, make_attrgetter
from jinja2.utils import pass_environment

from megatron_ext.conversation.provenance import TEMPLATE
from megatron_ext.conversation.tracked_data import text_of
from megatron_ext.conversation.tracked_json import JsonStyle, to_json
from megatron_ext.conversation.tracked_text import TrackedText, as_tracked, join, track


def tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> TrackedText:
    """JSON; unlike Jinja's own filter it escapes nothing for HTML."""
    style = JsonStyle.of(
        ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
    return to_json(value, style, TEMPLATE)


@pass_environment
def join_values(
    environment: Environment,
    values: Iterable[Any],
    d: str = "",
    attribute: str | int | None = None,
) -> TrackedText:
    """The values as they print, ``d`` between them."""
    if attribute is not None:
        values = map(make_attrgetter(environment, attribute), values)
    return as_tracked(text_of(d, TEMPLATE)).join([text_of(value, TEMPLATE) for value in values])


def title(value: Any) -> str:
    """Each word with a capital, the rest in small letters."""
    text = text_of(value, TEMPLATE)
    return as_tracked(text).recased(do_title)


def indent(
    value: str, width: int | str = 4, first: bool = False, blank: bool = False
) -> TrackedText:
    """Each line but the first, and but empty ones, after ``width`` spaces or the text it is."""
    margin = width if isinstance(width, str) else track(" " * width, TEMPLATE)
    newline = track("\n", TEMPLATE)
    # Jinja adds a line end first, so that a text that ends with one keeps it.
    head, *lines = (as_tracked(value) + newline).splitlines()
    rest = [join([newline, margin, line] if line or blank else [newline, line]) for line in lines]
    return join([*([margin] if first else []), head, *rest])


def safe(value: Any) -> str:
    """The value as it prints: nothing is escaped in a chat template, so nothing is exempt."""
    return text_of(value, TEMPLATE)


FILTERS: Final[dict[str, Callable[..., Any]]] = {
    "indent": indent,
    "join": join_values,
    "safe": safe,
    "title": title,
    "tojson": tojson,
}
"""Name in a template -> filter."""
