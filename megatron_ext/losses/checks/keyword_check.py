"""Whether keys and values from a configuration are what a dataclass takes; on the host."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, fields
from types import NoneType, UnionType
from typing import Any, Final, Literal, Union, get_args, get_origin, get_type_hints

from megatron_ext.errors import LossError
from megatron_ext.registry import did_you_mean

_NAMES: Final[Mapping[Any, str]] = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "a text",
    NoneType: "nothing",
}


def check_keywords(kind: type[Any], values: Mapping[str, Any], *, of: str) -> None:
    """Check ``values`` against the fields of the dataclass ``kind``.

    A text where a number belongs would fail far away, and a text where true or false belongs would
    count as true, "false" as well. Choices among a few words are left to ``kind``.

    Args:
        of: What the keys are of, for errors.

    Raises:
        LossError: A key that there is not, one that is missing, or a value of another type.
    """
    if not isinstance(values, Mapping) or not all(isinstance(key, str) for key in values):
        raise LossError(f"{of} is no mapping of keys to values", got=repr(values))
    taken = {item.name: item for item in fields(kind)}
    hints = get_type_hints(kind)
    for key, value in values.items():
        if key not in taken:
            raise LossError(
                f"unknown key of {of}",
                got=repr(key),
                expected=f"one of {', '.join(taken)}",
                fix=did_you_mean(key, list(taken)),
            )
        types = _types(hints[key])
        if not any(_is_of(value, each) for each in types):
            raise LossError(
                f"{key} of {of} has a value of another type",
                got=repr(value),
                expected=" or ".join(_NAMES.get(each, each.__name__) for each in types),
            )
    for name, item in taken.items():
        if item.default is MISSING and item.default_factory is MISSING and name not in values:
            raise LossError(f"{of} cannot do without {name}", fix=f"give it {name}")


def _types(hint: Any) -> list[Any]:
    """The classes that an annotation names; ``object`` for a choice among words."""
    if get_origin(hint) in (Union, UnionType):
        return [each for part in get_args(hint) for each in _types(part)]
    origin = get_origin(hint) or hint
    return [object if origin is Literal else origin]


def _is_of(value: object, kind: Any) -> bool:
    if isinstance(value, bool):
        return kind in (bool, object)
    return isinstance(value, (int, float) if kind is float else kind)
