"""Identity of a teacher: everything that its targets depend on, as hashes.

Caches and servers have identities with keys of their own, since a cache also depends on the texts
and its keys are in files. Both contain the hash of the weights.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch.distributed as dist

from megatron_ext.errors import CheckpointError, ConfigError
from megatron_ext.huggingface.checkpoint_files import (
    CONFIG_FILE,
    CheckpointFiles,
    is_checkpoint_folder,
)
from megatron_ext.tokenizers import MegatronTokenizerText
from megatron_ext.tokenizers.identity import tokenizer_identity
from megatron_ext.training.configuration.config import DistillConfig, TeacherConfig
from megatron_ext.training.configuration.model import OF_EXPERTS, OF_HYBRID
from megatron_ext.training.run_plan import TeacherPlan

if TYPE_CHECKING:
    from megatron_ext.training.inputs import Inputs

WEIGHTS: Final = "teacher weights"
"""Key of the hash of the weights, which takes reading a checkpoint."""

_WITHOUT_INFLUENCE: Final = (
    *("hf", "seq_length", "make_vocab_size_divisible_by", "init_method_std"),
    *("moe_aux_loss_coeff", "moe_z_loss_coeff"),
)
"""Keys of a model that do not change its predictions for sequences that it can read."""

_BLOCK_BYTES: Final = 1 << 20


def cache_identity(config: DistillConfig, inputs: Inputs, teacher: str) -> dict[str, Any]:
    """The identity of a cache, without the hash of the weights: model, tokenizers, cuts and texts.

    Texts are cut where all models of a run can be cut, to the shortest rows, so the windows depend
    on the other tokenizers and on the lengths too; they do not depend on how rows are filled.
    """
    data = inputs.data
    others = {name: inputs.teachers[name].tokenizer for name in inputs.teachers if name != teacher}
    cut_by = [inputs.tokenizer, *others.values()]
    return {
        "teacher model": _model(config.named_teachers[teacher]),
        "training.precision": config.training.precision,
        "teacher tokenizer": _tokenizer(inputs.teachers[teacher].tokenizer),
        "other tokenizers": sorted(_tokenizer(tokenizer) for tokenizer in cut_by),
        "lengths": sorted(
            {
                config.student.seq_length,
                *(t.model.seq_length for t in config.named_teachers.values()),
            }
        ),
        "data.append_eod": config.data.append_eod,
        "data.conversations": config.data.conversations,
        "data": sorted({source.dataset.documents.sha256 for source in data.sources}),
    }


def launch_identity(teacher: TeacherPlan, tokenizer: MegatronTokenizerText) -> dict[str, str | int]:
    """The identity of a remote teacher in the run's own launch, with its checkpoint's name.

    All processes of a launch have one configuration, but the latest checkpoint that it names may
    change between the reads of two processes.
    """
    return {**_served(teacher, tokenizer), "checkpoint": teacher.checkpoint.name}


def server_identity(
    teacher: TeacherPlan, tokenizer: MegatronTokenizerText, weights: str
) -> dict[str, str | int]:
    """The identity of a remote teacher that was started apart from the run.

    Args:
        weights: The hash of all weights.
    """
    return {**_served(teacher, tokenizer), WEIGHTS: weights}


def check_same_identity(identity: Mapping[str, str | int]) -> None:
    """Check that all ranks of a teacher have the same identity. One all-gather of objects.

    Raises:
        ConfigError: They differ; on every rank.
    """
    identities: list[Mapping[str, str | int]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(identities, identity)
    for rank, other in enumerate(identities):
        for key, value in identities[0].items():
            if other[key] != value:
                raise ConfigError(
                    f"rank {rank} of the teacher was started with another {key} than rank 0",
                    got=other[key],
                    expected=value,
                    fix="start every rank with the same configuration, files and installation",
                )


def weights_identity(checkpoint: Path) -> str:
    """The hash of all files of a checkpoint and their names; reads them once.

    Of a HuggingFace folder, only the files with weights and the configuration count.

    Raises:
        CheckpointError: A file cannot be read.
    """
    files = _files(checkpoint)
    try:
        with ThreadPoolExecutor() as pool:
            hashes = list(pool.map(hash_of_file, files))
    except OSError as error:
        raise CheckpointError(
            "the teacher's checkpoint cannot be read", where=checkpoint, got=str(error)
        ) from error
    names = [path.relative_to(checkpoint).as_posix() for path in files]
    return _hash(dict(zip(names, hashes, strict=True)))


def hash_of_file(path: Path) -> str:
    """SHA-256 of a file.

    Raises:
        OSError: It cannot be read.
    """
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(_BLOCK_BYTES):
            digest.update(block)
    return digest.hexdigest()


def _served(teacher: TeacherPlan, tokenizer: MegatronTokenizerText) -> dict[str, str | int]:
    return {
        "model": _model(teacher.config),
        "tokenizer": _tokenizer(tokenizer),
        "precision": teacher.training.precision,
    }


def _model(teacher: TeacherConfig) -> str:
    values = dataclasses.asdict(teacher.model)
    values = {key: value for key, value in values.items() if key not in _WITHOUT_INFLUENCE}
    # As caches and servers were named before there were experts, and linear attention.
    if teacher.model.num_experts is None:
        values = {key: value for key, value in values.items() if key not in OF_EXPERTS}
    if not any(values[key] for key in OF_HYBRID):
        values = {key: value for key, value in values.items() if key not in OF_HYBRID}
    if teacher.weight_precision is not None:
        values["weight_precision"] = teacher.weight_precision
    return _hash(values)


def _tokenizer(tokenizer: MegatronTokenizerText) -> str:
    return _hash(tokenizer_identity(tokenizer))


def _files(checkpoint: Path) -> list[Path]:
    if not is_checkpoint_folder(checkpoint):
        return sorted(path for path in checkpoint.rglob("*") if path.is_file())
    return sorted({checkpoint / CONFIG_FILE, *CheckpointFiles(checkpoint).weight_files})


def _hash(values: Mapping[str, Any]) -> str:
    content = json.dumps(values, sort_keys=True, default=str)
    return hashlib.sha256(content.encode()).hexdigest()
