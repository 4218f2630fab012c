"""The folder of a run: its files, its configuration, and checks that a resumed run is the same."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml

from megatron_ext.data.reading_order import read_blend
from megatron_ext.errors import ConfigError, refused_input
from megatron_ext.files import (
    disown,
    is_owned,
    own,
    parse_json,
    read_json,
    whole_lines,
    why_not_writable,
    write_bytes,
    write_text,
)
from megatron_ext.huggingface.checkpoint_files import is_checkpoint_folder
from megatron_ext.training.checkpoints.folder import CHECKPOINTS as CHECKPOINTS
from megatron_ext.training.checkpoints.folder import find_checkpoint, latest_checkpoint
from megatron_ext.training.configuration.config import TEACHER, DistillConfig, ModelConfig
from megatron_ext.training.configuration.yaml_file import read_config_file

CONFIG_FILE = "config.yaml"
DATA_FILE = "data.json"
METRICS_FILE = "metrics.jsonl"
QUARANTINE_FILE = "quarantine.jsonl"
ROLLOUTS_FILE = "rollouts.jsonl"
PROJECTION_FILE = "projection.safetensors"
LEARNED_PROJECTION_FILE = "learned_projection.safetensors"
TOKENIZER_FOLDER = "tokenizer"
LOCK_FILE = "run.lock"

_TEACHER_FOLDERS = ("teacher.checkpoint", "teacher.cache")

_OF_ENGINES = (
    "url",
    "model",
    "key_variable",
    "root_certificate",
    "plain_connection",
    "timeout_s",
    "retries",
    "concurrency",
)
"""Keys of an engine that change nothing of what it answers."""

_MAY_CHANGE = (
    "run_dir",
    "student.hf",
    "teacher.model.hf",
    # Paths may change: their contents are compared instead, by fingerprint and by hash.
    "tokenizer.model",
    "teacher.tokenizer.model",
    "teacher.projection",
    # The place of a teacher changes its targets by rounding alone; the form of the targets counts.
    "teacher.library",
    "teacher.offload",
    "teacher.placement",
    "teacher.serving.ranks",
    "teacher.serving.tensor_model_parallel_size",
    "teacher.serving.pipeline_model_parallel_size",
    "teacher.serving.prefetch",
    "teacher.serving.address",
    "teacher.serving.root_certificate",
    "teacher.serving.token_file",
    "teacher.serving.plain_connection",
    *(f"teacher.engine.{key}" for key in _OF_ENGINES),
    *(f"data.rollouts.engine.{key}" for key in _OF_ENGINES),
    "data.rollouts.ahead",
    "data.validation",
    "data.num_workers",
    "data.indexed_tokenizer",
    "data.index_cache",
    "data.alignment_cache",
    "data.bad_documents",
    "data.max_record_mib",
    "initial_checkpoint",
    "allow_other_tokenizer",
    "teacher.allow_other_tokenizer",
    "projection",
    "loss.linear",
    "parallel.tensor_model_parallel_size",
    "parallel.pipeline_model_parallel_size",
    "parallel.virtual_pipeline_model_parallel_size",
    "parallel.context_parallel_size",
    "parallel.expert_model_parallel_size",
    "parallel.expert_tensor_parallel_size",
    "parallel.sequence_parallel",
    "parallel.overlap_grad_reduce",
    "parallel.overlap_param_gather",
    "parallel.distributed_timeout_minutes",
    "training.train_iters",
    "training.micro_batch_size",
    "training.variable_seq_lengths",
    "training.seq_length_multiple",
    "training.require_gpu",
    "training.recompute_granularity",
    "training.recompute_method",
    "training.recompute_num_layers",
    # Checkpoints are in the order of ids under any layout.
    "training.vocabulary_layout",
    "training.eval_interval",
    "training.save_interval",
    "training.keep_checkpoints",
    "training.tensorboard_dir",
    "training.wandb_project",
    "training.async_save",
    "training.verify_checkpoints",
    "training.nan_policy",
    "training.max_consecutive_skips",
    "evaluation",
)


def projection_file(teacher: str, *, is_learned: bool = False) -> str:
    """File name of a projection to a teacher's vocabulary that the run builds, or has learned."""
    name = LEARNED_PROJECTION_FILE if is_learned else PROJECTION_FILE
    return name if teacher == TEACHER else name.replace(".", f"-{teacher}.")


def check_run_folder(config: DistillConfig) -> None:
    """Check that ``config`` continues the run that is in its folder; nothing is written.

    Layout, intervals and the number of iterations may change between starts; anything that changes
    the experiment may not. A folder without a checkpoint takes any configuration, so that a failed
    start does not block the next.

    Raises:
        ConfigError: The folder cannot be used, or holds a run with another configuration.
        CheckpointError: The run's latest checkpoint is missing.
    """
    folder = Path(config.run_dir)
    _check_writable(folder)
    if is_checkpoint_folder(folder):
        raise ConfigError(
            "the run folder is the folder of a model",
            where="run_dir",
            got=f"{folder}, which has a config.json",
            expected="a new folder, or one of an earlier start of this run",
            fix="change run_dir",
        )
    stored = folder / CONFIG_FILE
    if latest_checkpoint(folder / CHECKPOINTS) is not None and stored.exists():
        _check_same_run(read_config_file(stored)[0], _record(config), stored)


def own_run_folder(folder: Path) -> None:
    """Become the one process that writes to a run's folder; the main rank calls it first.

    Raises:
        ConfigError: Another process runs there, or the folder cannot be written to.
    """
    try:
        owner = own(folder / LOCK_FILE, owner=f"process {os.getpid()} on {socket.gethostname()}")
    except OSError as error:
        raise ConfigError(
            "the run folder cannot be written to",
            where=folder,
            got=error.strerror or str(error),
            fix="make room there, change run_dir, or the permissions there",
        ) from error
    if owner is not None:
        raise ConfigError(
            "the run folder belongs to a run that has not ended",
            where=folder,
            got=owner,
            expected="a folder that no other process trains in",
            fix="wait for that run or end it, or use another run_dir",
        )


def check_still_there(folder: Path) -> None:
    """Check that the folder was not removed while the run that owns it goes on.

    Raises:
        ConfigError: It was removed, or another process has taken its place.
    """
    if not is_owned(folder / LOCK_FILE):
        raise ConfigError(
            "the run folder was removed while the run went on",
            where=folder,
            got="another folder" if folder.exists() else "no folder",
            expected=f"the {LOCK_FILE} of this run",
            fix="start the run again; what was in the folder is lost",
        )


def disown_run_folder(folder: Path) -> None:
    """Let other processes run in a folder that this process owns; an empty one is removed."""
    disown(folder / LOCK_FILE)
    with suppress(OSError):
        folder.rmdir()


def check_same_text(folder: Path, data_summary: Mapping[str, Any]) -> None:
    """Check that a resumed run in ``folder`` reads the text that it was started with.

    Raises:
        ConfigError: The training or the held-out text has changed.
    """
    stored = folder / DATA_FILE
    if latest_checkpoint(folder / CHECKPOINTS) is None or not stored.exists():
        return
    for split in ("train", "validation"):
        with refused_input(
            "what the run said of its text cannot be read", where=stored, fix="use another run_dir"
        ):
            both = data_summary, read_json(stored)
            hashes = [(summary.get(split) or {}).get("sha256") for summary in both]
        if hashes[0] != hashes[1]:
            raise ConfigError(
                f"the run was started with another text in data.{split}",
                where=stored,
                got=f"sha256 {str(hashes[0])[:12]}",
                expected=str(hashes[1])[:12],
                fix="use another run_dir, or the text the run was started with",
            )


def record_run(config: DistillConfig, data_summary: Mapping[str, Any]) -> None:
    """Write configuration and data summary; one rank calls it, after all checks and loading."""
    folder = Path(config.run_dir)
    write_text(
        folder / CONFIG_FILE,
        yaml.safe_dump(_record(config), sort_keys=False, allow_unicode=True),
    )
    write_text(folder / DATA_FILE, json.dumps(data_summary, indent=2) + "\n")


def forget_later_lines(log: Path, *, last_iteration: int) -> None:
    """Drop a log's lines of later iterations, which a resumed run repeats, and a line cut short.

    Raises:
        DataError: A line names no iteration.
    """
    lines = [line for iteration, line in _lines(log) if iteration <= last_iteration]
    _replace(log, lines)


def replace_first_lines(log: Path, lines: Sequence[str]) -> None:
    """Put a start's lines, of iteration 0, in place of those of an earlier start.

    Raises:
        DataError: A line names no iteration.
    """
    later = [line for iteration, line in _lines(log) if iteration > 0]
    _replace(log, [*(line.encode() for line in lines), *later])


def _lines(log: Path) -> Iterator[tuple[int, bytes]]:
    """The whole lines of a log, each with its iteration."""
    for number, line in enumerate(whole_lines(log), 1):
        with refused_input(
            "the line names no iteration", where=f"{log}:{number}", fix="remove the line"
        ):
            iteration = int(parse_json(line)["iteration"])
        yield iteration, line


def _replace(log: Path, lines: Sequence[bytes]) -> None:
    content = b"".join(line + b"\n" for line in lines)
    if content != (log.read_bytes() if log.exists() else b""):
        write_bytes(log, content)


def config_values(config: DistillConfig) -> dict[str, Any]:
    """The configuration as plain nested values."""
    values: dict[str, Any] = _plain(dataclasses.asdict(config))
    return values


def _record(config: DistillConfig) -> dict[str, Any]:
    """The configuration, with each teacher's path replaced by the checkpoint it stands for now."""
    values = config_values(config)
    if config.distils:
        for name, teacher in config.named_teachers.items():
            if teacher.ema_decay is not None:
                continue
            section = values["teacher"] if config.teacher else values["teachers"][name]
            where = f"{config.section_of(name)}.checkpoint"
            section["checkpoint"] = str(find_checkpoint(teacher.checkpoint, where=where))
    return values


def _check_writable(folder: Path) -> None:
    reason = why_not_writable(folder)
    if reason is not None:
        raise ConfigError(
            "the run folder cannot be written to",
            where="run_dir",
            got=f"{folder}; {reason}",
            fix="change run_dir, or the permissions there",
        )


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _plain(inner) for key, inner in value.items()}
    return list(value) if isinstance(value, tuple) else value


def _check_same_run(stored: Mapping[str, Any], values: Mapping[str, Any], path: Path) -> None:
    if (began := _teachers(stored)) != (named := _teachers(values)):
        raise ConfigError(
            "a run keeps the teachers that it began with",
            where=path,
            got=", ".join(named) or "no teacher",
            expected=", ".join(began) or "no teacher",
            fix="use another run_dir, whose initial_checkpoint may be this run, or the "
            "configuration the run was started with",
        )
    before, now = dict(config_leaves(stored)), dict(config_leaves(values))
    for leaves in (before, now):
        for key, value in leaves.items():
            # Teachers and caches may move, but a teacher's iteration may not change.
            if _of_any_teacher(key) in _TEACHER_FOLDERS and isinstance(value, str):
                leaves[key] = Path(value).name
            # Texts are compared by their hash, and what is left of a blend are its weights.
            if key == "data.train":
                leaves[key] = [source.weight for source in read_blend(value, where=key)]
    # What transformers runs is as its folder says, and has no keys but that of its rows.
    whole = tuple(
        f"{key.removesuffix('library')}model."
        for key, value in [*before.items(), *now.items()]
        if _of_any_teacher(key) == "teacher.library" and value == "huggingface"
    )
    for key in sorted(before.keys() | now.keys()):
        may_change = _of_any_teacher(key).startswith(_MAY_CHANGE)
        may_change |= key.startswith(whole) and not key.endswith(".seq_length")
        # Runs of versions before remote teachers, or before a part of a model, have no such keys.
        is_newer = _of_any_teacher(key).startswith("teacher.serving.")
        is_newer |= _is_default_of_model(key, now.get(key))
        may_change |= is_newer and key not in before
        if may_change or before.get(key) == now.get(key):
            continue
        raise ConfigError(
            f"the run folder holds a run with another {key}",
            where=path,
            got=repr(now.get(key)),
            expected=repr(before.get(key)),
            fix="use another run_dir, or the configuration the run was started with",
        )


_DEFAULTS = {field.name: field.default for field in dataclasses.fields(ModelConfig)}


def _is_default_of_model(key: str, value: object) -> bool:
    """Whether a model has this value of a key where nothing is said."""
    section, _, name = _of_any_teacher(key).rpartition(".")
    return section in ("student", "teacher.model") and _DEFAULTS.get(name, ...) == value


def _teachers(values: Mapping[str, Any]) -> list[str]:
    """Keys of the sections of teachers."""
    several = values.get("teachers")
    keys = [f"teachers.{name}" for name in several] if isinstance(several, Mapping) else []
    return sorted([*keys, *(["teacher"] if values.get("teacher") else [])])


def _of_any_teacher(key: str) -> str:
    """A key of one of several teachers, written as that of a ``teacher`` section."""
    return re.sub(r"^teachers\.[^.]+\.", "teacher.", key)


def config_leaves(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Leaves of nested values as pairs of ``section.key`` and value."""
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from config_leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
