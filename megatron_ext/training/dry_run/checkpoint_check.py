"""Whether a checkpoint is of the model that the configuration describes, without loading it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, Final

from megatron_ext.errors import CheckpointError
from megatron_ext.training.config import ModelConfig
from megatron_ext.training.huggingface.model_check import check_if_huggingface

_COMMON_FILE: Final = "common.pt"
_SHAPES: Final = (
    "num_layers",
    "hidden_size",
    "num_attention_heads",
    "num_query_groups",
    "ffn_hidden_size",
    "position_embedding_type",
    "normalization",
    "layernorm_zero_centered_gamma",
    "qk_layernorm",
    "add_qkv_bias",
    "swiglu",
    "gate_activation",
    "scale_embeddings",
    "post_layernorms",
    "untie_embeddings_and_output_weights",
)
"""Keys of a model without which its weights do not fit."""


def check_checkpoint(checkpoint: Path, model: ModelConfig, *, fingerprint: str, where: str) -> bool:
    """Compare what a checkpoint says of its run with a model and its tokenizer.

    Args:
        checkpoint: One iteration's folder.
        fingerprint: Of the configured tokenizer.
        where: The model's section of the configuration, for errors.

    Returns:
        Whether it says anything that could be compared.

    Raises:
        CheckpointError: It is of another model, or of another tokenizer.
    """
    if check_if_huggingface(checkpoint, model):
        return True
    run = _run_record(checkpoint)
    trained_on = run.get("tokenizer_fingerprint")
    if trained_on not in (None, fingerprint):
        raise CheckpointError(
            "the model was trained with another tokenizer",
            where=checkpoint,
            got=f"vocabulary {trained_on[:12]}",
            expected=f"{fingerprint[:12]}, the configured tokenizer",
            fix="configure the tokenizer of the checkpoint",
        )
    trained = run.get("config", {}).get("student", {})
    for name in _SHAPES:
        if name in trained and trained[name] != getattr(model, name):
            raise CheckpointError(
                f"the checkpoint is of a model with another {name}",
                where=f"{where}.{name}",
                got=getattr(model, name),
                expected=f"{trained[name]}, as {checkpoint} was trained with",
                fix="configure the model of the checkpoint",
            )
    return bool(trained)


def _run_record(checkpoint: Path) -> Mapping[str, Any]:
    """What a run of this project saved beside the weights; nothing of others."""
    import torch

    try:
        # Plain values alone: nothing that a checkpoint holds is run.
        common = torch.load(checkpoint / _COMMON_FILE, weights_only=True, map_location="cpu")
    except FileNotFoundError as error:
        raise CheckpointError(
            "the checkpoint cannot be read",
            where=checkpoint,
            got=f"no {_COMMON_FILE}",
            fix="copy it again: a file of it is missing",
        ) from error
    except (UnpicklingError, EOFError, RuntimeError):
        return {}
    run = common.get("run") if isinstance(common, dict) else None
    return run if isinstance(run, Mapping) else {}
