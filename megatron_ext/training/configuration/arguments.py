"""Command-line flags, generated from the configuration dataclasses.

A field's flag is its name in kebab case behind the prefixes of the sections around it:
``teacher.model.num_layers`` is ``--teacher-num-layers``, ``tokenizer.library`` is
``--tokenizer-library``. The string under the field is its help text.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import inspect
import textwrap
import types
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Final, Literal

from megatron_ext.files import parse_json
from megatron_ext.training.configuration.config import DistillConfig
from megatron_ext.training.configuration.yaml_file import read_config_file, with_huggingface_models
from megatron_ext.typed_mapping import build_config

_SEPARATOR: Final = "."

BASIC: Final = frozenset(
    {
        *("--run-dir", "--initial-checkpoint", "--seq-length", "--tokenizer-model"),
        *("--tokenizer-prompt-format", "--data-train", "--data-validation", "--data-text-key"),
        *("--data-conversations", "--data-packing", "--data-rollouts-share", "--train-iters"),
        *("--micro-batch-size", "--global-batch-size", "--precision", "--require-gpu"),
        *("--eval-interval", "--save-interval", "--teacher-tokenizer-model"),
        *("--teacher-seq-length", "--teacher-checkpoint", "--teacher-library", "--teacher-cache"),
        *("--teacher-placement", "--loss-objective", "--loss-options", "--loss-temperature"),
        *("--loss-kd-weight", "--loss-ce-weight", "--loss-linear", "--lr", "--lr-warmup-iters"),
        *("--tensor-model-parallel-size", "--pipeline-model-parallel-size", "--lora-rank"),
    }
)
"""Flags of the short help; the others are advanced."""

_ALIASES: Final[Mapping[str, tuple[str, ...]]] = {"--data-text-key": ("--text-field",)}
"""Flag -> its names in other verbs."""


def mark_advanced(action: argparse.Action) -> None:
    """Leave the flag out of the short help of the command line; ``--help-all`` shows it."""
    action.is_advanced = True  # type: ignore[attr-defined]


def terminal_help(text: str) -> str:
    """Help for argparse, without marks of reStructuredText."""
    return text.replace("%", "%%").replace("``", "")


@dataclass(frozen=True, slots=True)
class Flag:
    """One leaf of the configuration as a flag."""

    name: str
    keys: tuple[str, ...]
    hint: Any
    help: str
    section: str


def flags_of(config_type: Any, prefix: str = "", keys: tuple[str, ...] = ()) -> Iterator[Flag]:
    """Every flag of ``config_type``, in the order of its fields.

    A flag is the field's name in kebab case behind ``prefix`` and the prefixes of the sections
    around it.
    """
    hints = typing.get_type_hints(config_type)
    docs = field_docs(config_type)
    for field in dataclasses.fields(config_type):
        path = (*keys, field.name)
        hint = _without_none(hints[field.name])
        if dataclasses.is_dataclass(hint):
            yield from flags_of(hint, prefix + field.metadata.get("prefix", ""), path)
            continue
        yield Flag(
            name=f"--{prefix}{field.name.replace('_', '-')}",
            keys=path,
            hint=hint,
            help=docs.get(field.name, ""),
            section=_SEPARATOR.join(keys) or "run",
        )


def argparse_type(hint: Any) -> dict[str, Any]:
    """Arguments for argparse to parse a field of type ``hint``."""
    origin = typing.get_origin(hint)
    if origin is Literal:
        return {"choices": typing.get_args(hint)}
    if origin is tuple:
        return {"nargs": "+", "metavar": "VALUE"}
    if origin is Mapping:
        return {"type": _json_object, "metavar": "JSON"}
    if hint is bool:
        return {"action": argparse.BooleanOptionalAction}
    return {"type": hint, "metavar": hint.__name__.upper()}


@cache
def field_docs(config_type: type) -> dict[str, str]:
    """Meaning of each field of a dataclass: the string literal under it."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(config_type))).body[0]
    assert isinstance(tree, ast.ClassDef)
    docs = {}
    for statement, following in zip(tree.body, tree.body[1:], strict=False):
        if (
            isinstance(statement, ast.AnnAssign)
            and isinstance(statement.target, ast.Name)
            and isinstance(following, ast.Expr)
            and isinstance(following.value, ast.Constant)
        ):
            docs[statement.target.id] = inspect.cleandoc(str(following.value.value))
    return docs


def _json_object(text: str) -> dict[str, Any]:
    try:
        value = parse_json(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"not JSON: {text!r}; {error}") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"not a JSON object: {text!r}; expected '{{\"key\": 1}}'")
    return value


def _without_none(hint: Any) -> Any:
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return next(a for a in typing.get_args(hint) if a is not type(None))
    return hint


@cache
def config_flags() -> tuple[Flag, ...]:
    """Every flag of ``DistillConfig``, in the order of its fields."""
    return tuple(flags_of(DistillConfig))


def add_config_arguments(parser: argparse.ArgumentParser) -> None:
    """Add ``--config`` and a flag for every configuration key; a flag overrides the file."""
    parser.add_argument("--config", metavar="FILE", help="YAML configuration file")
    groups: dict[str, argparse._ArgumentGroup] = {}
    for flag in config_flags():
        group = groups.get(flag.section)
        if group is None:
            group = groups[flag.section] = parser.add_argument_group(flag.section)
        action = group.add_argument(
            flag.name,
            *_ALIASES.get(flag.name, ()),
            dest=_SEPARATOR.join(flag.keys),
            default=argparse.SUPPRESS,
            help=terminal_help(flag.help),
            **argparse_type(flag.hint),
        )
        if flag.name not in BASIC:
            mark_advanced(action)


def config_from_arguments(namespace: argparse.Namespace) -> DistillConfig:
    """The configuration that the file and the flags describe together.

    Raises:
        ConfigError: As ``build_config``, naming the file and line, or the flag.
        CheckpointError: A model is to be taken from a folder that is not there, or cannot be read.
    """
    file_values, file_where = (
        read_config_file(namespace.config)
        if namespace.config
        else ({}, lambda keys: "command line")
    )
    flag_of = {flag.keys: flag.name for flag in config_flags()}
    given = {tuple(name.split(_SEPARATOR)): value for name, value in vars(namespace).items()}
    overrides = {keys: value for keys, value in given.items() if keys in flag_of}
    values = file_values
    for keys, value in overrides.items():
        values = _with(values, keys, value)

    def where(keys: tuple[str, ...]) -> str:
        if keys in overrides:
            return flag_of[keys]
        inner = [flag_of[path] for path in overrides if keys and path[: len(keys)] == keys]
        return f"{file_where(keys)}, with {' '.join(inner)}" if inner else file_where(keys)

    filled = with_huggingface_models(values, where)
    return build_config(DistillConfig, filled, where, flags=flag_of)


def is_given(namespace: argparse.Namespace, *keys: str) -> bool:
    """Whether a flag or the file gives the key."""
    return given_value(namespace, *keys) is not None


def given_value(namespace: argparse.Namespace, *keys: str) -> Any:
    """The value of a key or of a section, which a flag or the file gives; None where none does.

    It is not checked. Of a section that flags give parts of, it is the names of the parts.
    """
    name = _SEPARATOR.join(keys)
    given = vars(namespace)
    if name in given:
        return given[name]
    parts = [flag for flag in given if flag.startswith(name + _SEPARATOR)]
    if parts:
        return parts
    value: Any = read_config_file(namespace.config)[0] if namespace.config else {}
    for key in keys:
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


def set_value(namespace: argparse.Namespace, value: Any, *keys: str) -> None:
    """Give a key a value, in place, as its flag would."""
    setattr(namespace, _SEPARATOR.join(keys), value)


def _with(values: dict[str, Any], keys: tuple[str, ...], value: Any) -> dict[str, Any]:
    """A copy of ``values`` with the leaf at ``keys`` set."""
    if len(keys) == 1:
        return {**values, keys[0]: value}
    inner = {} if values.get(keys[0]) is None else values[keys[0]]
    if not isinstance(inner, dict):
        # Left as it is, for the later error that this section is no mapping.
        return values
    return {**values, keys[0]: _with(inner, keys[1:], value)}
