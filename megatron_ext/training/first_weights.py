"""The weights that a model starts with: of a checkpoint of ours, or of a HuggingFace folder."""

from __future__ import annotations

from pathlib import Path

import torch.distributed as dist

from megatron_ext.huggingface.checkpoint_files import is_checkpoint_folder
from megatron_ext.tokenizers import MegatronTokenizerText
from megatron_ext.training.checkpoint import load_weights
from megatron_ext.training.config import ModelConfig
from megatron_ext.training.huggingface.model_check import warn_of_tokenizer
from megatron_ext.training.huggingface.weights import load_huggingface
from megatron_ext.training.model_chunks import ModelChunks


def load_first_weights(
    checkpoint: Path, chunks: ModelChunks, model: ModelConfig, tokenizer: MegatronTokenizerText
) -> None:
    """Load a model's weights alone.

    Args:
        checkpoint: One iteration's folder, or one of HuggingFace.
        chunks: This rank's part of the model, under any layout.
        model: What it was built from.
        tokenizer: That the run gives the model; ours say which one they were trained on.

    Collectives: of a checkpoint of ours those of ``load_checkpoint``, of HuggingFace none.

    Raises:
        CheckpointError: Unreadable, of another shape, or of another tokenizer.
    """
    if not is_checkpoint_folder(checkpoint):
        load_weights(checkpoint, chunks, fingerprint=tokenizer.fingerprint())
        return
    load_huggingface(checkpoint, chunks, model)
    if dist.get_rank() == 0:
        warn_of_tokenizer(checkpoint, tokenizer)
