"""What the matched divergence returns, and what its two ways of computing it share. C chunks."""

from __future__ import annotations

from typing import NamedTuple

import torch

from megatron_ext.ops.chunk_distributions import ModelRows
from megatron_ext.ops.matched_divergence.comparison import MatchedOptions
from megatron_ext.ops.matched_divergence.matching import Matching


class MatchedDivergence(NamedTuple):
    """fp32 [C] each (fp64 for fp64 logits), the same on every rank."""

    chunk_loss: torch.Tensor
    """``common + w uncommon``."""

    common: torch.Tensor
    """The divergence over matched columns and a bucket of all others, nats."""

    uncommon: torch.Tensor
    """The sorted L1 over the other columns."""

    discarded_mass: torch.Tensor
    """At most so much is missing in ``uncommon``."""

    student_rest: torch.Tensor
    """The student's mass outside the matched columns."""

    teacher_rest: torch.Tensor

    agreement: torch.Tensor
    """1 where both have the same largest matched column, else 0."""


class RestMasses(NamedTuple):
    """What the bucket and the normalisation come to, [C] each."""

    used: tuple[torch.Tensor, torch.Tensor]
    """Mass that student and teacher are normalised by."""

    masses: tuple[torch.Tensor, torch.Tensor]
    """Outside the matched columns."""

    value: torch.Tensor
    """The bucket's term."""

    slope: torch.Tensor
    """``f_q`` of it, 0 without a bucket."""


class MatchedValues(NamedTuple):
    """[C] as they are found, and [2, C] of the largest columns of teacher and student."""

    value: torch.Tensor
    """Of the matched columns alone."""

    uncommon: torch.Tensor

    discarded: torch.Tensor

    best: torch.Tensor

    column: torch.Tensor
    """int64"""

    @classmethod
    def empty(cls, like: torch.Tensor) -> MatchedValues:
        """For C as long as ``like``."""
        value, uncommon, discarded = like.new_empty(3, len(like))
        best = like.new_empty(2, len(like))
        return cls(value, uncommon, discarded, best, torch.empty_like(best, dtype=torch.int64))


class MatchedTask(NamedTuple):
    """Everything that is known before the first chunk."""

    student: ModelRows

    teacher: ModelRows

    matching: Matching

    options: MatchedOptions

    rest: RestMasses

    scale: torch.Tensor
    """[C], of ``row_scale``."""

    gradient: torch.Tensor | None
