"""Whether a checkpoint is of the model that the configuration describes, without loading it."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from megatron_ext.errors import CheckpointError
from megatron_ext.training.checkpoint_record import checkpoint_record
from megatron_ext.training.config import ModelConfig
from megatron_ext.training.huggingface.model_check import check_if_huggingface

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


def check_checkpoint(checkpoint: Path, model: ModelConfig, *, where: str) -> bool:
    """Compare what a checkpoint says of its run with a model.

    Args:
        checkpoint: One iteration's folder.
        where: The model's section of the configuration, for errors.

    Returns:
        Whether it says anything that could be compared.

    Raises:
        CheckpointError: It is of another model.
    """
    if check_if_huggingface(checkpoint, model):
        return True
    trained = checkpoint_record(checkpoint).get("config", {}).get("student", {})
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
