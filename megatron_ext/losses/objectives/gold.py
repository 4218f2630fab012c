"""GOLD and hybrid KL: a divergence over common tokens, and sorted L1 over the rest. C chunks."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar

import torch

from megatron_ext.errors import LossError
from megatron_ext.losses.base import DistillationInputs, LossOutput
from megatron_ext.losses.checks import (
    Numerics,
    check_alignment,
    check_count,
    check_numerics,
    check_student,
    why_nemo,
)
from megatron_ext.losses.diagnostics import chunk_output
from megatron_ext.losses.matched_columns import (
    MatchedColumns,
    chunked_pair,
    counted_rows,
    matched_columns,
)
from megatron_ext.losses.objective import (
    LOSS_REGISTRY,
    Evaluated,
    FusedObjective,
    Needs,
    Scale,
    chunk_scales,
    row_labels,
)
from megatron_ext.losses.objectives.nemo import nemo_gold
from megatron_ext.losses.targets import TeacherTargets
from megatron_ext.ops.divergence import Divergence, check_divergence
from megatron_ext.ops.launch import Implementation, check_implementation
from megatron_ext.ops.matched_divergence import MatchedOptions, evaluate_matched_divergence


@dataclass(frozen=True, slots=True, kw_only=True)
class GoldLoss(FusedObjective):
    """``tau^2 * sum_c ( D(P_c, Q_c) + w * L1(P_c, Q_c) )`` over chunks.

    ``Q_c`` and ``P_c`` are the means of the student's and the teacher's distributions over the rows
    of chunk ``c`` at temperature ``tau``. ``D`` (nats) compares them over ``inputs.match`` with one
    bucket for all other tokens (``ops/matched_divergence``); ``L1`` compares the sorted
    probabilities of those other tokens (``ops/sorted_l1``). The output counts chunks. Zero, with a
    zero gradient, for a student that equals its teacher under one chunking of one tokenization.

    Metrics, a chunk: ``kl_common`` and ``l1_uncommon`` (before ``tau^2`` and ``w``), the
    ``student_uncommon_mass`` and ``teacher_uncommon_mass``, ``discarded_mass`` (upper bound of
    the error of ``l1_uncommon``), ``top1_agreement`` over common tokens, and those of
    ``losses/diagnostics``.

    Teacher targets: ``logits``, ``hidden``. Collectives on the tensor-parallel group: those of
    ``ops/matched_divergence``, all in the forward: four all-reduces of vectors, one more with the
    cross-entropy, and a slice of C' chunks one all-gather of [C', 2 ``uncommon_topk`` + 2],
    all-reduces of its chunks and student rows, and, where a pair of common tokens lies on two
    ranks, one reduce-scatter of [C', Vs].

    ``numerics="nemo"``: ``objectives/nemo.py``.

    Source: GOLD (TRL, 2025) and X-Token (arXiv 2605.21699), from which this form differs as
    ``docs/losses.md`` says.

    Raises:
        LossError: Invalid options; calling it without teacher, alignment or match, or with ones
            that do not fit the logits. NaN logits make ``loss_sum`` NaN.
    """

    name: ClassVar[str] = "gold"
    summary: ClassVar[str] = "tokens that both vocabularies have, and the rest sorted"

    temperature: float = 1.0
    """tau, at which both models are compared."""

    direction: Divergence = "forward"
    """``forward``: KL(teacher || student). ``reverse``: KL(student || teacher).
    ``jensen_shannon``: of both to their mixture."""

    mixture: float = 0.5
    """Weight of the teacher in the mixture of ``jensen_shannon``."""

    uncommon_weight: float = 1.0
    """w of the sorted L1; 0 leaves only the divergence."""

    uncommon_topk: int | None = 8192
    """Largest probabilities of uncommon tokens that are compared; None: all."""

    numerics: Numerics = "proper"
    """``proper`` or ``nemo``."""

    implementation: Implementation = "auto"
    """``auto``, ``triton`` or ``torch``, see ``ops/launch``; ``nemo`` is always torch."""

    def __post_init__(self) -> None:
        check_divergence(
            self.name,
            temperature=self.temperature,
            direction=self.direction,
            mixture=self.mixture,
        )
        check_numerics(self.name, self.numerics, self.direction)
        check_implementation(self.name, self.implementation)
        check_count(self.name, "uncommon_topk", self.uncommon_topk)
        if not (math.isfinite(self.uncommon_weight) and self.uncommon_weight >= 0):
            raise LossError(
                f"uncommon_weight of the objective {self.name} must not be negative",
                got=self.uncommon_weight,
                expected="0 or above",
            )

    def fuses(self, inputs: DistillationInputs) -> bool:
        """False with nemo numerics."""
        return self.numerics == "proper"

    def compute(self, inputs: DistillationInputs) -> LossOutput:
        """The loss under autograd: with nemo numerics."""
        teacher, columns = self._check(inputs)
        return nemo_gold(
            inputs,
            teacher,
            columns,
            temperature=self.temperature,
            is_reverse=self.direction == "reverse",
            uncommon_weight=self.uncommon_weight,
            uncommon_topk=self.uncommon_topk,
        )

    def tells_bad(self, inputs: DistillationInputs) -> bool:
        """True with proper numerics, which normalise rows: one of NaN or +inf has no sum."""
        return self.numerics == "proper"

    def evaluate(
        self,
        inputs: DistillationInputs,
        *,
        scale: Scale = 1.0,
        ce_scale: Scale | None = None,
        gradient: torch.Tensor | None = None,
    ) -> Evaluated:
        """``evaluate_matched_divergence``; its collectives."""
        teacher, columns = self._check(inputs)
        weight = self.temperature**2
        values = evaluate_matched_divergence(
            *chunked_pair(inputs, teacher, counted_rows(inputs)),
            columns.matching,
            MatchedOptions(
                temperature=self.temperature,
                direction=self.direction,
                mixture=self.mixture,
                uncommon_weight=self.uncommon_weight,
                top_u=self.uncommon_topk,
            ),
            labels=row_labels(inputs, ce_scale),
            grad_scale=chunk_scales(inputs, weight * scale),
            gradient=gradient,
            implementation=self.implementation,
        )
        output = chunk_output(
            inputs,
            values.chunk_loss if weight == 1.0 else weight * values.chunk_loss,
            means={
                "kl_common": values.common,
                "l1_uncommon": values.uncommon,
                "student_uncommon_mass": values.student_rest,
                "teacher_uncommon_mass": values.teacher_rest,
                "discarded_mass": values.discarded_mass,
                "top1_agreement": values.agreement,
            },
            implementation=self.implementation,
        )
        bad = values.student_log_sum, values.teacher_log_sum
        output = replace(output, bad=partial(self.flags, inputs, *bad))
        return Evaluated(output, values.cross_entropy, values.top_column)

    def _check(self, inputs: DistillationInputs) -> tuple[TeacherTargets, MatchedColumns]:
        check_student(inputs)
        _, teacher = check_alignment(inputs, objective=self.name)
        return teacher, matched_columns(inputs, teacher, objective=self.name)

    @property
    def needs(self) -> Needs:
        """The match."""
        return Needs(projection="retokenized", match=True)

    @property
    def why_no_context_parallel(self) -> str | None:
        """Reason with nemo numerics."""
        return why_nemo(self.numerics)

    @property
    def why_no_linear_form(self) -> str | None:
        """Reason of ``why_no_context_parallel``."""
        return self.why_no_context_parallel


LOSS_REGISTRY.register("gold", GoldLoss)


@dataclass(frozen=True, slots=True, kw_only=True)
class HybridKLLoss(GoldLoss):
    """``GoldLoss`` over a match that also holds tokens which mostly, not fully, correspond.

    H-KL of X-Token (arXiv 2605.21699). The inputs' match comes from
    ``SparseProjection.partition(min_share)``; ``min_share`` is read by the maker of the match, not
    by the loss. Everything else is as in ``GoldLoss``.

    Raises:
        LossError: As ``GoldLoss``, and for a share that is not above 0 and at most 1.
    """

    name: ClassVar[str] = "hybrid_kl"
    summary: ClassVar[str] = "as gold, with tokens that mostly correspond among the common ones"

    min_share: float = 0.6
    """Least share of a student token's largest teacher token for the two to be common."""

    def __post_init__(self) -> None:
        # Without arguments, super() would look for the class that slots=True replaced.
        GoldLoss.__post_init__(self)
        if not 0 < self.min_share <= 1:
            raise LossError(
                "min_share of the objective hybrid_kl is not a share",
                got=self.min_share,
                expected="above 0 and at most 1",
            )

    @property
    def needs(self) -> Needs:
        """The relaxed match."""
        return Needs(projection="retokenized", match=True, min_share=self.min_share)


LOSS_REGISTRY.register("hybrid_kl", HybridKLLoss)
