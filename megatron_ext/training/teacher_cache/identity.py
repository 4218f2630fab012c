"""What the targets of a teacher depend on, as hashes."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

from megatron_ext.errors import CheckpointError
from megatron_ext.huggingface.checkpoint_files import (
    CONFIG_FILE,
    CheckpointFiles,
    is_checkpoint_folder,
)
from megatron_ext.tokenizers.identity import tokenizer_identity
from megatron_ext.training.config import DistillConfig
from megatron_ext.training.inputs import Inputs

WEIGHTS: Final = "teacher weights"
"""Key of the identity whose value takes reading a checkpoint."""

WITHOUT_INFLUENCE: Final = ("hf", "seq_length", "make_vocab_size_divisible_by", "init_method_std")
"""Keys of a model that change none of its predictions for tokens that fit its rows."""

_BLOCK_BYTES: Final = 1 << 20


def cache_identity(config: DistillConfig, inputs: Inputs, teacher: str) -> dict[str, Any]:
    """All but the weights: of the model, the tokenizers, how texts are cut, and the texts.

    Texts are cut where all models of a run can be cut, to the shortest rows, so the windows depend
    on the other tokenizers and on the lengths too; not on how rows are filled.
    """
    its, data = config.named_teachers[teacher], inputs.data
    model = {
        key: value
        for key, value in dataclasses.asdict(its.model).items()
        if key not in WITHOUT_INFLUENCE
    }
    others = {name: inputs.teachers[name].tokenizer for name in inputs.teachers if name != teacher}
    cut_by = [inputs.tokenizer, *others.values()]
    return {
        "teacher model": _hash(model),
        "training.precision": config.training.precision,
        "teacher tokenizer": _hash(tokenizer_identity(inputs.teachers[teacher].tokenizer)),
        "other tokenizers": sorted(_hash(tokenizer_identity(tokenizer)) for tokenizer in cut_by),
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


def weights_identity(checkpoint: Path) -> str:
    """The hash of all files of a checkpoint, by name; reads them once.

    Of a HuggingFace folder those that its weights and its configuration are in.

    Raises:
        CheckpointError: A file cannot be read.
    """
    files = _files(checkpoint)
    try:
        with ThreadPoolExecutor() as pool:
            hashes = list(pool.map(_hash_of_file, files))
    except OSError as error:
        raise CheckpointError(
            "the teacher's checkpoint cannot be read", where=checkpoint, got=str(error)
        ) from error
    names = [path.relative_to(checkpoint).as_posix() for path in files]
    return _hash(dict(zip(names, hashes, strict=True)))


def _files(checkpoint: Path) -> list[Path]:
    if not is_checkpoint_folder(checkpoint):
        return sorted(path for path in checkpoint.rglob("*") if path.is_file())
    weights = {stored.file for stored in CheckpointFiles(checkpoint).tensors.values()}
    return sorted({checkpoint / CONFIG_FILE, *weights})


def _hash_of_file(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(_BLOCK_BYTES):
            digest.update(block)
    return digest.hexdigest()


def _hash(values: Mapping[str, Any]) -> str:
    content = json.dumps(values, sort_keys=True, default=str)
    return hashlib.sha256(content.encode()).hexdigest()
