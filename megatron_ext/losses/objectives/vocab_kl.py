"""Divergence from a teacher with the student's own tokenizer, position by position.

B batch, T tokens, Vp local columns, K top-k.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar

import torch

from megatron_ext.constants import IGNORE_INDEX
from megatron_ext.errors import LossError
from megatron_ext.losses.base import DistillationInputs, LossOutput, Over
from megatron_ext.losses.checks import check_same_tokenizer, check_student
from megatron_ext.losses.objective import (
    LOSS_REGISTRY,
    Evaluated,
    FusedObjective,
    Needs,
    Scale,
    TargetForm,
    label_factors,
    label_scales,
)
from megatron_ext.losses.objectives.selected_likelihood import evaluate_selected
from megatron_ext.losses.targets import TeacherTargets, check_tail_temperature, topk_log_probs
from megatron_ext.ops.divergence import Divergence, DivergenceOptions, check_divergence, divergence
from megatron_ext.ops.launch import Implementation, check_implementation
from megatron_ext.ops.selected_tokens import SelectedTokens
from megatron_ext.ops.sums import CountedChunks, chunk_sums
from megatron_ext.ops.vocab_kl import evaluate_vocab_kl


@dataclass(frozen=True, slots=True, kw_only=True)
class VocabKLLoss(FusedObjective):
    """``tau^2 * sum_t D(P_t || Q_t)`` over positions with a label, in nats, counting them.

    P is the teacher's and Q the student's softmax over the ids of their tokenizer at the
    temperature tau; padding of either model, of whatever size, takes no probability. D is a KL in
    one direction or the Jensen-Shannon divergence (``ops/divergence``). No alignment and no
    projection: both models read the same tokens. Zero, with zero gradient, where they agree.

    Teacher targets: ``logits`` and ``hidden`` are compared on every token (``ops/vocab_kl``: four
    all-reduces, 52 T bytes a rank; before them ``TeacherTargets.logits_over``). ``topk`` is
    compared on its K tokens and all others as one, which never exceeds the divergence on every
    token (``ops/selected_tokens``: three all-reduces, 4 T (K + 2) bytes, two of the metrics); at
    temperature 1 only, since the mass of the tail is not known at another. ``label`` is refused.

    Metrics: ``teacher_entropy`` (nats a token; with ``topk``, of the K + 1 entries),
    ``top1_agreement`` and with ``topk`` ``rest_mass``, the teacher's outside its K tokens. Chunk
    masks are refused: mask labels instead.

    Raises:
        LossError: Calling it without a teacher, with one of other positions or another vocabulary,
            or with a chunk mask. NaN logits are not looked for: they make ``loss_sum`` NaN.
    """

    name: ClassVar[str] = "vocab_kl"
    summary: ClassVar[str] = "every token; for a teacher with the student's own tokenizer"

    temperature: float = 1.0
    """tau, at which both distributions are compared."""

    direction: Divergence = "forward"
    """``forward``: KL(teacher || student). ``reverse``: KL(student || teacher).
    ``jensen_shannon``: of both to their mixture."""

    mixture: float = 0.5
    """Weight of the teacher in the mixture of ``jensen_shannon``."""

    implementation: Implementation = "auto"
    """``auto``, ``triton``, ``cpu`` or ``torch``, see ``ops/launch``."""

    def __post_init__(self) -> None:
        check_implementation("vocab_kl", self.implementation)
        check_divergence(
            "vocab_kl",
            temperature=self.temperature,
            direction=self.direction,
            mixture=self.mixture,
        )

    def evaluate(
        self,
        inputs: DistillationInputs,
        *,
        scale: Scale = 1.0,
        ce_scale: Scale | None = None,
        gradient: torch.Tensor | None = None,
    ) -> Evaluated:
        """``evaluate_vocab_kl``, or ``evaluate_selected`` of a teacher's top tokens; its
        collectives."""
        teacher = self._teacher(inputs)
        if teacher.kind == "topk":
            return self._on_top_tokens(inputs, teacher, scale, ce_scale, gradient)
        values = evaluate_vocab_kl(
            inputs.student_logits.flatten(0, 1),
            teacher.logits_over(inputs.student_shard).flatten(0, 1),
            student_shard=inputs.student_shard,
            teacher_shard=inputs.student_shard,
            options=DivergenceOptions(
                temperature=self.temperature, direction=self.direction, mixture=self.mixture
            ),
            labels=None if ce_scale is None else inputs.labels.flatten(),
            grad_scale=label_scales(inputs, scale),
            label_grad_scale=1.0 if ce_scale is None else label_factors(inputs, ce_scale),
            gradient=gradient,
            implementation=self.implementation,
        )
        means = {"teacher_entropy": values.teacher_entropy, "top1_agreement": values.top1_agreement}
        told = values.student_log_sum, values.teacher_log_sum
        output = replace(
            self._output(inputs, values.row_loss, means),
            bad=partial(self.flags, inputs, *told, is_cut=True),
        )
        return Evaluated(output, values.cross_entropy, values.top_column)

    def tells_bad(self, inputs: DistillationInputs) -> bool:
        """True with all of the teacher's logits: rows with a label, which alone are read, are
        normalised, and one of NaN or +inf has no sum."""
        return inputs.teacher is None or inputs.teacher.kind != "topk"

    def _teacher(self, inputs: DistillationInputs) -> TeacherTargets:
        check_student(inputs)
        teacher = check_same_tokenizer(
            inputs, objective=self.name, kinds=("logits", "hidden", "topk")
        )
        if inputs.chunk_mask is not None:
            raise LossError(
                "the objective vocab_kl has positions, not chunks",
                got="a chunk mask",
                fix="set the labels that do not count to IGNORE_INDEX",
            )
        return teacher

    def _output(
        self, inputs: DistillationInputs, row_loss: torch.Tensor, means: dict[str, torch.Tensor]
    ) -> LossOutput:
        """Output from the loss and other values of every position, [B Ts] each."""
        used = inputs.labels.flatten() != IGNORE_INDEX
        sums = chunk_sums(
            row_loss,
            list(means.values()),
            CountedChunks(used),
            implementation=self.implementation,
        )
        totals = zip(means, sums.columns.unbind(), strict=True)
        return LossOutput(
            loss_sum=sums.loss,
            count=sums.number,
            metrics={name: (total, sums.number) for name, total in totals},
        )

    def _on_top_tokens(
        self,
        inputs: DistillationInputs,
        teacher: TeacherTargets,
        scale: Scale,
        ce_scale: Scale | None,
        gradient: torch.Tensor | None,
    ) -> Evaluated:
        check_tail_temperature(self.temperature, objective="vocab_kl")
        assert teacher.topk_ids is not None
        ids = teacher.topk_ids.flatten(0, 1)
        return evaluate_selected(
            inputs,
            ids,
            partial(self._compare, inputs, teacher, ids),
            temperature=1.0,
            scale=scale,
            ce_scale=ce_scale,
            gradient=gradient,
            with_top_column=True,
            implementation=self.implementation,
        )

    def _compare(
        self,
        inputs: DistillationInputs,
        teacher: TeacherTargets,
        ids: torch.Tensor,
        log_prob: torch.Tensor,
        found: SelectedTokens,
    ) -> LossOutput:
        """The loss from the student's log-probabilities [T, K' + 1]."""
        log_q = found.without_label(log_prob)
        log_p = topk_log_probs(teacher).to(log_q.dtype)
        row_loss = divergence(
            log_p, log_q, self.direction, self.mixture, implementation=self.implementation
        )
        p = log_p.exp()
        entropy = -(p * log_p.masked_fill(p == 0, 0.0)).sum(dim=-1)
        assert found.top_column is not None
        teacher_top = ids.gather(-1, log_p[:, :-1].argmax(dim=-1, keepdim=True))[:, 0]
        means = {
            "teacher_entropy": entropy,
            "top1_agreement": found.top_column == teacher_top,
            "rest_mass": p[:, -1],
        }
        return self._output(inputs, row_loss, means)

    @property
    def needs(self) -> Needs:
        """A teacher that reads the student's tokens."""
        return Needs(same_tokenizer=True)

    @property
    def sums_over(self) -> Over:
        """Labels."""
        return "tokens"

    @property
    def target_forms(self) -> tuple[TargetForm, ...]:
        """Top-k targets too at temperature 1, where the mass of the tail is known."""
        return ("topk", "hidden") if self.temperature == 1.0 else ("hidden",)

    @property
    def why_no_linear_form(self) -> str | None:
        """None: each label is a term."""
        return None


LOSS_REGISTRY.register("vocab_kl", VocabKLLoss)
