"""What a chat template may ask of each kind of value: named here, or refused.

Jinja's sandbox refuses names that are known to be dangerous. A template has no need of any others
than these.
"""

from __future__ import annotations

from typing import Final

from jinja2.runtime import LoopContext, Macro, Undefined
from jinja2.utils import Cycler, Namespace
from markupsafe import Markup

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
    """What a template may ask of each type: what is listed for it or its base, or nothing."""

    def __missing__(self, kind: type) -> frozenset[str]:
        listed = (_ATTRIBUTES[base] for base in kind.__mro__ if base in _ATTRIBUTES)
        return self.setdefault(kind, next(listed, frozenset()))


_OF_TYPE: Final = _OfType()


def is_allowed(value: object, name: str) -> bool:
    """Whether a template may read an attribute that ``value`` has."""
    if name.startswith("_"):
        return False
    if value is dict:
        return name == "fromkeys"
    # Namespaces hold what the template has put there; undefined values raise by themselves.
    return isinstance(value, (Namespace, Undefined)) or name in _OF_TYPE[type(value)]
