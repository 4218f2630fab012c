"""What spawned ranks run: HuggingFace checkpoints as megatron-core models under several layouts."""

from contextlib import contextmanager
from dataclasses import dataclass
from unittest.mock import patch

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region

from megatron_ext.distributed import process_groups
from megatron_ext.huggingface.checkpoint_files import CheckpointFiles
from megatron_ext.huggingface.model_settings import family_of, model_settings, tensor_map
from megatron_ext.huggingface.tensor_files import TensorReader
from megatron_ext.tokenizers.build import padded_vocab_size
from megatron_ext.training.configuration.config import ModelConfig, ParallelConfig, TrainingConfig
from megatron_ext.training.megatron_models import cpu_megatron
from megatron_ext.training.megatron_models.first_weights import load_huggingface, sharded_tensors
from megatron_ext.training.megatron_models.models import build_model_chunks, freeze
from tests.huggingface.tiny_models import VOCAB_SIZE, some_tokens, weights_of_logits


@dataclass(frozen=True)
class RankLogits:
    """What one rank has to say of one model under one layout."""

    logits: torch.Tensor | None
    """[B, T, V] on the ranks of the last stage."""

    elements_read: int
    """Of all tensors in the files."""


def logits_of(rank, folders, layouts):
    """Logits of checkpoints under each layout, and how much was read for them.

    Args:
        layouts: Sizes of each, and the names of its checkpoints.
    """
    found = {}
    for layout, (sizes, names) in layouts.items():
        parallel = ParallelConfig(**sizes)
        groups = _groups(parallel)
        for name in names:
            with _counted_reads() as counts:
                logits = _logits(folders[name], parallel, groups)
            found[name, layout] = RankLogits(logits, sum(counts))
    return found


@contextmanager
def _counted_reads():
    counts = []
    read = TensorReader.rows

    def rows(reader, *where):
        part = read(reader, *where)
        counts.append(part.numel())
        return part

    with patch.object(TensorReader, "rows", rows):
        yield counts


def _groups(parallel):
    cpu_megatron.install()
    parallel_state.destroy_model_parallel()
    return process_groups.initialize(parallel.layout)


def gradients_of(rank, folders, parallel):
    """Gradients of the sum of weighed logits, by HuggingFace names of whole tensors, on rank 0.

    Those of norms of queries and keys, and of what has a part of each sequence, are summed over
    tensor-parallel ranks, as ``finalize_model_grads`` does.
    """
    parallel = ParallelConfig(**parallel)
    groups = _groups(parallel)
    return {name: _gradients(rank, folder, parallel, groups) for name, folder in folders.items()}


def _gradients(rank, folder, parallel, groups):
    tokens = some_tokens()
    (gpt,) = _model(folder, parallel, groups)
    positions = torch.arange(tokens.shape[1]).expand_as(tokens)
    logits = gather_from_tensor_model_parallel_region(gpt(tokens, positions, None))
    (logits[..., :VOCAB_SIZE] * weights_of_logits()).sum().backward()
    with torch.no_grad():
        for name, parameter in gpt.named_parameters():
            is_of_part = getattr(parameter, "sequence_parallel", False)
            if is_of_part or "q_layernorm" in name or "k_layernorm" in name:
                dist.all_reduce(parameter.grad)
            parameter.copy_(parameter.grad)
    shards = [
        (shard.key, shard.global_offset, shard.prepend_axis_num, shard.data)
        for shard in sharded_tensors(gpt.sharded_state_dict())
    ]
    everywhere = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, shards)
    if rank > 0:
        return None
    files = CheckpointFiles(folder)
    tensors = tensor_map(family_of(files), model_settings(files))
    found = {name: torch.full(shape, torch.nan) for name, shape in tensors.shapes().items()}
    for key, offset, axes, data in (shard for shards in everywhere for shard in shards):
        tensor, (row, *column) = tensors.tensor(key, *offset[:axes]), offset[axes:]
        first = -row
        for block in tensor.blocks:
            _copy(block.of(found[block.name]), data, first, *column)
            first += block.rows
    return found


def _copy(block, shard, first, column=0, *_):
    """What a shard has of a block that begins in its row ``first``, into the block."""
    start, stop = max(first, 0), min(first + len(block), len(shard))
    if start < stop:
        rows = slice(start - first, stop - first)
        part = block[rows] if shard.ndim == 1 else block[rows, column : column + shard.shape[1]]
        part.copy_(shard[start:stop])


def _logits(folder, parallel, groups):
    tokens = some_tokens()
    chunks = _model(folder, parallel, groups)
    # Experts under tensor parallelism alone are not trained.
    freeze(chunks)

    def forward(batches, chunk):
        del batches
        positions = torch.arange(tokens.shape[1]).expand_as(tokens)
        return chunk(tokens, positions, None), lambda output, non_loss_data: output

    with torch.no_grad():
        outputs = get_forward_backward_func()(
            forward_step_func=forward,
            data_iterator=[iter(()) for _ in chunks],
            model=chunks,
            num_microbatches=dist.get_world_size(groups.pp),
            seq_length=tokens.shape[1],
            micro_batch_size=len(tokens),
            forward_only=True,
            collect_non_loss_data=True,
        )
    if not groups.is_last_stage:
        return None
    return gather_from_tensor_model_parallel_region(outputs[-1])[..., :VOCAB_SIZE].clone()


def _model(folder, parallel, groups):
    """The chunks of this rank with the weights of a folder."""
    tokens = some_tokens()
    settings = model_settings(CheckpointFiles(folder))
    model = ModelConfig(**settings, seq_length=tokens.shape[1], make_vocab_size_divisible_by=8)
    chunks = build_model_chunks(
        model,
        padded_vocab_size=padded_vocab_size(
            VOCAB_SIZE,
            make_vocab_size_divisible_by=8,
            tensor_model_parallel_size=parallel.tensor_model_parallel_size,
        ),
        parallel=parallel,
        training=TrainingConfig(train_iters=1),
        groups=groups,
    )
    load_huggingface(folder, chunks, model)
    return chunks
