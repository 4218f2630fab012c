"""Export of one of our checkpoints as a HuggingFace folder, one file of tensors at a time.

It runs in one process without process groups or a model. Adapters are merged into their weights.
"""

from __future__ import annotations

from collections import Counter
from math import prod
from pathlib import Path
from typing import Any, Final

import torch

from megatron_ext.errors import CheckpointError
from megatron_ext.files import copy_files
from megatron_ext.huggingface.checkpoint_files import (
    CONFIG_FILE,
    GENERATION_FILE,
    CheckpointFiles,
    kept_folder,
    side_files,
)
from megatron_ext.huggingface.deepseek import NEXT_KEYS
from megatron_ext.huggingface.families import FAMILIES
from megatron_ext.huggingface.family import Family
from megatron_ext.huggingface.model_settings import model_config, settings_of, tensor_map
from megatron_ext.huggingface.tensor_files import TensorPlan, check_target, shards, write_checkpoint
from megatron_ext.huggingface.tensor_map import MegatronTensor, TensorMap
from megatron_ext.training.checkpoints.checkpoint import checkpoint_model
from megatron_ext.training.checkpoints.folder import find_checkpoint
from megatron_ext.training.checkpoints.model_check import check_same_model, full_settings
from megatron_ext.training.checkpoints.slices import CheckpointSlices
from megatron_ext.training.checkpoints.tokenizer import KeptTokenizer
from megatron_ext.training.configuration.config import ModelConfig

DTYPES: Final = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_NAMES: Final = {dtype: str(dtype).removeprefix("torch.") for dtype in DTYPES.values()}
_EMBEDDING: Final = "embedding.word_embeddings.weight"

MAX_SHARD_BYTES: Final = 5 * 10**9
"""Size of a file that transformers used for years, and that fits in any machine's memory."""


def export_huggingface(
    source: Path,
    output: Path,
    *,
    dtype: torch.dtype | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    verify: bool = True,
) -> None:
    """Write a folder that transformers loads, from a run or a checkpoint, of any layout.

    The process needs memory for the tensors of one file, twice.

    Args:
        source: A run's folder, its ``checkpoints``, or one checkpoint.
        output: New or empty folder; it appears when it is complete.
        dtype: Dtype of the tensors; None for that of the checkpoint.
        max_shard_bytes: Largest size of a safetensors file; a tensor is never divided.
        verify: Check every file against the checkpoint's manifest.

    Raises:
        CheckpointError: The checkpoint cannot be read, its model has no architecture of
            transformers, or the output cannot be written.
    """
    check_target(output)
    checkpoint = find_checkpoint(str(source), where="the model")
    model = checkpoint_model(checkpoint, verify=verify)
    slices = CheckpointSlices(checkpoint, verify=verify)
    tokenizer = KeptTokenizer(checkpoint)
    settings = full_settings(model) | {"vocab_size": _rows(slices, model, tokenizer)}
    config, family = family_config(checkpoint, model, settings)
    reader = _ExportedTensors(slices, tensor_map(family, settings), where=checkpoint)
    plans = reader.plans(dtype)
    numbers: Counter[torch.dtype] = Counter()
    for plan in plans:
        numbers[plan.dtype] += prod(plan.shape)
    write_checkpoint(
        output,
        # That of most: a few decays or biases of experts in fp32 are in folders in bf16.
        config=config | {"torch_dtype": _NAMES[max(numbers, key=numbers.__getitem__)]},
        files=shards(plans, max_shard_bytes=max_shard_bytes),
        read=reader.tensors,
        write_others=lambda folder: _copy_files(checkpoint, tokenizer, folder),
    )


class _ExportedTensors:
    """HuggingFace tensors made from one of our checkpoints.

    Args:
        slices: Tensors of the checkpoint.
        tensors: Map between the model's tensors in both formats.
        where: The checkpoint, for errors.
    """

    def __init__(self, slices: CheckpointSlices, tensors: TensorMap, *, where: Path) -> None:
        self._slices = slices
        self._shapes = tensors.shapes()
        self._homes: dict[str, dict[MegatronTensor, None]] = {}
        for tensor in tensors.megatron_tensors():
            for block in tensor.blocks:
                self._homes.setdefault(block.name, {})[tensor] = None
        missing = [key for key in tensors.keys_of_checkpoint if key not in slices.tensors]
        if missing:
            raise CheckpointError(
                "the checkpoint lacks tensors of its model",
                where=where,
                got=f"no {missing[0]}",
            )

    def plans(self, dtype: torch.dtype | None) -> list[TensorPlan]:
        """All tensors to be written, in order."""
        stored = self._slices.tensors
        return [
            TensorPlan(
                name=name,
                shape=shape,
                dtype=dtype or stored[next(iter(homes)).key].properties.dtype,
            )
            for name, shape in self._shapes.items()
            for homes in [self._homes[name]]
        ]

    def tensors(self, plans: list[TensorPlan]) -> dict[str, torch.Tensor]:
        """The tensors of one file."""
        homes = {home: None for plan in plans for home in self._homes[plan.name]}
        keys = list({(home.key, home.place): None for home in homes})
        loaded = dict(zip(keys, self._slices.read(keys), strict=True))
        found = {}
        for plan in plans:
            tensor = torch.empty(plan.shape, dtype=plan.dtype)
            for home in self._homes[plan.name]:
                _fill(tensor, plan.name, home, loaded[home.key, home.place])
            found[plan.name] = tensor
        return found


def _fill(tensor: torch.Tensor, name: str, home: MegatronTensor, loaded: torch.Tensor) -> None:
    """Copy the rows of a HuggingFace tensor that a megatron-core tensor contains."""
    for block, row in home.rows_of(name):
        block.of(tensor).copy_(loaded[row : row + block.rows])


def _rows(slices: CheckpointSlices, model: ModelConfig, tokenizer: KeptTokenizer) -> int:
    """Rows of the vocabulary without the padding for a layout."""
    embedding = slices.tensors.get(_EMBEDDING)
    stored = embedding.size[0] if embedding else 0
    ids = model.padded_ids(tokenizer.vocab_size or 0)
    return min(stored, ids) if ids else stored


def family_config(
    checkpoint: Path, model: ModelConfig, settings: dict[str, Any]
) -> tuple[dict[str, Any], Family]:
    """``config.json``, the original one where the model came from HuggingFace, and its family.

    Args:
        settings: Those of ``full_settings``, with the rows of the vocabulary.

    Raises:
        CheckpointError: The model has no architecture of transformers, or is not the one that the
            file beside the checkpoint describes.
    """
    kept = kept_folder(checkpoint)
    if kept is None:
        config = model_config(settings, max_position_embeddings=model.seq_length)
    else:
        config = dict(CheckpointFiles(kept).config)
    family = next(FAMILIES[name] for name in config["architectures"] if name in FAMILIES)
    where = (kept or checkpoint) / CONFIG_FILE
    check_same_model(settings_of(family, config, where=where), model, where=where)
    config.pop("dtype", None)
    # Weights are written without groups and exponents.
    config.pop("quantization_config", None)
    # These layers were left out.
    config |= {key: 0 for key in NEXT_KEYS if config.get(key)}
    return config | {"vocab_size": settings["vocab_size"]}, family


def _copy_files(checkpoint: Path, tokenizer: KeptTokenizer, folder: Path) -> None:
    """Copy generation config, tokenizer and template."""
    kept = kept_folder(checkpoint)
    beside = side_files(kept) if kept else {}
    # Files of another tokenizer than the run's are left out.
    wanted = beside.keys() if tokenizer.is_of_huggingface else {GENERATION_FILE}
    copy_files({name: beside[name] for name in beside.keys() & wanted - {CONFIG_FILE}}, folder)
    if not tokenizer.is_of_huggingface:
        for name, content in tokenizer.files().items():
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_bytes(content)
