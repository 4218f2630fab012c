"""The YAML file of a configuration, and models in it that are taken from HuggingFace folders."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import yaml

from megatron_ext.errors import CheckpointError, ConfigError
from megatron_ext.files import from_home
from megatron_ext.huggingface.checkpoint_files import (
    CONFIG_FILE,
    SIDE_FOLDER,
    CheckpointFiles,
    has_tokenizer,
    kept_folder,
)
from megatron_ext.huggingface.hub import hub_model
from megatron_ext.huggingface.model_settings import any_model_settings, model_settings
from megatron_ext.registry import with_near_path
from megatron_ext.tokenizers import TOKENIZER_LIBRARIES
from megatron_ext.training.checkpoints.folder import find_checkpoint, newest_checkpoint
from megatron_ext.typed_mapping import Where

_MOST_VALUES: Final = 1_000_000
"""Values of a file, with aliases written out: a few lines can stand for any number."""

_SHAPE: Final = "num_layers"
"""A required setting of a model; where it is given, the model is taken to be given whole."""


def with_huggingface_models(values: Mapping[str, Any], where: Where = ".".join) -> dict[str, Any]:
    """The values of a ``DistillConfig``, completed with models and tokenizers of their folders.

    A model is taken from the folder of ``hf`` or of its weights: a HuggingFace folder, or a
    checkpoint of ours that came from one. Given values stay, and so do values of a wrong type, for
    later checks. For a teacher that transformers runs, only sizes are taken. An average of the
    student has the student's model and tokenizer.

    Args:
        where: Names the place of a key path, for errors.

    Raises:
        CheckpointError: The shape is not given, and there is no such folder or it does not say its
            model; or megatron-core is to run a model that it does not support.
    """
    filled = _with_model(values, "student", ("initial_checkpoint",), where)
    teacher = values.get("teacher")
    if isinstance(teacher, Mapping):
        filled["teacher"] = _teacher(teacher, ("teacher",), filled, where)
    teachers = values.get("teachers")
    if isinstance(teachers, Mapping):
        filled["teachers"] = {
            name: _teacher(section, ("teachers", str(name)), filled, where)
            for name, section in teachers.items()
        }
    elif isinstance(teachers, list):
        filled["teachers"] = [
            _teacher(section, ("teachers",), filled, where) for section in teachers
        ]
    return filled


def _teacher(section: Any, keys: tuple[str, ...], student: Mapping[str, Any], where: Where) -> Any:
    """A teacher's section, filled in.

    Args:
        student: The values of the run, with the student's model and tokenizer filled in.
    """
    if not isinstance(section, Mapping):
        return section
    if section.get("ema_decay") is not None:
        return _of_student(section, student)
    return _with_model(section, "model", (*keys, "checkpoint"), where)


def _of_student(section: Mapping[str, Any], student: Mapping[str, Any]) -> dict[str, Any]:
    """The section of an average of the student, with the student's model, of which keys may be
    given, and its tokenizer, of which none is taken where one is given: its template goes with it.
    """
    filled = {"checkpoint": "", **section}
    own, its = section.get("model"), student.get("student")
    own = {} if own is None else own
    if isinstance(own, Mapping) and isinstance(its, Mapping):
        filled["model"] = {**its, **own}
    if section.get("tokenizer") is None and "tokenizer" in student:
        filled["tokenizer"] = student["tokenizer"]
    return filled


def _with_model(
    section: Mapping[str, Any], key: str, checkpoint: tuple[str, ...], where: Where
) -> dict[str, Any]:
    """A section with its model, under ``key``, and its tokenizer filled in.

    Args:
        checkpoint: Key path of the folder that the model's weights come from.
    """
    model, filled = section.get(key), dict(section)
    given = {} if model is None else model
    if not isinstance(given, Mapping):
        return filled
    # A name on the hub is replaced by its folder: a run records which files it has read. A model
    # whose shape is given is none of the hub's, and may be one that is still to be trained.
    if isinstance(section.get(checkpoint[-1]), str) and _SHAPE not in given:
        filled[checkpoint[-1]] = _local(section[checkpoint[-1]], where(checkpoint))
    path, named_by = filled.get(checkpoint[-1]), checkpoint
    if given.get("hf"):
        path, named_by = given["hf"], (*checkpoint[:-1], key, "hf")
        if isinstance(path, str):
            path = _local(path, where(named_by))
            given = {**given, "hf": path}
            filled[key] = given
    folder = _folder(path)
    if folder is None:
        if isinstance(path, str) and _SHAPE not in given:
            place = where(named_by)
            checkpoint_of_ours = find_checkpoint(path, where=place)
            above = "".join(f"{name}." for name in checkpoint[:-1])
            raise CheckpointError(
                "neither the checkpoint nor the configuration says which model it is of",
                where=place,
                got=f"no {checkpoint_of_ours / SIDE_FOLDER / CONFIG_FILE}",
                expected="that file, which runs from a HuggingFace folder keep, or the keys of "
                f"{key}",
                fix=f"name what megatron-ext export-hf writes of it, or give {above}{key} and "
                f"{above}tokenizer: the sections student and tokenizer of its run's config.yaml",
            )
        return filled
    files = CheckpointFiles(folder)
    is_run_by_transformers = section.get("library") == "huggingface"
    settings = any_model_settings(files) if is_run_by_transformers else model_settings(files)
    filled[key] = {**{k: v for k, v in settings.items() if v is not None}, **given}
    tokenizer = section.get("tokenizer")
    if has_tokenizer(folder) and _is_open(tokenizer):
        filled["tokenizer"] = {**(tokenizer or {}), "model": str(folder)}
    return filled


def _local(path: str, where: str) -> str:
    """The path, or the folder of a model that it names on the hub."""
    folder = hub_model(path, where=where)
    return path if folder is None else str(folder)


def _is_open(tokenizer: object) -> bool:
    """Whether a tokenizer's section names no tokenizer, so that the model's folder decides."""
    if tokenizer is None:
        return True
    if not isinstance(tokenizer, Mapping) or "model" in tokenizer:
        return False
    library = TOKENIZER_LIBRARIES.get(tokenizer.get("library", ""))
    return library is None or library.reads_file


def _folder(path: object) -> Path | None:
    """The folder with the ``config.json`` of a model, where there is one."""
    if not isinstance(path, str):
        return None
    folder = Path(path)
    kept = kept_folder(folder)
    if kept is None and folder.is_dir():
        latest = newest_checkpoint(folder)
        kept = kept_folder(latest) if latest else None
    return kept


def read_config_file(path: str | Path) -> tuple[dict[str, Any], Where]:
    """The file's mapping, with each ``~/`` expanded, and a function from key path to ``file:line``.

    Raises:
        ConfigError: The file is missing, is not YAML, or is not a mapping.
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        size = _values_in(root, {})
        # Before it is constructed, which writes out what is merged.
        key_lines = list(_key_lines(root, ())) if size <= _MOST_VALUES else []
        values = None if root is None else yaml.SafeLoader("").construct_document(root)
    except OSError as error:
        raise ConfigError(
            "the configuration file cannot be read",
            where=path,
            got=error.strerror,
            fix=with_near_path(None, path) if isinstance(error, FileNotFoundError) else None,
        ) from error
    except RecursionError as error:
        raise ConfigError("the configuration file is nested too deeply", where=path) from error
    except (yaml.YAMLError, ValueError) as error:
        mark = getattr(error, "problem_mark", None)
        raise ConfigError(
            "the configuration file is not valid YAML",
            where=f"{path}:{mark.line + 1}" if mark else path,
            got=getattr(error, "problem", None) or error,
        ) from error
    if size > _MOST_VALUES:
        raise ConfigError(
            "the configuration file has too many values, with those that aliases repeat",
            where=path,
            expected=f"{_MOST_VALUES:,} at most",
        )
    if not isinstance(values, dict):
        raise ConfigError(
            "the configuration file is not a mapping of keys to values",
            where=path,
            got=type(values).__name__,
        )
    lines: dict[tuple[str, ...], int] = {}
    for keys, line in key_lines:
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

    return _from_home(values), where


def _from_home(value: Any) -> Any:
    """A value of a file, with the paths in it that begin with ``~/`` from the user's folder."""
    if isinstance(value, dict):
        return {key: _from_home(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_from_home(inner) for inner in value]
    return from_home(value) if isinstance(value, str) else value


def _values_in(node: Any, known: dict[int, float]) -> float:
    """Number of values of a YAML tree with all aliases written out; infinite where one holds
    itself."""
    if not isinstance(node, yaml.CollectionNode):
        return 1
    if id(node) not in known:
        known[id(node)] = math.inf
        is_list = isinstance(node, yaml.SequenceNode)
        children = node.value if is_list else [part for pair in node.value for part in pair]
        known[id(node)] = 1 + sum(_values_in(child, known) for child in children)
    return known[id(node)]


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
