"""Projected KL: the student's distribution, carried onto the teacher's vocabulary, per chunk.

B batch, Ts Tt tokens, Vps Vpt local columns, C chunks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, get_args

import torch

from megatron_ext.errors import LossError
from megatron_ext.losses.base import LOSS_REGISTRY, DistillationInputs, LossOutput
from megatron_ext.losses.checks.input_check import check_alignment, check_projection, check_student
from megatron_ext.losses.checks.option_check import Numerics, check_choice
from megatron_ext.losses.count_ahead import KnownAhead
from megatron_ext.losses.diagnostics import chunk_output, over_chunks, used_chunks
from megatron_ext.losses.nemo import nemo_projected_kl
from megatron_ext.ops.divergence import Divergence, check_divergence
from megatron_ext.ops.implementation import Implementation, check_implementation
from megatron_ext.ops.projected_kl import ProjectedKL, projected_kl

_WHY_NOT: Final = (
    "a teacher is normalised over the columns that the projection reaches, and neither a tail nor "
    "a label says how much of the rest these hold: give its logits or hidden states, or take "
    "strict_topk or alm"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProjectedKLLoss:
    """``tau^2 * sum_c D(P_c || Q_c)`` over chunks, in its proper form (``ops/projected_kl``).

    The output counts chunks. Metrics: ``teacher_entropy`` (nats a chunk), ``top1_agreement`` (of
    the chunk distributions), ``offsupport_mass`` (teacher mass that the projection cannot reach,
    a teacher row, at the loss's temperature), ``rest_mass`` (teacher mass outside ``vocab_topk``,
    where given) and those of ``losses/diagnostics.py``. Collectives: those of ``ops.projected_kl``.

    Teacher targets: ``logits`` and ``hidden``. ``topk`` is refused: the teacher is normalised over
    the columns that the projection reaches, and how much of a tail these hold is not known; and a
    chunk of several rows has a different tail in each of them.

    Raises:
        LossError: Calling it without teacher, alignment or projection, or with ones that do not fit
            the logits. NaN logits are not looked for: they make ``loss_sum`` NaN.
    """

    temperature: float = 1.0
    """tau, at which both distributions are compared."""

    direction: Divergence = "forward"
    """``forward``: KL(teacher || student). ``reverse``: KL(student || teacher).
    ``jensen_shannon``: of both to their mixture."""

    mixture: float = 0.5
    """Weight of the teacher in the mixture of ``jensen_shannon``."""

    vocab_topk: int | None = None
    """Compare on so many teacher tokens a chunk, the teacher's most probable ones, and on the rest
    as one token; None: on all of them. The nemo numerics choose for a microbatch, the original
    8192, and have no rest."""

    exact_token_match_only: bool = False
    """Leave out chunks whose two sides differ in bytes."""

    numerics: Numerics = "proper"
    """``proper``, or ``nemo``: value and gradient of the original, see ``losses/nemo``."""

    implementation: Implementation = "auto"
    """``triton``, ``torch``, or ``auto``: the kernels on a GPU. They have no ``vocab_topk``, which
    runs in torch under ``auto``; so do the nemo numerics under each."""

    def __post_init__(self) -> None:
        check_divergence(
            "projected_kl",
            temperature=self.temperature,
            direction=self.direction,
            mixture=self.mixture,
        )
        check_implementation("projected_kl", self.implementation)
        check_choice("projected_kl", "numerics", self.numerics, get_args(Numerics))
        if self.numerics == "nemo" and self.direction == "jensen_shannon":
            raise LossError(
                "the nemo numerics of projected_kl have no such direction",
                got=repr(self.direction),
                expected="'forward' or 'reverse'",
            )
        if self.vocab_topk is not None and self.vocab_topk < 1:
            raise LossError(
                "vocab_topk of projected_kl keeps no token",
                got=self.vocab_topk,
                expected="at least 1, or none for every token",
            )

    def __call__(self, inputs: DistillationInputs) -> LossOutput:
        check_student(inputs)
        alignment, teacher = check_alignment(inputs, objective="projected_kl", why=_WHY_NOT)
        projection = check_projection(inputs, objective="projected_kl")
        usable = alignment.is_exact if self.exact_token_match_only else None
        if self.numerics == "nemo":
            return nemo_projected_kl(
                inputs,
                teacher,
                projection,
                temperature=self.temperature,
                is_reverse=self.direction == "reverse",
                vocab_topk=self.vocab_topk,
                usable=usable,
            )
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
            plan=projection.plan,
            student_shard=inputs.student_shard,
            teacher_shard=teacher.shard,
            temperature=self.temperature,
            direction=self.direction,
            mixture=self.mixture,
            vocab_topk=self.vocab_topk,
            learned=projection.learned,
            announced=torch.where(used_chunks(inputs, usable), 1.0, 0.0) * inputs.announced,
            implementation=self.implementation,
        )
        return self.output(inputs, out, usable)

    def output(
        self, inputs: DistillationInputs, values: ProjectedKL, usable: torch.Tensor | None
    ) -> LossOutput:
        """What the operation's values say of the microbatch; ``usable`` [C] bool, None: all."""
        used = used_chunks(inputs, usable)
        means = {
            "teacher_entropy": values.teacher_entropy,
            "top1_agreement": values.top1_agreement,
        }
        if self.vocab_topk is not None:
            means["rest_mass"] = values.rest_mass
        offsupport, _ = over_chunks(values.offsupport_mass, used)
        teacher_rows = torch.where(used, values.teacher_rows, 0).sum()
        return chunk_output(
            inputs,
            values.chunk_loss,
            usable=usable,
            means=means,
            metrics={"offsupport_mass": (offsupport, teacher_rows)},
        )

    def count_ahead(self, known: KnownAhead) -> torch.Tensor:
        """See ``CountsAhead``."""
        return known.chunks(known.aligned.is_exact if self.exact_token_match_only else None)


LOSS_REGISTRY.register("projected_kl", ProjectedKLLoss)
