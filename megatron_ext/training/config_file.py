"""A YAML configuration file into dataclasses, with the file and line in every complaint."""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar

import yaml

from megatron_ext.errors import ConfigError
from megatron_ext.registry import did_you_mean

Config = TypeVar("Config")
Where = Callable[[tuple[str, ...]], str]
"""Key path -> how an error names that place."""


def read_config_file(path: str | Path) -> tuple[dict[str, Any], Where]:
    """The file's mapping, and a function from key path to ``file:line``.

    Raises:
        ConfigError: The file is missing, is not YAML, or is not a mapping.
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        values = yaml.safe_load(text)
    except OSError as error:
        raise ConfigError(
            "the configuration file cannot be read", where=path, got=error.strerror
        ) from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        mark = getattr(error, "problem_mark", None)
        raise ConfigError(
            "the configuration file is not valid YAML",
            where=f"{path}:{mark.line + 1}" if mark else path,
            got=getattr(error, "problem", None) or error,
        ) from error
    if not isinstance(values, dict):
        raise ConfigError(
            "the configuration file is not a mapping of keys to values",
            where=path,
            got=type(values).__name__,
        )
    lines: dict[tuple[str, ...], int] = {}
    for keys, line in _key_lines(root, ()):
        if keys in lines:
            raise ConfigError(
                "the key is given twice",
                where=f"{path}:{line}: {'.'.join(keys)}",
                got=f"it in line {lines[keys]} too",
                fix="remove one of them",
            )
        lines[keys] = line

    def where(keys: tuple[str, ...]) -> str:
        return f"{path}:{_nearest(lines, keys)}: {'.'.join(keys)}" if keys else str(path)

    return values, where


def build_config(config_type: type[Config], values: Mapping[str, Any], where: Where) -> Config:
    """``config_type`` from nested mappings; types are checked, never guessed.

    Raises:
        ConfigError: An unknown or missing key, or a value of the wrong type; with its place.
    """
    return typing.cast(Config, _build(config_type, values, (), where))


def _build(config_type: Any, values: Any, keys: tuple[str, ...], where: Where) -> Any:
    if not isinstance(values, Mapping):
        raise ConfigError(
            "a section is not a mapping", where=where(keys), got=repr(values), expected="key: value"
        )
    fields = {field.name: field for field in dataclasses.fields(config_type)}
    for key in values:
        if key not in fields:
            raise ConfigError(
                "unknown configuration key",
                where=where((*keys, str(key))),
                expected=f"one of {', '.join(fields)}",
                fix=did_you_mean(key, list(fields)),
            )
    hints = typing.get_type_hints(config_type)
    arguments = {
        key: _convert(hints[key], value, (*keys, key), where) for key, value in values.items()
    }
    missing = [name for name, field in fields.items() if _is_required(field) and name not in values]
    if missing:
        raise ConfigError(
            "a required configuration key is missing",
            where=where(keys),
            expected=missing[0],
            fix="add it to the file, or pass its flag",
        )
    try:
        return config_type(**arguments)
    except ConfigError as error:
        raise ConfigError(str(error), where=where(keys)) from error


def _convert(hint: Any, value: Any, keys: tuple[str, ...], where: Where) -> Any:
    """``value`` as the type ``hint``. Integers pass as floats; so does ``1e-4``, text to YAML."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        if value is None and type(None) in arguments:
            return None
        return _convert(next(a for a in arguments if a is not type(None)), value, keys, where)
    if dataclasses.is_dataclass(hint):
        return _build(hint, value, keys, where)
    if origin is Literal:
        if value in arguments:
            return value
        expected = f"one of {', '.join(map(str, arguments))}"
    elif origin is tuple:
        items = [value] if isinstance(value, str) else value
        if isinstance(items, (list, tuple)) and all(isinstance(i, arguments[0]) for i in items):
            return tuple(items)
        expected = f"a list of {arguments[0].__name__}"
    elif origin is Mapping and dataclasses.is_dataclass(arguments[1]):
        return _sections(arguments[1], value, keys, where)
    elif origin is Mapping:
        if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
            return dict(value)
        expected = "a mapping of names to values"
    elif hint is float and _is_number(value):
        return float(value)
    elif isinstance(value, hint) and not (hint is int and isinstance(value, bool)):
        return value
    else:
        expected = hint.__name__
    raise ConfigError(
        "a value has the wrong type", where=where(keys), got=repr(value), expected=expected
    )


def _sections(config_type: Any, value: Any, keys: tuple[str, ...], where: Where) -> dict[str, Any]:
    """Sections by name: a mapping, or a list of which each has a ``name``."""
    named = value
    if isinstance(value, (list, tuple)) and all(isinstance(item, Mapping) for item in value):
        names = [item.get("name") for item in value]
        for name in names:
            if not isinstance(name, str) or names.count(name) > 1:
                raise ConfigError(
                    "sections of a list have no names of their own",
                    where=where(keys),
                    got=repr(name),
                    expected="a name in each, no two alike",
                )
        named = {
            item["name"]: {key: inner for key, inner in item.items() if key != "name"}
            for item in value
        }
    if not isinstance(named, Mapping) or not all(isinstance(name, str) for name in named):
        raise ConfigError(
            "a value has the wrong type",
            where=where(keys),
            got=repr(value),
            expected="sections by name, or a list of sections with a name in each",
        )
    return {name: _build(config_type, item, (*keys, name), where) for name, item in named.items()}


def _is_number(value: object) -> bool:
    if isinstance(value, str):
        try:
            float(value)
        except ValueError:
            return False
        return True
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _is_required(field: dataclasses.Field[Any]) -> bool:
    missing = dataclasses.MISSING
    return field.default is missing and field.default_factory is missing


def _key_lines(node: Any, keys: tuple[str, ...]) -> list[tuple[tuple[str, ...], int]]:
    """Every key path of a YAML tree with its line number."""
    if not isinstance(node, yaml.MappingNode):
        return []
    lines = []
    for key, value in node.value:
        path = (*keys, str(key.value))
        lines.append((path, key.start_mark.line + 1))
        lines.extend(_key_lines(value, path))
    return lines


def _nearest(lines: dict[tuple[str, ...], int], keys: tuple[str, ...]) -> int:
    """Line of a key path, or of the closest section around it."""
    while keys and keys not in lines:
        keys = keys[:-1]
    return lines.get(keys, 1)
