"""A check that all ranks start the same run: configuration, code, text and checkpoint."""

from __future__ import annotations

import hashlib
import json
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

import megatron_ext
from megatron_ext.errors import ConfigError
from megatron_ext.projection import SparseProjection
from megatron_ext.projection.projection_matrix import ARRAYS
from megatron_ext.tokenizers import MegatronTokenizerText
from megatron_ext.tokenizers.identity import tokenizer_identity
from megatron_ext.training.checkpoints.folder import latest_checkpoint
from megatron_ext.training.configuration.config import DistillConfig
from megatron_ext.training.inputs import Inputs
from megatron_ext.training.run_folder import CHECKPOINTS, config_leaves, config_values

_MAY_DIFFER = ("data.index_cache", "data.alignment_cache")
"""Folders that may be a node's own."""


def check_same_start(config: DistillConfig, inputs: Inputs) -> None:
    """Check, on the default group, that all ranks start the same run.

    Ranks that differ would wait for one another in different collectives, or silently train on
    different things.

    Collectives: one all-gather of objects; a second one where ranks differ.

    Raises:
        ConfigError: On every rank, with the keys in which the first rank that differs from rank 0
            does.
    """
    start = start_of(config, inputs)
    digests: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(digests, hashlib.sha256(json.dumps(start).encode()).hexdigest())
    if len(set(digests)) == 1:
        return
    starts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(starts, start)
    rank = next(rank for rank, digest in enumerate(digests) if digest != digests[0])
    first, other = starts[0], starts[rank]
    keys = [key for key in {**first, **other} if first.get(key) != other.get(key)]
    raise ConfigError(
        f"rank {rank} was started otherwise than rank 0: {', '.join(keys)}",
        where=keys[0],
        got=f"{other.get(keys[0])} on rank {rank}",
        expected=first.get(keys[0]),
        fix="start every rank with the same configuration, files and installation",
    )


def start_of(config: DistillConfig, inputs: Inputs) -> dict[str, str]:
    """Everything that must be the same on every rank, as text by key."""
    latest = latest_checkpoint(Path(config.run_dir) / CHECKPOINTS)
    start = {
        key: repr(value)
        for key, value in config_leaves(config_values(config))
        if key not in _MAY_DIFFER
    }
    for split, summary in inputs.data.summary().items():
        start[f"text of data.{split}"] = str((summary or {}).get("sha256"))
    start |= _tokenizer("tokenizer", inputs.tokenizer)
    for name, teacher in inputs.teachers.items():
        section = config.section_of(name)
        start |= _tokenizer(f"{section}.tokenizer", teacher.tokenizer)
        if teacher.projection is not None:
            start[f"content of {section}.projection"] = _projection_digest(teacher.projection)
    return start | {
        "latest checkpoint": latest.name if latest else "none",
        "version of torch": torch.__version__,
        "version of megatron-core": version("megatron-core"),
        "version of megatron-ext": f"{megatron_ext.__version__} (sources {_source_digest()})",
    }


def _tokenizer(section: str, tokenizer: MegatronTokenizerText) -> dict[str, str]:
    """Hashes of a tokenizer's content: one path may hold different files on different nodes."""
    identity = json.dumps(tokenizer_identity(tokenizer), sort_keys=True)
    return {
        f"vocabulary of {section}": tokenizer.fingerprint(),
        f"content of {section}": hashlib.sha256(identity.encode()).hexdigest(),
    }


def _projection_digest(projection: SparseProjection) -> str:
    digest = hashlib.sha256()
    for name in ARRAYS:
        digest.update(np.ascontiguousarray(getattr(projection, name)).tobytes())
    return digest.hexdigest()


@cache
def _source_digest() -> str:
    """Hash of this package's source files: installations of one version may differ."""
    root = Path(str(megatron_ext.__file__)).parent
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        digest.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:12]
