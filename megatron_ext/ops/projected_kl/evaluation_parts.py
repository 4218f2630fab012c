"""What the evaluation by torch and the one by kernels share. T rows, C chunks, Vp local columns."""

from __future__ import annotations

from typing import NamedTuple

import torch

from megatron_ext.distributed.vocab_parallel import VocabShard
from megatron_ext.ops.chunk_rows import ChunkRows
from megatron_ext.ops.projected_kl.learned_entries import LearnedEntries
from megatron_ext.ops.projected_kl.values import CrossEntropy


class ChunkValues(NamedTuple):
    """[C] each, over all shards."""

    value: torch.Tensor
    """D_c."""

    entropy: torch.Tensor
    agreement: torch.Tensor
    rest_mass: torch.Tensor


class Side(NamedTuple):
    """One model's logits, its rows by chunk, and its columns."""

    logits: torch.Tensor
    rows: ChunkRows
    shard: VocabShard


class Wanted(NamedTuple):
    """Where gradients go."""

    gradient: torch.Tensor | None
    announced: torch.Tensor
    """[C] fp32 or fp64."""

    cross_entropy: CrossEntropy | None
    learned: LearnedEntries | None
    entry_gradient: torch.Tensor | None
