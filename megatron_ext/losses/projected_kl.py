"""Projected KL: the student's distribution, carried onto the teacher's vocabulary, per chunk.

B batch, Ts Tt tokens, Vps Vpt local columns, C chunks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import get_args

import torch

from megatron_ext.errors import LossError
from megatron_ext.losses.base import LOSS_REGISTRY, DistillationInputs, LossOutput
from megatron_ext.losses.input_check import check_alignment, check_student
from megatron_ext.losses.projection_shard import ProjectionShard
from megatron_ext.ops.projected_kl import KLDirection, projected_kl


@dataclass(frozen=True, slots=True, kw_only=True)
class ProjectedKLLoss:
    """``tau^2 * sum_c KL(P_c || Q_c)`` over chunks, in its proper form (``ops/projected_kl``).

    The output counts chunks. Metrics: ``teacher_entropy`` (nats a chunk), ``top1_agreement`` (of
    the chunk distributions) and ``offsupport_mass`` (teacher mass that the projection cannot reach,
    a teacher row, at the loss's temperature). Collectives: those of ``ops.projected_kl``.

    Raises:
        LossError: Calling it without teacher, alignment or projection, or with ones that do not fit
            the logits. NaN logits are not looked for: they make ``loss_sum`` NaN.
    """

    temperature: float = 1.0
    """tau, at which both distributions are compared."""

    direction: KLDirection = "forward"
    """``forward``: KL(teacher || student). ``reverse``: KL(student || teacher)."""

    def __post_init__(self) -> None:
        if not (math.isfinite(self.temperature) and self.temperature > 0):
            raise LossError(
                "the temperature must be positive", got=self.temperature, expected="above 0"
            )
        if self.direction not in get_args(KLDirection):
            raise LossError(
                "unknown direction of the projected KL",
                got=repr(self.direction),
                expected=f"one of {', '.join(get_args(KLDirection))}",
            )

    def __call__(self, inputs: DistillationInputs) -> LossOutput:
        check_student(inputs)
        alignment, teacher = check_alignment(inputs, objective="projected_kl")
        projection = _check_projection(inputs)
        out = projected_kl(
            inputs.student_logits.flatten(0, 1),
            teacher.to_logits().flatten(0, 1),
            student_chunk_id=alignment.student_chunk_id.flatten(),
            teacher_chunk_id=alignment.teacher_chunk_id.flatten(),
            chunk_count=alignment.chunk_count,
            weight=projection.weight,
            weight_transposed=projection.weight_transposed,
            row_mass=projection.row_mass,
            reachable=projection.reachable,
            student_shard=inputs.student_shard,
            teacher_shard=teacher.shard,
            temperature=self.temperature,
            direction=self.direction,
        )
        count = torch.tensor(alignment.chunk_count, device=out.loss_sum.device)
        return LossOutput(
            loss_sum=out.loss_sum,
            count=count,
            metrics={
                "teacher_entropy": (out.teacher_entropy_sum, count),
                "top1_agreement": (out.agreement_sum, count),
                "offsupport_mass": (out.offsupport_sum, out.teacher_rows),
            },
        )


def _check_projection(inputs: DistillationInputs) -> ProjectionShard:
    if inputs.projection is None or inputs.teacher is None:
        raise LossError(
            "the objective projected_kl needs a vocabulary projection",
            got="none",
            fix="build one and name it in the teacher's configuration",
        )
    expected = (
        inputs.student_shard.width,
        inputs.teacher.shard.vocab_size,
        inputs.teacher.shard.width,
    )
    got = (*inputs.projection.weight.shape, *inputs.projection.reachable.shape)
    if got != expected:
        raise LossError(
            "the projection is cut for other shards (student columns, teacher vocabulary, "
            "teacher columns)",
            got=got,
            expected=expected,
        )
    return inputs.projection


LOSS_REGISTRY.register("projected_kl", ProjectedKLLoss)
