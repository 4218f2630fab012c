"""Validation of nested mappings (files, flags, arguments) into dataclasses.

Types are checked, never guessed, and every error names a place.
"""

from __future__ import annotations

import dataclasses
import math
import types
import typing
from collections.abc import Callable, Mapping
from datetime import date
from functools import cache
from typing import Any, Final, Literal, NamedTuple, TypeVar

from megatron_ext.errors import ConfigError, MegatronExtError
from megatron_ext.registry import did_you_mean

Config = TypeVar("Config")
_QUOTED: Final = "put into quotes what YAML takes for a number, a Boolean or a date"
Where = Callable[[tuple[str, ...]], str]
"""Key path -> name of that place in errors."""


@cache
def _types_of(config_type: type[Any]) -> dict[str, Any]:
    """Types of its fields, by name; compiled from text once."""
    return typing.get_type_hints(config_type)


def build_config(
    config_type: type[Config],
    values: Mapping[str, Any],
    where: Where,
    *,
    error: type[MegatronExtError] = ConfigError,
    flags: Mapping[tuple[str, ...], str] = types.MappingProxyType({}),
) -> Config:
    """Build a dataclass from nested mappings.

    Args:
        error: Type of the errors that are raised.
        flags: Key path -> the flag that gives it, for the error of a missing key.

    Raises:
        ConfigError: A key is unknown or missing, or a value has the wrong type; with its place.
    """
    builder = _Builder(where, error, flags)
    try:
        return typing.cast(Config, builder.build(config_type, values, ()))
    except _MissingKeys as missing:
        named = {**_missing(config_type, values, ()), **missing.named}
        raise builder.without(named, missing.keys) from None


class _MissingKeys(Exception):
    """Required keys are missing in a section."""

    def __init__(self, named: Mapping[tuple[str, ...], str], keys: tuple[str, ...]) -> None:
        super().__init__(keys)
        self.named, self.keys = named, keys


class _Builder(NamedTuple):
    where: Where
    error: type[MegatronExtError]
    """Type of the errors that are raised."""
    flags: Mapping[tuple[str, ...], str]
    """Key path -> the flag that gives it."""

    def build(self, config_type: Any, values: Any, keys: tuple[str, ...]) -> Any:
        """A dataclass from the mapping at a key path."""
        if not isinstance(values, Mapping):
            raise self.error(
                "a section is not a mapping",
                where=self.where(keys),
                got=repr(values),
                expected="key: value",
            )
        fields = {field.name: field for field in dataclasses.fields(config_type)}
        for key in values:
            if key not in fields:
                near = did_you_mean(key, list(fields))
                raise self.error(
                    "unknown configuration key",
                    where=self.where((*keys, str(key))),
                    expected=None if near else f"one of {', '.join(fields)}",
                    fix=near,
                )
        hints = _types_of(config_type)
        arguments = {
            key: self._convert(hints[key], value, (*keys, key)) for key, value in values.items()
        }
        if named := _missing(config_type, values, keys):
            raise _MissingKeys(named, keys)
        try:
            return config_type(**arguments)
        except ConfigError as error:
            raise _placed(error, keys, self.where) from error

    def without(
        self, named: Mapping[tuple[str, ...], str], keys: tuple[str, ...]
    ) -> MegatronExtError:
        """The error of the section at ``keys``, and of others, without required keys.

        Args:
            named: Key path -> what is said of it.
        """
        flags = " ".join(self.flags[path] for path in named if path in self.flags)
        is_one = len(named) == 1
        return self.error(
            "a required configuration key is missing"
            if is_one
            else "required configuration keys are missing",
            where=self.where(keys),
            expected=", ".join(named.values()),
            fix=f"give {'it' if is_one else 'them'} in the file{flags and f', or by {flags}'}",
        )

    def _convert(self, hint: Any, value: Any, keys: tuple[str, ...]) -> Any:
        """``value`` as the type ``hint``; a float may be an integer or YAML's text ``1e-4``.
        A text that may be left out is not empty, as that of a shell's variable without a value."""
        origin, arguments = typing.get_origin(hint), typing.get_args(hint)
        if _is_optional(hint):
            if type(None) in arguments and value in (None, ""):
                if value is None:
                    return None
                raise self.error("a value is empty", where=self.where(keys), fix="leave it out")
            first, *others = (member for member in arguments if member is not type(None))
            classes = tuple(typing.get_origin(other) or other for other in others)
            return value if isinstance(value, classes) else self._convert(first, value, keys)
        if dataclasses.is_dataclass(hint):
            return self.build(hint, value, keys)
        if origin is Literal:
            if value in arguments:
                return value
            raise self.error(
                "there is no such choice",
                where=self.where(keys),
                got=repr(value),
                expected=f"one of {', '.join(map(str, arguments))}",
            )
        elif origin is tuple:
            items = [value] if isinstance(value, str) else value
            if isinstance(items, (list, tuple)) and dataclasses.is_dataclass(arguments[0]):
                places = [(*keys, str(place)) for place in range(len(items))]
                return tuple(map(self.build, [arguments[0]] * len(items), items, places))
            is_list = isinstance(items, (list, tuple))
            if is_list and (arguments[0] is float or typing.get_origin(arguments[0]) is tuple):
                return tuple(self._convert(arguments[0], item, keys) for item in items)
            is_long_enough = Ellipsis in arguments or (is_list and len(items) == len(arguments))
            if is_list and is_long_enough and all(isinstance(i, arguments[0]) for i in items):
                return tuple(items)
            number = "" if Ellipsis in arguments else f"{len(arguments)} "
            expected = f"a list of {number}{getattr(arguments[0], '__name__', arguments[0])}"
        elif origin is Mapping and dataclasses.is_dataclass(arguments[1]):
            return self._sections(arguments[1], value, keys)
        elif origin is Mapping:
            if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
                return dict(value)
            expected = "a mapping of names to values"
        elif hint is float and _is_number(value):
            if math.isfinite(float(value)):
                return float(value)
            expected = "a finite number"
        elif isinstance(value, hint) and not (hint is int and isinstance(value, bool)):
            return value
        else:
            expected = hint.__name__
        parts = value if isinstance(value, list) else [value]
        is_unquoted = any(isinstance(part, (int, float, date)) for part in parts)
        raise self.error(
            "a value has the wrong type",
            where=self.where(keys),
            got=repr(value),
            expected=expected,
            fix=_QUOTED if is_unquoted and str in (hint, *arguments) else None,
        )

    def _sections(self, config_type: Any, value: Any, keys: tuple[str, ...]) -> dict[str, Any]:
        """Sections by name, from a mapping, or from a list of sections with a ``name`` each."""
        named = value
        if isinstance(value, (list, tuple)) and all(isinstance(item, Mapping) for item in value):
            names = [item.get("name") for item in value]
            for name in names:
                if not isinstance(name, str) or names.count(name) > 1:
                    raise self.error(
                        "sections of a list have no names of their own",
                        where=self.where(keys),
                        got=repr(name),
                        expected="a name in each, no two alike",
                    )
            named = {
                item["name"]: {key: inner for key, inner in item.items() if key != "name"}
                for item in value
            }
        if not isinstance(named, Mapping) or not all(isinstance(name, str) for name in named):
            raise self.error(
                "a value has the wrong type",
                where=self.where(keys),
                got=repr(value),
                expected="sections by name, or a list of sections with a name in each",
            )
        return {name: self.build(config_type, item, (*keys, name)) for name, item in named.items()}


def _placed(error: ConfigError, keys: tuple[str, ...], where: Where) -> ConfigError:
    """The error of a section, with the place of the section or of the key that it names."""
    if not isinstance(error.where, str):
        return ConfigError(str(error), where=where(keys))
    text = str(error).removeprefix(f"{error.where}: ")
    return ConfigError(text, where=where((*keys, *error.where.split("."))))


def _is_number(value: object) -> bool:
    if isinstance(value, str):
        try:
            float(value)
        except ValueError:
            return False
        return True
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _missing(
    config_type: Any, values: Mapping[str, Any], keys: tuple[str, ...]
) -> dict[tuple[str, ...], str]:
    """Required keys that the section at ``keys`` and those in it lack: path -> what is said of it.

    A section that another key of the whole can fill in (``metadata["from"]``) stands for that key.
    """
    hints = _types_of(config_type)
    named: dict[tuple[str, ...], str] = {}
    fields = dataclasses.fields(config_type)
    absent = [field for field in fields if _is_required(field) and field.name not in values]
    for field in fields:
        path, source = (*keys, field.name), field.metadata.get("from")
        section, value = _section_type(hints[field.name]), values.get(field.name)
        if field not in absent:
            if section is not None and isinstance(value, Mapping):
                named |= _missing(section, value, path)
        elif source is not None:
            others = [each.name for each in absent if each.metadata.get("from") == source]
            named[source,] = f"{source} (or {' and '.join(others)})"
        else:
            inner = {} if section is None else _missing(section, {}, path)
            named |= inner or {path: ".".join(path)}
    return named


def _section_type(hint: Any) -> Any:
    """The dataclass of a field that is a section, or None."""
    members = (hint, *typing.get_args(hint)) if _is_optional(hint) else (hint,)
    return next((member for member in members if dataclasses.is_dataclass(member)), None)


def _is_optional(hint: Any) -> bool:
    return typing.get_origin(hint) in (typing.Union, types.UnionType)


def _is_required(field: dataclasses.Field[Any]) -> bool:
    missing = dataclasses.MISSING
    return field.default is missing and field.default_factory is missing
