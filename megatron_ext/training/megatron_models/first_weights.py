"""The models of a run on one rank, built and loaded with the weights that they start with.

Weights come from a checkpoint of ours or from a HuggingFace folder, under any layout.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories
from megatron.core.models.gpt import GPTModel

from megatron_ext.distributed.layout import Layout
from megatron_ext.distributed.process_groups import ProcessGroups
from megatron_ext.distributed.vocab_parallel import VocabShard
from megatron_ext.huggingface.checkpoint_files import CheckpointFiles, is_checkpoint_folder
from megatron_ext.huggingface.tensor_files import TensorReader
from megatron_ext.huggingface.tensor_map import MegatronTensor, TensorMap
from megatron_ext.losses.checks import check_shards_agree
from megatron_ext.tokenizers import MegatronTokenizerText
from megatron_ext.training.checkpoints.checkpoint import checkpoint_lora, load_weights
from megatron_ext.training.checkpoints.model_check import checked
from megatron_ext.training.checkpoints.slices import CheckpointSlices, add_product
from megatron_ext.training.configuration.config import ModelConfig, side_of
from megatron_ext.training.megatron_models.models import ModelChunks, build_model_chunks, freeze
from megatron_ext.training.objective import head_rows
from megatron_ext.training.run_plan import TeacherPlan


def sharded_tensors(state: dict[str, Any]) -> Iterator[ShardedTensor]:
    """Every tensor of a chunk's sharded state, gated matrices cut into their halves.

    Args:
        state: As ``GPTModel.sharded_state_dict`` makes it; changed.
    """
    apply_factories(state)
    for value in state.values():
        for item in value if isinstance(value, (list, tuple)) else (value,):
            if isinstance(item, ShardedTensor):
                yield item


def tensor_of(shard: ShardedTensor, tensors: TensorMap) -> MegatronTensor:
    """The tensor that a shard is a rectangle of; of one layer and expert where there are many."""
    return tensors.tensor(shard.key, *shard.global_offset[: shard.prepend_axis_num])


def corner_of(shard: ShardedTensor) -> tuple[int, int]:
    """Row and column at which a shard begins in its tensor."""
    row, *column = shard.global_offset[shard.prepend_axis_num :]
    return row, column[0] if column else 0


def load_huggingface(folder: Path, chunks: ModelChunks, model: ModelConfig) -> None:
    """Fill this rank's part of a model; no collectives.

    Only the rows and columns of this rank are read, one tensor at a time. Rows of a vocabulary
    beyond the checkpoint's are zero.

    Args:
        folder: The checkpoint.
        chunks: Chunks under any layout, in any precision, to which weights are converted.
        model: The configuration that they were built from.

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


def load_first_weights(
    checkpoint: Path, chunks: ModelChunks, model: ModelConfig, *, verify: bool = True
) -> None:
    """Load a model's weights alone, adapters merged, without the checks of ``model_check`` and of
    its tokenizer.

    Args:
        checkpoint: One iteration's folder, or one of HuggingFace.
        chunks: This rank's part of the model, under any layout.
        model: The configuration that it was built from.
        verify: As in ``load_checkpoint``.

    Collectives: those of ``load_checkpoint`` for a checkpoint of ours, none for HuggingFace's.

    Raises:
        CheckpointError: Unreadable, or of another shape.
    """
    if is_checkpoint_folder(checkpoint):
        load_huggingface(checkpoint, chunks, model)
    else:
        load_weights(checkpoint, chunks, verify=verify)
        _merge_adapters(checkpoint, chunks)


@torch.no_grad()
def _merge_adapters(checkpoint: Path, chunks: ModelChunks) -> None:
    """Add what a checkpoint's adapters give to the weights beside them; no collectives."""
    if checkpoint_lora(checkpoint) is None:
        return
    slices = CheckpointSlices(checkpoint, verify=False)
    assert slices.lora is not None
    for chunk in chunks:
        for shard in sharded_tensors(chunk.sharded_state_dict()):
            adapter = slices.adapter(shard.key, shard.global_offset[: shard.prepend_axis_num])
            if adapter is None:
                continue
            (a, b), (row, column) = adapter, corner_of(shard)
            assert shard.data is not None, "a model's own weights"
            rows, columns = shard.data.shape
            a, b = a[:, column : column + columns], b[row : row + rows]
            add_product(
                shard.data,
                a.to(shard.data.device),
                b.to(shard.data.device),
                scale=slices.lora.scale,
            )


def frozen_teacher(
    teacher: TeacherPlan, tokenizer: MegatronTokenizerText, groups: ProcessGroups
) -> tuple[list[GPTModel], VocabShard]:
    """A loaded teacher, frozen, and this rank's columns of its vocabulary.

    Args:
        tokenizer: The teacher's.
    """
    model = teacher.config.model
    shard = teacher_vocab_shard(teacher, tokenizer, groups)
    chunks = build_model_chunks(
        model,
        padded_vocab_size=shard.width * teacher.parallel.tensor_model_parallel_size,
        parallel=teacher.parallel,
        training=teacher.training,
        groups=groups,
        is_loaded=True,
    )
    load_first_weights(
        teacher.checkpoint, chunks, model, verify=teacher.training.verify_checkpoints
    )
    return freeze(chunks), shard


def teacher_vocab_shard(
    teacher: TeacherPlan, tokenizer: MegatronTokenizerText, groups: ProcessGroups
) -> VocabShard:
    """This rank's columns of a teacher's vocabulary, without its model.

    Collectives: those of ``check_shards_agree``.
    """
    ids = tokenizer.vocab_size
    return _shard(side_of(teacher.name), ids, head_rows(teacher, ids), groups)


def student_vocab_shard(
    student: ModelConfig, tokenizer: MegatronTokenizerText, groups: ProcessGroups, layout: Layout
) -> VocabShard:
    """This rank's columns of the student's vocabulary.

    Collectives: those of ``check_shards_agree``.
    """
    ids, ranks = tokenizer.vocab_size, layout.tensor_model_parallel_size
    return _shard("student", ids, student.head_rows(ids, tensor_ranks=ranks), groups)


def _shard(side: str, ids: int, rows: int, groups: ProcessGroups) -> VocabShard:
    shard = groups.vocab_shard(vocab_size=ids, padded_vocab_size=rows)
    check_shards_agree(shard, side=side, device=groups.device)
    return shard
