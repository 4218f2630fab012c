"""What a template may do with a value, and what it costs: attributes, filters, tests and methods.

Jinja's sandbox refuses attributes that are known to be dangerous; here all are refused that are not
listed. What is listed without a cost pays the highest. The filters here keep provenance, which
Jinja's own would lose; ``tojson`` is as transformers has it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import wraps
from typing import Any, Final

from jinja2.environment import Environment
from jinja2.filters import do_round, do_title, make_attrgetter
from jinja2.runtime import LoopContext, Macro, Undefined
from jinja2.utils import Cycler, Namespace, pass_environment
from markupsafe import Markup

from megatron_ext.conversation.rendering.provenance import TEMPLATE
from megatron_ext.conversation.rendering.template_limits import (
    NESTING,
    Cost,
    TemplateLimitError,
    consume,
    consume_reading,
    consumed,
    pay,
)
from megatron_ext.conversation.rendering.tracked_data import JsonStyle, settled, text_of, to_json
from megatron_ext.conversation.rendering.tracked_text import (
    TrackedText,
    add,
    as_tracked,
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
    environment: Environment, values: Iterable[Any], d: str = "", attribute: str | int | None = None
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


FRAME_ARGUMENTS: Final = ("caller", "_loop_vars", "_block_vars")
"""Arguments that compiled templates add to every call."""

_COSTS: Final[dict[Cost, frozenset[str]]] = {
    "none": frozenset({"attr", "count", "d", "default", "first", "last", "length", "random"}),
    "each": frozenset(
        {"items", "list", "map", "reject", "rejectattr", "reverse", "select", "selectattr"}
    ),
    "length": frozenset(
        {
            *("abs", "capitalize", "dictsort", "e", "escape", "filesizeformat", "float"),
            *("forceescape", "format", "groupby", "indent", "int", "join", "lower", "max", "min"),
            *("replace", "round", "safe", "sort", "string", "sum", "title", "tojson", "truncate"),
            *("unique", "upper", "urlencode", "wordcount"),
        }
    ),
    "product": frozenset({"trim"}),
}
"""Filters that do not cost the square of what they are given."""
_SLOW: Final = frozenset({"float", "int", "title", "urlencode", "wordcount"})
"""Filters that take a step for every few characters."""
_BY_ITEM: Final = frozenset(
    {"batch", "dictsort", "groupby", "join", "max", "min", "slice", "sort", "sum", "unique"}
)
"""Filters that take a few steps for every item; of a lazy input the items are computed first."""
_SHALLOW_TESTS: Final = frozenset(
    {
        *("boolean", "callable", "defined", "divisibleby", "escaped", "even", "false", "filter"),
        *("float", "integer", "iterable", "mapping", "none", "number", "odd", "sameas"),
        *("sequence", "string", "test", "true", "undefined"),
    }
)
"""Tests that look at the value alone."""


def paid_filter(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """A filter that pays for what it is given and what it gives, and settles its source."""
    cost: Cost = next((cost for cost, names in _COSTS.items() if name in names), "square")
    at = 1 if hasattr(function, "jinja_pass_arg") else 0

    @wraps(function)
    def filtered(*args: Any, **kwargs: Any) -> Any:
        if name in _BY_ITEM:
            if isinstance(args[at], Iterator):
                args = (*args[:at], list(args[at]), *args[at + 1 :])
            pay("each", args[at : at + 1])
        inputs = [*args[at:], *kwargs.values()]
        pay(cost, inputs)
        if len(inputs) > 1:
            # An argument may be a path of attributes, which is split.
            consume(sum([len(value) >> 3 for value in inputs[1:] if isinstance(value, str)]))
        if name in _SLOW and isinstance(inputs[0], str):
            consume(len(inputs[0]) >> 2)
        result = function(*args, **kwargs)
        if isinstance(result, Iterator):
            return Counted(result, inputs[0])
        if type(result) is str or isinstance(result, Markup):
            result = as_tracked(settled(str.__str__(result), inputs))
        return consumed(result)

    return filtered


def paid_test(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """A test that pays for what it reads."""
    if name in _SHALLOW_TESTS:
        return function

    @wraps(function)
    def tested(*args: Any, **kwargs: Any) -> Any:
        pay("length", [*args, *kwargs.values()])
        if isinstance(args[0], str):
            consume(len(args[0]) >> 8)
        return function(*args, **kwargs)

    return tested


class Counted(Iterator[Any]):
    """Lazily computed values, each of which is read in full depth when it is taken.

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
        value = next(self._values)
        if not isinstance(value, str) or len(value) >= 512:
            consume_reading(value)
        return value


MAPPING: Final = frozenset({"copy", "get", "items", "keys", "values"})
TEXT: Final = frozenset(
    {
        *("capitalize", "casefold", "lower", "swapcase", "title", "upper"),
        *("center", "expandtabs", "ljust", "rjust", "zfill"),
        *("count", "endswith", "find", "index", "rfind", "rindex", "startswith"),
        *("isalnum", "isalpha", "isascii", "isdecimal", "isdigit", "isidentifier", "islower"),
        *("isnumeric", "isprintable", "isspace", "istitle", "isupper"),
        *("join", "partition", "rpartition", "rsplit", "split", "splitlines"),
        *("lstrip", "removeprefix", "removesuffix", "replace", "rstrip", "strip"),
        *("encode", "format", "format_map"),
    }
)
LOOP: Final = frozenset(
    {
        *("changed", "cycle", "depth", "depth0", "first", "index", "index0", "last", "length"),
        *("nextitem", "previtem", "revindex", "revindex0"),
    }
)
_SEQUENCE: Final = frozenset({"copy", "count", "index"})

_ATTRIBUTES: Final[dict[type, frozenset[str]]] = {
    Markup: TEXT,
    str: TEXT,
    bytes: frozenset({"decode"}),
    dict: MAPPING,
    list: _SEQUENCE,
    tuple: _SEQUENCE | {"grouper", "list"},
    range: _SEQUENCE | {"start", "stop", "step"},
    float: frozenset({"is_integer"}),
    LoopContext: LOOP,
    Macro: frozenset({"arguments", "caller", "catch_kwargs", "catch_varargs", "name"}),
    Cycler: frozenset({"current", "next", "reset"}),
}


class _OfType(dict[type, frozenset[str]]):
    """Attributes that a template may read of each type: those listed for it or a base."""

    def __missing__(self, kind: type) -> frozenset[str]:
        listed = (_ATTRIBUTES[base] for base in kind.__mro__ if base in _ATTRIBUTES)
        return self.setdefault(kind, next(listed, frozenset()))


_OF_TYPE: Final = _OfType()


_PRODUCT_TEXT: Final = frozenset(
    {"lstrip", "rfind", "rindex", "rpartition", "rsplit", "rstrip", "strip"}
)
"""Methods of text that can compare each of its characters with each of another's."""
_SQUARE_TEXT: Final = frozenset(
    {"center", "decode", "encode", "expandtabs", "ljust", "rjust", "zfill"}
)
"""Methods of text that take widths or the name of an encoding, some of which are slow."""


def pay_method(name: str, inputs: Sequence[Any]) -> None:
    """Pay for the call of a method of the first of ``inputs`` with the others."""
    owner = inputs[0]
    if not isinstance(owner, (str, bytes)):
        # Methods of a mapping but ``copy`` do not read it; those of others may read all.
        is_read = not isinstance(owner, Mapping) or name == "copy"
        pay("length", inputs if is_read else inputs[1:])
        return
    consume(1 + (len(owner) >> 7))
    if len(inputs) > 1:
        if name in _PRODUCT_TEXT:
            pay("product", inputs)
        else:
            pay("square" if name in _SQUARE_TEXT else "length", inputs)


def is_allowed(value: object, name: str) -> bool:
    """Whether a template may read an attribute that ``value`` has."""
    if name.startswith("_"):
        return False
    if value is dict:
        return name == "fromkeys"
    # Namespaces hold values that the template has set; undefined values raise by themselves.
    return isinstance(value, (Namespace, Undefined)) or name in _OF_TYPE[type(value)]
