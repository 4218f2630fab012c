"""A YAML configuration file as nested values, with the line of every key."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from megatron_ext.errors import ConfigError
from megatron_ext.typed_mapping import Where as Where
from megatron_ext.typed_mapping import build_config as build_config


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
