"""What every objective takes and returns. B batch, T tokens, Vp local partition, C chunks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from megatron_ext.alignment.batch import AlignmentBatch
from megatron_ext.distributed.vocab_parallel import VocabShard
from megatron_ext.losses.projection_shard import ProjectionShard
from megatron_ext.losses.targets import TeacherTargets
from megatron_ext.registry import Registry

SumCount = tuple[torch.Tensor, torch.Tensor]
"""A local sum (fp32 scalar) and the number of things summed (int64 scalar)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DistillationInputs:
    """One microbatch on one rank of the last pipeline stage."""

    student_logits: torch.Tensor
    """[B, Ts, Vp] this rank's columns, any float dtype."""

    student_shard: VocabShard

    labels: torch.Tensor
    """[B, Ts] int64: the token that each position predicts, ``IGNORE_INDEX`` where untrained."""

    teacher: TeacherTargets | None = None

    alignment: AlignmentBatch | None = None

    projection: ProjectionShard | None = None
    """The [Vs, Vt] projection, cut to this rank's student rows and teacher columns."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossOutput:
    """A sum that is normalised once, globally, by whoever knows the global count."""

    loss_sum: torch.Tensor
    """fp32 scalar with a graph; the same on every tensor-parallel rank."""

    count: torch.Tensor
    """int64 scalar: what was summed over (chunks, tokens)."""

    metrics: dict[str, SumCount] = field(default_factory=dict)


Objective = Callable[[DistillationInputs], LossOutput]

LOSS_REGISTRY: Registry[Callable[..., Objective]] = Registry("distillation objective")
"""Name -> constructor taking the objective's options as keywords."""
