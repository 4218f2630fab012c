"""Every name that a user of the package can have written down, as one table."""

import argparse
import ast
import dataclasses
import inspect
import json
import re
import types
import typing
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import megatron_ext
from megatron_ext.cli.main import VERBS
from megatron_ext.conversation import PROMPT_FORMAT_REGISTRY, RECORD_SCHEMA_REGISTRY
from megatron_ext.evaluation.tasks import TASKS
from megatron_ext.losses import LOSS_REGISTRY
from megatron_ext.projection import PROJECTION_METHODS
from megatron_ext.tokenizers import TOKENIZER_LIBRARIES
from megatron_ext.tokenizers.legacy_types import LEGACY_TYPES
from megatron_ext.training.configuration.arguments import add_config_arguments
from megatron_ext.training.configuration.config import DistillConfig
from megatron_ext.training.configuration.tokenizer_arguments import add_tokenizer_arguments

SNAPSHOT = Path(__file__).with_name("public_names.json")

PROMISED = (
    *(
        f"megatron_ext:MegatronTokenizerTextAbstract.{method}"
        for method in (
            "text_to_ids",
            "ids_to_text",
            "text_to_ids_batch",
            "encode_with_byte_ends",
            "byte_ends",
            "token_bytes",
            "token_to_id",
        )
    ),
    "megatron_ext:MegatronTokenizer.from_pretrained",
    "megatron_ext:MegatronTokenizer.write_metadata",
    *(
        f"megatron_ext:MegatronTokenizerText.{method}"
        for method in (
            "tokenize",
            "detokenize",
            "tokenize_conversation",
            "apply_chat_template",
            "offsets",
        )
    ),
    "megatron_ext:MegatronTokenizerVision",
    *(f"megatron_ext:TokenAligner.{method}" for method in ("align", "align_ids", "align_batch")),
    *(
        f"megatron_ext:SparseProjection.{member}"
        for member in (
            "from_tokenizers",
            "save",
            "load",
            "shape",
            "indptr",
            "indices",
            "values",
            "metadata",
        )
    ),
    *(
        f"megatron_ext:Alignment.{member}"
        for member in (
            "student_spans",
            "teacher_spans",
            "is_exact",
            "student_chunk_id",
            "teacher_chunk_id",
        )
    ),
    "megatron_ext.conversation:PROMPT_FORMAT_REGISTRY",
    "megatron_ext.conversation:PromptConfig",
    "megatron_ext.conversation:tokenize_conversation",
    "megatron_ext.losses:DistillationInputs",
    "megatron_ext.losses:LossOutput",
    "megatron_ext.losses:TeacherTargets",
)
"""Interfaces that the design settles; names of the package itself are in ``__all__``."""

_REGISTRIES = {
    "LOSS_REGISTRY": LOSS_REGISTRY,
    "PROMPT_FORMAT_REGISTRY": PROMPT_FORMAT_REGISTRY,
    "RECORD_SCHEMA_REGISTRY": RECORD_SCHEMA_REGISTRY,
    "PROJECTION_METHODS": PROJECTION_METHODS,
    "TASKS": TASKS,
    "TOKENIZER_LIBRARIES": TOKENIZER_LIBRARIES,
    "old tokenizer types": LEGACY_TYPES,
}

Snapshot = dict[str, Any]


def recorded_names():
    snapshot = json.loads(SNAPSHOT.read_text(encoding="utf-8"))
    return snapshot


def current_names(recorded):
    """The same of the code as it is.

    Args:
        recorded: An earlier snapshot: what was shown once counts for as long as it imports,
            whether a page still shows it or not.
    """
    shown = {*recorded.get("documented", ()), *imports_of_documentation(), *PROMISED}
    in_examples = {*recorded.get("examples", ()), *imports_of_examples()}
    groups = _flag_groups()
    return {
        "package": {
            name: _parameters(getattr(megatron_ext, name)) for name in sorted(megatron_ext.__all__)
        },
        "documented": sorted(filter(is_importable, shown)),
        "examples": sorted(filter(is_importable, in_examples)),
        "console": _console_entries(),
        "flags": groups,
        "verbs": _verbs(groups),
        "configuration": _keys(DistillConfig),
        "registries": {name: sorted(rows) for name, rows in _REGISTRIES.items()},
        "objectives": {name: _keys(objective) for name, objective in sorted(LOSS_REGISTRY.items())},
    }


def differences(recorded, current):
    """A line for every name that went, came or changed."""
    before, after = (dict(_lines(snapshot)) for snapshot in (recorded, current))
    found = []
    for key in sorted({**before, **after}):
        was, now = before.get(key), after.get(key)
        if key not in after:
            found.append(f"gone: {key} {was}")
        elif key not in before:
            found.append(f"new: {key} {now}")
        elif was != now:
            found.append(f"changed: {key} {was} -> {now}")
    return found


def _lines(value, path=""):
    if isinstance(value, Mapping):
        return [line for key, part in value.items() for line in _lines(part, f"{path}/{key}")]
    if path.split("/")[1] in ("documented", "examples", "flags", "verbs", "registries"):
        return [(f"{path}/{item}", "") for item in value]
    return [(path, json.dumps(value))]


def _parameters(public):
    """``a, b=, *, c=``: what it is called with, ``=`` where there is a default; None: no call."""
    if not callable(public):
        return None
    # Another package's fields change with its version.
    foreign = {
        field.name
        for base in getattr(public, "__mro__", ())
        if dataclasses.is_dataclass(base) and not base.__module__.startswith("megatron_ext")
        for field in dataclasses.fields(base)
    }
    prefix = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
    words, is_keyword_only = [], False
    for name, parameter in inspect.signature(public).parameters.items():
        if name in foreign:
            continue
        if parameter.kind is parameter.KEYWORD_ONLY and not is_keyword_only:
            words.append("*")
        is_keyword_only |= parameter.kind in (parameter.KEYWORD_ONLY, parameter.VAR_POSITIONAL)
        optional = "=" if parameter.default is not parameter.empty else ""
        words.append(prefix.get(parameter.kind, "") + name + optional)
    return ", ".join(words)


def _console_entries():
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    section = text.partition("[project.scripts]\n")[2].partition("\n[")[0]
    return dict(re.findall(r'^([\w-]+) = "(.+)"$', section, re.MULTILINE))


def _flag_groups():
    """Flags that several verbs have together."""
    adders = {"configuration": add_config_arguments, "tokenizer": add_tokenizer_arguments}
    groups = {}
    for name, add in adders.items():
        parser = argparse.ArgumentParser(add_help=False)
        add(parser)
        groups[name] = sorted(parser._option_string_actions)
    return groups


def _verbs(groups):
    """Verb, and action of a verb -> its arguments in order, then its flags."""
    found = {}
    for verb in sorted(VERBS):
        module = import_module(f"megatron_ext.cli.{verb.replace('-', '_')}")
        for name, parser in _parsers(verb, module.add_arguments).items():
            found[name] = _arguments(parser, groups)
    return found


def _parsers(verb, add_arguments):
    parser = argparse.ArgumentParser(add_help=False)
    add_arguments(parser)
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            return {f"{verb} {name}": inner for name, inner in action.choices.items()}
    return {verb: parser}


def _arguments(parser, groups):
    found = [
        f"<{action.metavar or action.dest}>"
        for action in parser._actions
        if not action.option_strings
    ]
    flags = set(parser._option_string_actions) - {"-h", "--help"}
    for name, group in groups.items():
        if flags.issuperset(group):
            found.append(f"({name})")
            flags -= set(group)
    return [*found, *sorted(flags)]


def _keys(config_type, prefix=""):
    """Dotted key -> default of every field of a dataclass and of the dataclasses in it."""
    hints = typing.get_type_hints(config_type)
    keys = {}
    for field in dataclasses.fields(config_type):
        kind = _without_none(hints[field.name])
        if dataclasses.is_dataclass(kind):
            keys |= _keys(kind, f"{prefix}{field.name}.")
        else:
            keys[prefix + field.name] = _default(field)
    return keys


def _default(field):
    if field.default is not dataclasses.MISSING:
        default = field.default
    elif field.default_factory is not dataclasses.MISSING:
        default = field.default_factory()
    else:
        return "(required)"
    # As JSON has it: a tuple is a list.
    return json.loads(json.dumps(default))


def _without_none(hint):
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return next(kind for kind in typing.get_args(hint) if kind is not type(None))
    return hint


ROOT = Path(__file__).parents[2]

_PYTHON_BLOCK = re.compile(r"^```py(?:thon)?\n(.*?)^```$", re.DOTALL | re.MULTILINE)
"""``py``: a program that the tests of the documentation do not run."""


def imports_of_documentation():
    """``module:name`` of every import in a Python block of README.md, docs and package pages."""
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    pages += (ROOT / "megatron_ext").glob("**/README.md")
    blocks = (
        block for page in pages for block in _PYTHON_BLOCK.findall(page.read_text(encoding="utf-8"))
    )
    return {name for block in blocks for name in _imports(block)}


def imports_of_examples():
    """``module:name`` of every import in a program under ``examples/``."""
    programs = (ROOT / "examples").glob("**/*.py")
    return {name for path in programs for name in _imports(path.read_text(encoding="utf-8"))}


def is_importable(address):
    """Whether ``module``, ``module:name`` or ``module:name.attribute`` is there."""
    module, _, path = address.partition(":")
    try:
        found = import_module(module)
        for name in path.split(".") if path else ():
            found = _member(found, name)
    except (ImportError, AttributeError):
        return False
    return True


def _member(owner, name):
    # A field without a default is no attribute of its class.
    if name in getattr(owner, "__dataclass_fields__", ()):
        return None
    try:
        return getattr(owner, name)
    except AttributeError:
        # ``from package import module``
        return import_module(f"{getattr(owner, '__name__', '')}.{name}")


def _imports(program):
    for node in ast.walk(ast.parse(program)):
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
            yield from (name for name in modules if name.split(".")[0] == "megatron_ext")
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("megatron_ext"):
            yield from (f"{node.module}:{alias.name}" for alias in node.names)
