"""Whether the options of an objective mean something.

Whether keys and values from a configuration are what a dataclass takes; on the host.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import MISSING, fields
from types import NoneType, UnionType
from typing import Any, Final, Literal, Union, get_args, get_origin, get_type_hints

from megatron_ext.errors import LossError
from megatron_ext.registry import did_you_mean

Numerics = Literal["proper", "nemo"]
"""``proper``: distributions stay distributions, see ``docs/losses.md``. ``nemo``: value and
gradient of NeMo RL's x_token losses, for comparison with runs that used them."""


def why_nemo(numerics: Numerics) -> str | None:
    """Why an objective with these numerics cannot be cut; None: it can."""
    if numerics == "nemo":
        return "numerics nemo, which choose columns for the whole microbatch"
    return None


def check_temperature(objective: str, temperature: float) -> None:
    """Raises LossError where it is no positive number."""
    if not (math.isfinite(temperature) and temperature > 0):
        raise LossError(
            f"the temperature of {objective} must be positive", got=temperature, expected="above 0"
        )


def check_choice(objective: str, option: str, value: object, choices: tuple[object, ...]) -> None:
    """Raises LossError where ``value`` is none of the choices."""
    if value not in choices:
        raise LossError(
            f"unknown {option} of the objective {objective}",
            got=repr(value),
            expected=f"one of {', '.join(map(str, choices))}",
        )


def check_count(objective: str, option: str, value: int | None) -> None:
    """Raises LossError where ``value`` is below 1; None stands for all."""
    if value is not None and value < 1:
        raise LossError(
            f"{option} of the objective {objective} compares nothing",
            got=value,
            expected="at least 1, or None for all",
        )


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
