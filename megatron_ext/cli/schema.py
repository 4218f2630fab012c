"""Print a JSON schema of the configuration of runs, for completion and checks in editors.

    megatron-ext schema > megatron_ext.schema.json

Name it in the first line of a configuration, where the YAML language server looks for it:

    # yaml-language-server: $schema=megatron_ext.schema.json
"""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import json
import sys
import types
import typing
from collections.abc import Mapping
from typing import Any, Final, Literal

from megatron_ext.training.configuration.arguments import field_docs
from megatron_ext.training.configuration.config import DistillConfig

_DIALECT: Final = "https://json-schema.org/draft/2020-12/schema"
_NUMBER: Final = r"^\s*[-+]?(\d[\d_]*\.?[\d_]*|\.\d[\d_]*)([eE][-+]?\d+)?\s*$"
"""A number that YAML reads as text, such as ``1e-4``."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add nothing: the verb has no flags."""


def run(arguments: argparse.Namespace) -> None:
    """Print the schema."""
    sys.stdout.write(json.dumps(configuration_schema(), indent=2, ensure_ascii=False) + "\n")


def configuration_schema() -> dict[str, Any]:
    """The schema of a file for ``megatron-ext distill --config``, in JSON Schema 2020-12.

    No key is required, since any can be given by its flag, and a model's keys by its folder.
    """
    definitions: dict[str, Any] = {}
    root = _reference(DistillConfig, definitions)
    return {"$schema": _DIALECT, "title": "megatron-ext distill", **root, "$defs": definitions}


def _reference(config_type: Any, definitions: dict[str, Any]) -> dict[str, Any]:
    """A reference to the definition of a dataclass, which is added with all that it needs."""
    name = config_type.__name__
    if name not in definitions:
        definitions[name] = {}
        hints, docs = typing.get_type_hints(config_type), field_docs(config_type)
        properties = {
            field.name: {
                **_described(docs.get(field.name, "")),
                **_default(field),
                **_schema(hints[field.name], definitions),
            }
            for field in dataclasses.fields(config_type)
        }
        definitions[name] = {
            **_described((inspect.getdoc(config_type) or "").partition("\n")[0]),
            "type": "object",
            "properties": properties,
            "additionalProperties": False,
        }
    return {"$ref": f"#/$defs/{name}"}


def _schema(hint: Any, definitions: dict[str, Any]) -> dict[str, Any]:
    """What ``typed_mapping.build_config`` takes for a type."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return {"anyOf": [_schema(member, definitions) for member in arguments]}
    if dataclasses.is_dataclass(hint):
        return _reference(hint, definitions)
    if origin is Literal:
        return {"enum": list(arguments)}
    if origin is tuple:
        items = _schema(arguments[0], definitions)
        several = {"type": "array", "items": items}
        # A single text stands for a list of it.
        return {"anyOf": [several, {"type": "string"}]} if arguments[0] is str else several
    if origin is Mapping:
        return _mapping(arguments[1], definitions)
    if hint is float:
        return {"type": ["number", "string"], "pattern": _NUMBER}
    kinds: dict[Any, str] = {str: "string", int: "integer", bool: "boolean", type(None): "null"}
    return {"type": kinds[hint]}


def _mapping(value: Any, definitions: dict[str, Any]) -> dict[str, Any]:
    """Options of any kind, or sections by name or as a list with a name in each."""
    if not dataclasses.is_dataclass(value):
        return {"type": "object"}
    section = _reference(value, definitions)
    properties = definitions[section["$ref"].rpartition("/")[2]]["properties"]
    named = {
        "type": "object",
        "properties": {"name": {"type": "string"}, **properties},
        "required": ["name"],
        "additionalProperties": False,
    }
    return {
        "anyOf": [
            {"type": "object", "additionalProperties": section},
            {"type": "array", "items": named},
        ]
    }


def _described(words: str) -> dict[str, Any]:
    return {"description": " ".join(words.split()).replace("``", "`")} if words else {}


def _default(field: dataclasses.Field[Any]) -> dict[str, Any]:
    """The default of a field where it is a plain value."""
    is_plain = isinstance(field.default, (str, int, float, bool))
    return {"default": field.default} if is_plain else {}
