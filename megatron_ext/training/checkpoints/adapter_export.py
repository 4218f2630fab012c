"""Export of a checkpoint's adapters as a folder that peft loads beside the model they started from.

``linear_qkv`` and ``linear_fc1`` are several layers of HuggingFace models: each gets the whole of A
and its rows of B, which is exact.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import torch

from megatron_ext.errors import CheckpointError
from megatron_ext.huggingface.checkpoint_files import is_checkpoint_folder
from megatron_ext.huggingface.model_settings import tensor_map
from megatron_ext.huggingface.tensor_files import (
    check_target,
    save_tensors,
    write_folder,
    write_json,
)
from megatron_ext.huggingface.tensor_map import MegatronTensor
from megatron_ext.training.checkpoints.checkpoint import checkpoint_config, checkpoint_model
from megatron_ext.training.checkpoints.folder import find_checkpoint
from megatron_ext.training.checkpoints.huggingface_export import family_config
from megatron_ext.training.checkpoints.model_check import full_settings
from megatron_ext.training.checkpoints.slices import CheckpointSlices
from megatron_ext.training.configuration.lora import DENSE_LAYERS, LoraConfig

CONFIG_FILE: Final = "adapter_config.json"
WEIGHTS_FILE: Final = "adapter_model.safetensors"
_PREFIX: Final = "base_model.model."
_SHARED: Final = "shared_expert"
"""Parent of layers whose names single experts of transformers 4 have, too."""

_MERGED: Final = "export the merged model, without --adapter"


def export_adapter(
    source: Path, output: Path, *, dtype: torch.dtype | None = None, verify: bool = True
) -> None:
    """Write the adapters of a run or a checkpoint, of any layout.

    Args:
        source: A run's folder, its ``checkpoints``, or one checkpoint.
        output: New or empty folder; it appears when it is complete.
        dtype: Dtype of the tensors; None for that of the checkpoint.
        verify: Check every file against the checkpoint's manifest.

    Raises:
        CheckpointError: The checkpoint cannot be read, has no adapters, or more than these has
            learnt; or the output cannot be written.
    """
    check_target(output)
    checkpoint = find_checkpoint(str(source), where="the model")
    slices = CheckpointSlices(checkpoint, verify=verify)
    run = checkpoint_config(checkpoint, verify=verify)
    if slices.lora is None:
        raise CheckpointError("the checkpoint has no adapters", where=checkpoint, fix=_MERGED)
    of_experts = [name for name in slices.lora.targets if name.startswith("experts.")]
    if of_experts:
        raise CheckpointError(
            "peft has adapters beside layers, and transformers has the experts of a layer in one "
            "tensor",
            where=checkpoint,
            got=f"lora.targets {', '.join(of_experts)}",
            expected=f"some of {', '.join(DENSE_LAYERS)}",
            fix=_MERGED,
        )
    parts = (run.get("training") or {}).get("trainable")
    if parts:
        raise CheckpointError(
            "the adapters are not all that has learnt",
            where=checkpoint,
            got=f"training.trainable {', '.join(parts)}",
            fix=_MERGED,
        )
    model = checkpoint_model(checkpoint, verify=verify)
    # No tensor of the vocabulary is read, so that its size does not matter.
    settings = full_settings(model) | {"vocab_size": 1}
    _, family = family_config(checkpoint, model, settings)
    tensors: dict[str, torch.Tensor] = {}
    for tensor in tensor_map(family, settings).megatron_tensors():
        tensors |= _of(tensor, slices, dtype)

    def write(folder: Path) -> None:
        save_tensors(tensors, folder / WEIGHTS_FILE)
        write_json(folder / CONFIG_FILE, _config(slices.lora, tensors, run))

    write_folder(output, write)


def _of(
    tensor: MegatronTensor, slices: CheckpointSlices, dtype: torch.dtype | None
) -> dict[str, torch.Tensor]:
    """peft's tensors of one layer's adapter; none where it has none."""
    adapter = slices.adapter(tensor.key, tensor.place)
    if adapter is None:
        return {}
    a, b = (matrix.to(dtype or matrix.dtype) for matrix in adapter)
    named = {}
    for name in dict.fromkeys(block.name for block in tensor.blocks):
        stem = _PREFIX + name.removesuffix(".weight")
        # By their place in HuggingFace's tensor, which may have them in another order.
        blocks = [*tensor.rows_of(name)]
        whole = b.new_empty(max(block.stop for block, _ in blocks), b.shape[1])
        for block, row in blocks:
            block.of(whole).copy_(b[row : row + block.rows])
        named[f"{stem}.lora_A.weight"] = a.clone()
        named[f"{stem}.lora_B.weight"] = whole
    return named


def _config(lora: LoraConfig | None, tensors: dict[str, torch.Tensor], run: Any) -> dict[str, Any]:
    assert lora is not None
    start = run.get("initial_checkpoint")
    is_folder = start is not None and is_checkpoint_folder(Path(start))
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": start if is_folder else None,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "target_modules": sorted(set(map(_module, tensors))),
    }


def _module(name: str) -> str:
    """The end of a layer's name that peft finds it by, which no layer without an adapter has."""
    *_, parent, layer, _, _ = name.split(".")
    return f"{parent}.{layer}" if parent == _SHARED else layer
