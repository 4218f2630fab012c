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
from megatron_ext.huggingface.model_settings import model_settings
from megatron_ext.huggingface.tensor_files import TensorReader
from megatron_ext.tokenizers.build import padded_vocab_size
from megatron_ext.training import cpu_megatron
from megatron_ext.training.config import ModelConfig, ParallelConfig, TrainingConfig
from megatron_ext.training.first_weights import load_huggingface
from megatron_ext.training.models import build_model_chunks, freeze
from tests.huggingface.tiny_models import VOCAB_SIZE, some_tokens


@dataclass(frozen=True)
class RankLogits:
    """What one rank has to say of one model under one layout."""

    logits: torch.Tensor | None
    """[B, T, V] on the ranks of the last stage."""

    elements_read: int
    """Of all tensors in the files."""


def logits_of(rank, folders, layouts):
    """Logits of each checkpoint under each layout, and how much was read for them."""
    found = {}
    for layout, sizes in layouts.items():
        parallel = ParallelConfig(**sizes)
        groups = _groups(parallel)
        for name, folder in folders.items():
            with _counted_reads() as counts:
                logits = _logits(folder, parallel, groups)
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


def _logits(folder, parallel, groups):
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
