"""Term of projected KL for tokens that repeat one teacher token. C chunks, R rows, M members."""

from __future__ import annotations

from typing import NamedTuple

import torch

from megatron_ext.distributed.vocab_parallel import accumulation_dtype
from megatron_ext.errors import LossError
from megatron_ext.losses.base import DistillationInputs, SumCount
from megatron_ext.losses.checks import Numerics, check_completions
from megatron_ext.losses.diagnostics import chunk_mask, over_chunks
from megatron_ext.losses.objective import Scale
from megatron_ext.losses.repeats import RepeatRows
from megatron_ext.ops.chunk_rows import ChunkedLogits, index_sum
from megatron_ext.ops.divergence import DivergenceOptions
from megatron_ext.ops.launch import Implementation
from megatron_ext.ops.repeats import (
    RepeatValues,
    add_repeat_gradient_,
    evaluate_repeats,
    repeat_divergence,
)


class RepeatTerm(NamedTuple):
    """``weight tau^2 sum_r D(P_r || Q_r)`` over the rows of a batch that predict a repeat."""

    rows: RepeatRows

    weight: float

    options: DivergenceOptions

    used: torch.Tensor | None
    """bool [R]: rows of chunks that count; None: all."""

    implementation: Implementation

    @classmethod
    def of(
        cls,
        inputs: DistillationInputs,
        usable: torch.Tensor | None,
        weight: float,
        options: DivergenceOptions,
        implementation: Implementation,
    ) -> RepeatTerm:
        """The term of a batch, without the chunks outside ``usable`` [C] and the inputs' mask.

        Raises:
            LossError: The inputs have no ``RepeatRows`` of their alignment.
        """
        name = "projected_kl with repeat_weight"
        rows = check_completions(inputs, RepeatRows, objective=name)
        mask = chunk_mask(inputs, usable)
        return cls(
            rows, weight, options, None if mask is None else mask[rows.chunk], implementation
        )

    def evaluate(self, student: ChunkedLogits, teacher: ChunkedLogits) -> RepeatValues:
        """Values of all rows; the collectives of ``evaluate_repeats``, none where there is no
        row."""
        repeats, logits = self.rows.repeats, student.logits
        if not len(repeats.student_row):
            nothing = logits.new_zeros(repeats.member.shape, dtype=accumulation_dtype(logits.dtype))
            return RepeatValues(nothing[:, 0], nothing)
        return evaluate_repeats(
            logits,
            teacher.logits,
            repeats,
            (student.shard, teacher.shard),
            self.options,
            implementation=self.implementation,
        )

    def divergence(self, student: ChunkedLogits, teacher: ChunkedLogits) -> torch.Tensor:
        """Divergence of every row [R], with a graph to the student's logits."""
        values = self.evaluate(student, teacher)
        return repeat_divergence(student.logits, values, self.rows.repeats, student.shard)

    def by_chunk(self, divergence: torch.Tensor) -> torch.Tensor:
        """What the rows' divergences add to each chunk's loss, [C]."""
        scaled = self.weight * self.options.temperature**2 * divergence
        return index_sum(scaled, self.rows.chunk, self.rows.chunk_count)

    def add_gradient_(
        self, gradient: torch.Tensor, slope: torch.Tensor, scales: Scale, student: ChunkedLogits
    ) -> None:
        """Add the gradient of ``sum_c scales_c by_chunk_c`` to ``gradient`` [Ts, Vps].

        ``scales`` is one number, or one for each chunk, [C]; a chunk of scale 0 adds exactly 0.
        """
        of_row = scales[self.rows.chunk, None] if isinstance(scales, torch.Tensor) else scales
        factor = torch.full_like(slope, self.weight * self.options.temperature**2) * of_row
        scaled = torch.where(factor == 0, 0.0, factor * slope)
        add_repeat_gradient_(gradient, scaled, self.rows.repeats, student.shard)

    def metric(self, divergence: torch.Tensor) -> SumCount:
        """Sum and number of the divergences of the rows that count."""
        return over_chunks(divergence.detach(), self.used)


def check_repeat_weight(weight: float, numerics: Numerics) -> None:
    """Raise LossError for a weight below 0, or one beside the nemo numerics, which have no term."""
    if weight < 0:
        raise LossError(
            "repeat_weight of the objective projected_kl is negative",
            got=weight,
            expected="0 or more",
        )
    if weight and numerics != "proper":
        raise LossError(
            "the nemo numerics of the objective projected_kl have no term for repeats",
            got=f"repeat_weight {weight}",
            fix="leave out repeat_weight, or take numerics 'proper'",
        )
