"""The weights that a model starts with: of a checkpoint of ours, or of a HuggingFace folder."""

from __future__ import annotations

from pathlib import Path

from megatron_ext.huggingface.checkpoint_files import is_checkpoint_folder
from megatron_ext.training.checkpoint import load_weights
from megatron_ext.training.config import ModelConfig
from megatron_ext.training.huggingface.weights import load_huggingface
from megatron_ext.training.model_chunks import ModelChunks


def load_first_weights(checkpoint: Path, chunks: ModelChunks, model: ModelConfig) -> None:
    """Load a model's weights alone; that they are of its tokenizer was checked before.

    Args:
        checkpoint: One iteration's folder, or one of HuggingFace.
        chunks: This rank's part of the model, under any layout.
        model: What it was built from.

    Collectives: of a checkpoint of ours those of ``load_checkpoint``, of HuggingFace none.

    Raises:
        CheckpointError: Unreadable, or of another shape.
    """
    if is_checkpoint_folder(checkpoint):
        load_huggingface(checkpoint, chunks, model)
    else:
        load_weights(checkpoint, chunks)
