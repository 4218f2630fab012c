"""Weights of a HuggingFace checkpoint into a model under any layout."""

from __future__ import annotations

from pathlib import Path

import torch
from megatron.core.models.gpt import GPTModel

from megatron_ext.huggingface.checkpoint_files import CheckpointFiles
from megatron_ext.huggingface.tensor_map import TensorMap
from megatron_ext.huggingface.tensor_reader import TensorReader
from megatron_ext.training.config import ModelConfig
from megatron_ext.training.huggingface.model_check import checked
from megatron_ext.training.huggingface.regions import corner_of, sharded_tensors, tensor_of
from megatron_ext.training.model_chunks import ModelChunks


def load_huggingface(folder: Path, chunks: ModelChunks, model: ModelConfig) -> None:
    """Fill this rank's part of a model; no collectives.

    Of every file the rows and columns that this rank has are read, and no others. What is on the
    host at a time is one tensor's share of a rank. Rows of a vocabulary beyond the checkpoint's are
    zero.

    Args:
        folder: The checkpoint.
        chunks: Under any layout, in any precision, to which weights are converted.
        model: What the chunks were built from.

    Raises:
        CheckpointError: It is of another model, or not whole.
    """
    files = CheckpointFiles(folder)
    _, tensors = checked(files, model)
    with TensorReader(files) as reader:
        for chunk in chunks:
            _fill(chunk, tensors, reader)


@torch.no_grad()
def _fill(chunk: GPTModel, tensors: TensorMap, reader: TensorReader) -> None:
    for shard in sharded_tensors(chunk.sharded_state_dict()):
        row, column = corner_of(shard)
        assert shard.data is not None, "a model's own weights"
        reader.fill(shard.data, tensor_of(shard, tensors), row=row, column=column)
