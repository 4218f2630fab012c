"""Projected KL: divergence by chunk of the student, projected onto the teacher's vocabulary.

B batch, Ts Tt tokens, Vps Vpt local columns, C chunks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar, Final, Literal

import torch

from megatron_ext.alignment.batch import AlignmentBatch
from megatron_ext.losses.base import DistillationInputs, KnownAhead, LossOutput, SumCount
from megatron_ext.losses.checks import (
    Numerics,
    check_alignment,
    check_count,
    check_numerics,
    check_projection,
    check_student,
    why_nemo,
)
from megatron_ext.losses.diagnostics import chunk_output
from megatron_ext.losses.lookup import chunk_rows
from megatron_ext.losses.matched_columns import chunked_pair
from megatron_ext.losses.objective import (
    LOSS_REGISTRY,
    Evaluated,
    FusedObjective,
    Needs,
    Scale,
    chunk_factors,
    chunk_scales,
    label_factors,
)
from megatron_ext.losses.objectives.nemo import nemo_projected_kl
from megatron_ext.losses.projection_shard import ProjectionShard
from megatron_ext.losses.repeat_term import RepeatTerm, check_repeat_weight
from megatron_ext.losses.targets import TeacherTargets
from megatron_ext.ops.chunk_rows import ChunkedLogits
from megatron_ext.ops.divergence import Divergence, DivergenceOptions, check_divergence
from megatron_ext.ops.launch import Implementation, check_implementation
from megatron_ext.ops.projected_kl import (
    ProjectedKL,
    ProjectedKLOptions,
    WeightedLabels,
    evaluate_projected_kl,
    projected_kl,
)

_WHY_NOT: Final = (
    "a teacher is normalised over the columns that the projection reaches, and neither a tail nor "
    "a label says how much of the rest these hold: give its logits or hidden states, or take "
    "strict_topk or alm"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProjectedKLLoss(FusedObjective):
    """``tau^2 * sum_c D(P_c || Q_c)`` over chunks, in its proper form (``ops/projected_kl``).

    The output counts chunks. Metrics: ``teacher_entropy`` (nats a chunk), ``top1_agreement`` (of
    the chunk distributions), ``offsupport_mass`` (teacher mass outside the projection's columns,
    a teacher row, at the loss's temperature), ``rest_mass`` (teacher mass outside ``vocab_topk``,
    where given), ``repeats`` (divergence of a row before a repeat, with ``repeat_weight``) and
    those of ``losses/diagnostics.py``. Collectives: those of ``ops.projected_kl``, and of
    ``ops.repeats``.

    Teacher targets: ``logits`` and ``hidden``. ``topk`` is refused: the teacher is normalised over
    the columns that the projection reaches, and how much of a tail these hold is not known; and a
    chunk of several rows has a different tail in each of them.

    Raises:
        LossError: Calling it without teacher, alignment or projection, or with ones that do not fit
            the logits. NaN logits are not looked for: they make ``loss_sum`` NaN.
    """

    name: ClassVar[str] = "projected_kl"
    summary: ClassVar[str] = "distributions, carried onto the teacher's vocabulary; the default"

    temperature: float = 1.0
    """tau, at which both distributions are compared."""

    direction: Divergence = "forward"
    """``forward``: KL(teacher || student). ``reverse``: KL(student || teacher).
    ``jensen_shannon``: of both to their mixture."""

    mixture: float = 0.5
    """Weight of the teacher in the mixture of ``jensen_shannon``."""

    vocab_topk: int | None = None
    """Number of teacher tokens compared a chunk, the teacher's most probable ones, with the rest as
    one token; None: all tokens. The nemo numerics choose for a microbatch, the original 8192, and
    have no rest."""

    repeat_weight: float = 0.0
    """Weight of a term that tells tokens apart that are one, two, ... copies of a teacher token, as
    runs of line feeds are (``ops/repeats``); 0: without it they are one."""

    exact_token_match_only: bool = False
    """Leave out chunks whose two sides differ in bytes."""

    numerics: Numerics = "proper"
    """``proper``, or ``nemo``: value and gradient of the original, see ``objectives/nemo.py``."""

    implementation: Implementation = "auto"
    """See ``ops/launch``; the nemo numerics always run in torch."""

    def __post_init__(self) -> None:
        check_divergence(
            "projected_kl",
            temperature=self.temperature,
            direction=self.direction,
            mixture=self.mixture,
        )
        check_implementation("projected_kl", self.implementation)
        check_numerics(self.name, self.numerics, self.direction)
        check_count(self.name, "vocab_topk", self.vocab_topk)
        check_repeat_weight(self.repeat_weight, self.numerics)

    def evaluate(
        self,
        inputs: DistillationInputs,
        *,
        scale: Scale = 1.0,
        ce_scale: Scale | None = None,
        gradient: torch.Tensor | None = None,
    ) -> Evaluated:
        """``evaluate_projected_kl``; its collectives."""
        alignment, teacher, projection = self._operands(inputs)
        usable = self._usable(alignment)
        pair = self._pair(inputs, alignment, teacher)
        scales = chunk_factors(inputs, scale, usable)
        metrics: dict[str, SumCount] = {}
        # Read before the gradient is written over the logits.
        term = self._repeats(inputs, usable)
        repeats = None if term is None else term.evaluate(*pair)
        values = evaluate_projected_kl(
            *pair,
            projection.operand(),
            self._options,
            grad_scale=scales,
            gradient=gradient,
            cross_entropy=None
            if ce_scale is None
            else WeightedLabels(inputs.labels.flatten(), label_factors(inputs, ce_scale)),
            implementation=self.implementation,
        )
        if term is not None and repeats is not None:
            if gradient is not None:
                term.add_gradient_(gradient, repeats.slope, scales, pair[0])
            values, metrics = _with_repeats(values, term, repeats.divergence)
        output = self._output(inputs, values, usable, metrics)
        return Evaluated(output, values.token_loss, values.top_column)

    def fuses(self, inputs: DistillationInputs) -> bool:
        """False for the nemo numerics and for a learned projection."""
        shard = inputs.projection
        is_learned = isinstance(shard, ProjectionShard) and shard.learned is not None
        return self.numerics == "proper" and not is_learned

    def tells_bad(self, inputs: DistillationInputs) -> bool:
        """True with proper numerics, which normalise rows: one of NaN or +inf has no sum."""
        return self.numerics == "proper"

    def compute(self, inputs: DistillationInputs) -> LossOutput:
        """The loss under autograd: the nemo numerics, or a learned projection."""
        alignment, teacher, projection = self._operands(inputs)
        usable = self._usable(alignment)
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
        pair = self._pair(inputs, alignment, teacher)
        values = projected_kl(
            *pair,
            projection.operand(),
            self._options,
            learned=projection.learned,
            grad_scale=chunk_scales(inputs, inputs.grad_scale, usable),
            implementation=self.implementation,
        )
        term = self._repeats(inputs, usable)
        metrics: dict[str, SumCount] = {}
        if term is not None:
            values, metrics = _with_repeats(values, term, term.divergence(*pair))
        return self._output(inputs, values, usable, metrics)

    def _operands(
        self, inputs: DistillationInputs
    ) -> tuple[AlignmentBatch, TeacherTargets, ProjectionShard]:
        check_student(inputs)
        alignment, teacher = check_alignment(inputs, objective=self.name, why=_WHY_NOT)
        return alignment, teacher, check_projection(inputs, objective=self.name)

    def _pair(
        self, inputs: DistillationInputs, alignment: AlignmentBatch, teacher: TeacherTargets
    ) -> tuple[ChunkedLogits, ChunkedLogits]:
        return chunked_pair(inputs, teacher, chunk_rows(alignment))

    @property
    def _options(self) -> ProjectedKLOptions:
        return ProjectedKLOptions(
            temperature=self.temperature,
            direction=self.direction,
            mixture=self.mixture,
            vocab_topk=self.vocab_topk,
        )

    def _usable(self, alignment: AlignmentBatch) -> torch.Tensor | None:
        """Chunks that count, bool [C]; None: all."""
        return alignment.is_exact if self.exact_token_match_only else None

    def _repeats(
        self, inputs: DistillationInputs, usable: torch.Tensor | None
    ) -> RepeatTerm | None:
        """The term of tokens that repeat one teacher token; None where it has no weight."""
        if not self.repeat_weight:
            return None
        options = DivergenceOptions(
            temperature=self.temperature, direction=self.direction, mixture=self.mixture
        )
        return RepeatTerm.of(inputs, usable, self.repeat_weight, options, self.implementation)

    def _output(
        self,
        inputs: DistillationInputs,
        values: ProjectedKL,
        usable: torch.Tensor | None,
        metrics: Mapping[str, SumCount],
    ) -> LossOutput:
        """Output from the operation's values; ``usable`` [C] bool, None: all."""
        means = {
            "teacher_entropy": values.teacher_entropy,
            "top1_agreement": values.top1_agreement,
        }
        if self.vocab_topk is not None:
            means["rest_mass"] = values.rest_mass
        output = chunk_output(
            inputs,
            values.chunk_loss,
            usable=usable,
            means=means,
            teacher_row_means={"offsupport_mass": values.offsupport_mass},
            metrics=metrics,
            implementation=self.implementation,
        )
        student, teacher = values.student_log_sum, values.offsupport_mass
        assert student is not None
        return replace(output, bad=partial(self.flags, inputs, student, teacher, is_cut=True))

    def count_ahead(self, known: KnownAhead) -> torch.Tensor:
        """See ``Objective``."""
        return known.chunks(self._usable(known.aligned))

    @property
    def needs(self) -> Needs:
        """The projection."""
        repeats: Literal["repeats"] | None = "repeats" if self.repeat_weight else None
        return Needs(projection="retokenized", shard=True, completions=repeats)

    @property
    def why_no_context_parallel(self) -> str | None:
        """Reason with nemo numerics."""
        return why_nemo(self.numerics)

    @property
    def why_no_linear_form(self) -> str | None:
        """Reason of ``why_no_context_parallel``."""
        return self.why_no_context_parallel

    @property
    def reads_behind(self) -> bool:
        """True with ``repeat_weight``."""
        return self.repeat_weight > 0

    @property
    def learns_projection(self) -> bool:
        """True with proper numerics."""
        return self.numerics == "proper"


def _with_repeats(
    values: ProjectedKL, term: RepeatTerm, divergence: torch.Tensor
) -> tuple[ProjectedKL, dict[str, SumCount]]:
    """The values with the term in each chunk's loss, and its metric."""
    chunk_loss = values.chunk_loss + term.by_chunk(divergence)
    return values._replace(chunk_loss=chunk_loss), {"repeats": term.metric(divergence)}


LOSS_REGISTRY.register("projected_kl", ProjectedKLLoss)
