"""The folder of one run: its configuration, and whether a resumed run is still the same run."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from megatron_ext.atomic_file import write_text
from megatron_ext.errors import ConfigError
from megatron_ext.training.config import DistillConfig

CONFIG_FILE = "config.yaml"
CHECKPOINTS = "checkpoints"
DATA_FILE = "data.json"
PROJECTION_FILE = "projection.safetensors"

_MAY_CHANGE = (
    "run_dir",
    "initial_checkpoint",
    "projection",
    "parallel",
    "teacher.checkpoint",
    "training.train_iters",
    "training.micro_batch_size",
    "training.eval_interval",
    "training.save_interval",
    "training.keep_checkpoints",
)


def open_run_folder(config: DistillConfig) -> None:
    """Make the run's folder, or check that what is there is the same run; one rank calls it.

    Layout, checkpoint intervals and the number of iterations may change between starts; anything
    that would make another experiment of it may not.

    Raises:
        ConfigError: The folder holds a run with another configuration.
    """
    stored = Path(config.run_dir) / CONFIG_FILE
    values = config_values(config)
    if stored.exists():
        _check_same_run(yaml.safe_load(stored.read_text(encoding="utf-8")), values, stored)
    write_text(stored, yaml.safe_dump(values, sort_keys=False, allow_unicode=True))


def config_values(config: DistillConfig) -> dict[str, Any]:
    """The configuration as plain nested values."""
    values: dict[str, Any] = _plain(dataclasses.asdict(config))
    return values


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _plain(inner) for key, inner in value.items()}
    return list(value) if isinstance(value, tuple) else value


def _check_same_run(stored: Mapping[str, Any], values: Mapping[str, Any], path: Path) -> None:
    before, now = dict(_leaves(stored)), dict(_leaves(values))
    for key in sorted(before.keys() | now.keys()):
        if key.startswith(_MAY_CHANGE) or before.get(key) == now.get(key):
            continue
        raise ConfigError(
            f"the run folder holds a run with another {key}",
            where=path,
            got=repr(now.get(key)),
            expected=repr(before.get(key)),
            fix="use another run_dir, or the configuration the run was started with",
        )


def _leaves(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
