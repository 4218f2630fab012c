"""Filters and tests of chat templates that keep provenance and consume from the step limit.

``tojson`` is as transformers has it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import wraps
from types import GeneratorType
from typing import Any, Final

from jinja2.environment import Environment
from jinja2.filters import do_round, do_title, make_attrgetter
from jinja2.nodes import EvalContext
from jinja2.runtime import Context
from jinja2.utils import pass_environment
from markupsafe import Markup

from megatron_ext.conversation.rendering.provenance import TEMPLATE
from megatron_ext.conversation.rendering.template_limits import (
    NESTING,
    TemplateLimitError,
    consume,
    consume_reading,
)
from megatron_ext.conversation.rendering.tracked_data import JsonStyle, settled, text_of, to_json
from megatron_ext.conversation.rendering.tracked_text import (
    TrackedText,
    add,
    as_tracked,
    consume_widths,
    consumed,
    join,
    track,
)


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
    """The printed values, with ``d`` between them."""
    if attribute is not None:
        values = map(make_attrgetter(environment, attribute), values)
    return as_tracked(text_of(d, TEMPLATE)).join([text_of(value, TEMPLATE) for value in values])


def title(value: Any) -> str:
    """Each word with a capital first letter, the rest in lower case."""
    text = text_of(value, TEMPLATE)
    return as_tracked(text).recased(do_title)


def indent(
    value: str, width: int | str = 4, first: bool = False, blank: bool = False
) -> TrackedText:
    """Lines but the first and empty ones indented by ``width`` spaces, or by a text."""
    if not isinstance(width, str):
        consume(0, abs(width))
    margin = width if isinstance(width, str) else track(" " * width, TEMPLATE)
    newline = track("\n", TEMPLATE)
    consume(0, len(margin) * (1 + value.count("\n")))
    # Jinja adds a line end first, so that a text that ends with one keeps it.
    head, *lines = (as_tracked(value) + newline).splitlines()
    rest = [join([newline, margin, line] if line or blank else [newline, line]) for line in lines]
    return join([*([margin] if first else []), head, *rest])


def replace(value: Any, old: Any, new: Any, count: int | None = None) -> TrackedText:
    """The printed value, with ``old`` replaced ``count`` times, or everywhere."""
    text, old, new = (as_tracked(text_of(operand, TEMPLATE)) for operand in (value, old, new))
    return text.replace(old, new, -1 if count is None else count)


@pass_environment
def total(
    environment: Environment,
    values: Iterable[Any],
    attribute: str | int | None = None,
    start: Any = 0,
) -> Any:
    """Sum of ``start`` and all values; no list is extended in place."""
    if attribute is not None:
        values = map(make_attrgetter(environment, attribute), values)
    for value in values:
        consume(1)
        start = add(start, value)
    return start


def rounded(value: float, precision: int = 0, method: str = "common") -> float:
    """Jinja's ``round``, with a bound on the number of digits."""
    if abs(precision) > _DIGITS:
        raise TemplateLimitError(f"rounds to more than {_DIGITS} digits")
    return do_round(value, precision, method)  # type: ignore[arg-type]


def safe(value: Any) -> str:
    """The printed value: a chat template escapes nothing, so nothing is exempt."""
    return text_of(value, TEMPLATE)


_DIGITS: Final = 400
"""More digits than any float has."""

FILTERS: Final[dict[str, Callable[..., Any]]] = {
    "indent": indent,
    "join": join_values,
    "replace": replace,
    "round": rounded,
    "safe": safe,
    "sum": total,
    "title": title,
    "tojson": tojson,
}
"""Name in a template -> filter."""


_PASSED: Final = (Environment, EvalContext, Context)
"""Types of the argument that Jinja passes to some filters before the value."""
_SHALLOW: Final = frozenset({"attr", "count", "d", "default", "first", "last", "length", "random"})
"""Filters whose time does not depend on the value's size."""
_ITERATING: Final = frozenset(
    {"items", "list", "map", "reject", "rejectattr", "reverse", "select", "selectattr"}
)
"""Filters that iterate over the value without reading its items."""
_WIDENING: Final = frozenset({"batch", "center", "slice"})
"""Filters that take a number of characters or items."""
_SQUARE: Final = frozenset({"pprint", "urlize", "wordwrap"})
"""Filters whose time can grow with the square of the text."""
_READING_TESTS: Final = frozenset(
    {
        *("==", "eq", "equalto", "!=", "ne", "<", "lt", "lessthan", "<=", "le"),
        *(">", "gt", "greaterthan", ">=", "ge", "in", "lower", "upper"),
    }
)
"""Tests that read their values in full depth."""


def bounded_filters(filters: Mapping[str, Any]) -> dict[str, Any]:
    """The filters, made to consume from the step limit."""
    return {name: _bounded_filter(name, function) for name, function in filters.items()}


def bounded_tests(tests: Mapping[str, Any]) -> dict[str, Any]:
    """The tests; those that read their values consume from the step limit."""
    return {
        name: _reading(function) if name in _READING_TESTS else function
        for name, function in tests.items()
    }


def _bounded_filter(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def filtered(*args: Any, **kwargs: Any) -> Any:
        inputs = [*args, *kwargs.values()]
        if isinstance(args[0], _PASSED):
            del inputs[0]
        _consume_filter(name, inputs)
        result = function(*args, **kwargs)
        if isinstance(result, GeneratorType):
            return Counted(result, inputs[0])
        if type(result) is str or isinstance(result, Markup):
            result = as_tracked(settled(str.__str__(result), inputs))
        return consumed(result)

    return filtered


def _consume_filter(name: str, inputs: list[Any]) -> None:
    if name in _SHALLOW:
        consume(1)
    elif name in _ITERATING:
        # A text consumes as its characters are taken.
        value = inputs[0]
        is_sized = hasattr(value, "__len__") and not isinstance(value, str)
        consume(1 + (len(value) if is_sized else 0))
    else:
        size = consume_reading(*inputs)
        consume(1)
        if name in _WIDENING:
            consume_widths(inputs[1:])
        elif name == "trim":
            consume(size * sum(len(v) for v in inputs[1:] if isinstance(v, str)) >> 12)
        elif name in _SQUARE:
            consume(size * size >> 14, sum(size * len(v) for v in inputs[1:] if isinstance(v, str)))


class Counted(Iterator[Any]):
    """Lazily computed values, each of which consumes a step.

    Args:
        values: The values.
        source: The input that they are computed from.

    Raises:
        TemplateLimitError: They come through too many nested lazy filters.
    """

    __slots__ = ("_depth", "_values")

    def __init__(self, values: Iterator[Any], source: object = None) -> None:
        self._values = values
        self._depth: int = 1 + (source._depth if isinstance(source, Counted) else 0)
        if self._depth > NESTING:
            raise TemplateLimitError(f"passes values through more than {NESTING} filters")

    def __next__(self) -> Any:
        consume(1)
        return next(self._values)


def _reading(test: Callable[..., bool]) -> Callable[..., bool]:
    @wraps(test)
    def tested(*args: Any, **kwargs: Any) -> bool:
        consume(1)
        consume_reading(*args, *kwargs.values())
        return test(*args, **kwargs)

    return tested
