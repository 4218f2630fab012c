"""Strict top-k: one-to-one chunks compared on the teacher's most probable shared tokens.

B batch, Ts Tt tokens, Vp local columns, C chunks, K top-k, N shared tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar, Literal, NamedTuple, get_args

import torch

from megatron_ext.alignment.alignment import ChunkClass
from megatron_ext.alignment.batch import AlignmentBatch
from megatron_ext.errors import LossError
from megatron_ext.losses.base import DistillationInputs, KnownAhead, LossOutput
from megatron_ext.losses.checks import check_alignment, check_match, check_student
from megatron_ext.losses.diagnostics import chunk_output
from megatron_ext.losses.objective import (
    LOSS_REGISTRY,
    Evaluated,
    FusedObjective,
    Needs,
    Scale,
    TargetForm,
)
from megatron_ext.losses.objectives.selected_likelihood import evaluate_selected
from megatron_ext.losses.targets import TeacherTargets, check_tail_temperature, topk_log_probs
from megatron_ext.losses.vocabulary_match import VocabularyMatch
from megatron_ext.ops.divergence import Divergence, check_divergence, divergence
from megatron_ext.ops.launch import Implementation, check_implementation
from megatron_ext.ops.selected_tokens import SelectedTokens, evaluate_selected_tokens
from megatron_ext.ops.sort_keys import NO_KEY, sort_keys
from megatron_ext.ops.top_columns import top_columns

Tail = Literal["renormalise", "bucket"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StrictTopKLoss(FusedObjective):
    """``tau^2 * sum_c D(P_c || Q_c)`` over the chunks of one student and one teacher token.

    In such chunks both models predict the same bytes after the same bytes, so their distributions
    compare token by token over shared tokens. The tokens of a chunk are the ``top_k`` shared ones
    that the teacher finds most probable, of equals the lowest teacher ids. P and Q are the
    models' probabilities of these, renormalised or with all other tokens of either model as one
    more (``tail``). Counts these chunks alone. D in nats, see ``ops/divergence``. Zero, with zero
    gradient, where the models agree on these tokens.

    Chunks of several tokens are left out, digits among them where the tokenizers cut numbers
    differently; the metrics ``used/...`` count them.

    Teacher targets: ``logits``, ``hidden`` and ``topk``. Of a ``topk`` teacher's K tokens the
    shared ones are used, at most ``top_k``; ``bucket`` then needs temperature 1. ``label`` is
    refused. Collectives forward: two all-reduces of [Ts] and one of [Ts, K] for the student, with
    the cross-entropy one more of [Ts] and K + 1 in the place of K; for a teacher's logits one
    all-gather of [Tt, K] int64 and the first three of [Tt]: with K = 64 and TP = 8 some 5 kB a
    position, whatever the vocabularies are. Backward none.

    Metrics: ``top1_agreement`` (the same largest of the top tokens), ``rest_mass`` (teacher's
    probability outside them, at tau; with ``renormalise`` and ``topk`` targets at temperature 1)
    and those of ``losses/diagnostics.py``.

    Raises:
        LossError: Calling it without teacher, alignment or vocabulary match, or with ones that do
            not fit. NaN logits are not looked for: they make ``loss_sum`` NaN.
    """

    name: ClassVar[str] = "strict_topk"
    summary: ClassVar[str] = "shared tokens of one-to-one chunks; the cheapest"

    temperature: float = 1.0
    """tau, at which both distributions are compared."""

    direction: Divergence = "forward"
    """``forward``: KL(teacher || student). ``reverse``: KL(student || teacher).
    ``jensen_shannon``: of both to their mixture."""

    mixture: float = 0.5
    """Weight of the teacher in the mixture of ``jensen_shannon``."""

    top_k: int = 64
    """Number of shared tokens compared in a chunk."""

    tail: Tail = "bucket"
    """``bucket``: the rest of either model is one more token, so that the student also learns the
    total mass of the top tokens. ``renormalise``: only their proportions count."""

    implementation: Implementation = "auto"
    """``auto``, ``triton``, ``cpu`` or ``torch``, see ``ops/launch``. At a temperature other than 1
    kernels only choose the tokens."""

    def __post_init__(self) -> None:
        check_implementation("strict_topk", self.implementation)
        check_divergence(
            "strict_topk",
            temperature=self.temperature,
            direction=self.direction,
            mixture=self.mixture,
        )
        if self.top_k < 1:
            raise LossError("strict_topk compares no token", got=self.top_k, expected="at least 1")
        if self.tail not in get_args(Tail):
            raise LossError(
                "unknown tail of strict_topk",
                got=repr(self.tail),
                expected=f"one of {', '.join(get_args(Tail))}",
            )

    @property
    def takes_labels(self) -> bool:
        """At temperature 1, at which the cross-entropy is."""
        return self.temperature == 1.0

    def evaluate(
        self,
        inputs: DistillationInputs,
        *,
        scale: Scale = 1.0,
        ce_scale: Scale | None = None,
        gradient: torch.Tensor | None = None,
    ) -> Evaluated:
        """``evaluate_selected``; its collectives."""
        check_student(inputs)
        alignment, teacher = check_alignment(
            inputs, objective="strict_topk", kinds=("logits", "hidden", "topk")
        )
        match = check_match(inputs, objective="strict_topk")
        top = self._top_tokens(teacher, match)
        ids = top.student_id[alignment.teacher_spans[:, 0]]
        return evaluate_selected(
            inputs,
            _of_rows(ids, alignment),
            partial(self._compare, inputs, alignment, top),
            temperature=self.temperature,
            scale=scale,
            ce_scale=ce_scale,
            gradient=gradient,
            implementation=self.implementation,
        )

    def _compare(
        self,
        inputs: DistillationInputs,
        alignment: AlignmentBatch,
        top: _TopTokens,
        log_prob: torch.Tensor,
        found: SelectedTokens,
    ) -> LossOutput:
        """The loss from the student's log-probabilities [T, K + 1]."""
        log_q = log_prob[alignment.student_spans[:, 0]]
        log_p = top.log_prob[alignment.teacher_spans[:, 0]].to(log_q.dtype)
        rest_mass = log_p[:, -1].exp()
        named = slice(0, log_p.shape[1] - 1)
        if self.tail == "renormalise":
            log_p, log_q = _renormalised(log_p[:, :-1]), _renormalised(log_q[:, :-1])
        divergences = divergence(
            log_p, log_q, self.direction, self.mixture, implementation=self.implementation
        )
        chunk_loss = self.temperature**2 * divergences
        agreement = log_p[:, named].argmax(dim=-1) == log_q[:, named].argmax(dim=-1)
        output = chunk_output(
            inputs,
            chunk_loss,
            usable=alignment.chunk_class == ChunkClass.ONE_TO_ONE,
            means={"top1_agreement": agreement, "rest_mass": rest_mass},
            implementation=self.implementation,
        )
        if top.log_sum is None:
            return output
        return replace(output, bad=partial(self.flags, inputs, found.whole.log_sum, top.log_sum))

    def tells_bad(self, inputs: DistillationInputs) -> bool:
        """True with all of the teacher's logits: a row of NaN or +inf has no sum."""
        return inputs.teacher is not None and inputs.teacher.kind != "topk"

    def count_ahead(self, known: KnownAhead) -> torch.Tensor:
        """See ``Objective``."""
        return known.chunks(known.aligned.chunk_class == ChunkClass.ONE_TO_ONE)

    def _top_tokens(self, teacher: TeacherTargets, match: VocabularyMatch) -> _TopTokens:
        """Top tokens of every teacher row."""
        student_of = match.student_of(teacher.shard.vocab_size)
        if teacher.kind == "topk":
            return self._top_of_topk(teacher, student_of)
        logits, shard = teacher.to_logits().flatten(0, 1), teacher.shard
        allowed = torch.zeros(shard.width, dtype=torch.bool, device=logits.device)
        allowed[: shard.valid_width] = (
            student_of[shard.start : shard.start + shard.valid_width] >= 0
        )
        ids = top_columns(logits, self.top_k, shard, allowed, implementation=self.implementation)
        found = evaluate_selected_tokens(
            logits,
            ids,
            shard,
            temperature=self.temperature,
            implementation=self.implementation,
        )
        student_id = torch.where(ids >= 0, student_of[ids.clamp(min=0)], -1)
        return _TopTokens(student_id, found.log_prob, found.whole.log_sum)

    def _top_of_topk(self, teacher: TeacherTargets, student_of: torch.Tensor) -> _TopTokens:
        """Top tokens of a ``topk`` teacher, all [Tt, K]; those not taken have no student token."""
        if self.tail == "bucket":
            check_tail_temperature(self.temperature, objective="strict_topk")
        assert teacher.topk_ids is not None
        assert teacher.topk_logits is not None
        ids, logits = teacher.topk_ids.flatten(0, 1), teacher.topk_logits.flatten(0, 1)
        student_id = student_of[ids]
        keys = sort_keys(logits, ids).masked_fill_(student_id < 0, NO_KEY)
        last = keys.topk(min(self.top_k, keys.shape[-1]), dim=-1).values[:, -1:]
        taken = (keys >= last) & (student_id >= 0)
        log_prob = topk_log_probs(teacher, taken)
        if self.temperature != 1.0:
            # Only proportions are used; the rest stays that of temperature 1.
            log_prob[:, :-1] /= self.temperature
        return _TopTokens(torch.where(taken, student_id, -1), log_prob)

    @property
    def needs(self) -> Needs:
        """The match."""
        return Needs(projection="retokenized", match=True)

    @property
    def target_forms(self) -> tuple[TargetForm, ...]:
        """Top-k targets too, unless a tail is kept at another temperature than 1, where its mass is
        not known."""
        keeps_tail = self.tail == "bucket" and self.temperature != 1.0
        return ("hidden",) if keeps_tail else ("topk", "hidden")

    @property
    def why_no_linear_form(self) -> str | None:
        """None: each chunk is a term."""
        return None


class _TopTokens(NamedTuple):
    """Tokens that a teacher row is compared on, the same on every rank."""

    student_id: torch.Tensor
    """int64 [Tt, K], -1 where there are fewer than K."""

    log_prob: torch.Tensor
    """[Tt, K + 1] the teacher's log-probabilities, the rest last."""

    log_sum: torch.Tensor | None = None
    """[Tt] logarithm of the row's sum, NaN where it has NaN or +inf; None of a ``topk`` teacher."""


def _of_rows(ids: torch.Tensor, alignment: AlignmentBatch) -> torch.Tensor:
    """``ids`` [C, K] at the chunks' first rows of all of the student's [T, K], -1 elsewhere.

    All rows are read, since gathering the chunks' would copy the logits.
    """
    count, rows = alignment.student_chunk_id.numel(), alignment.student_spans[:, 0]
    return ids.new_full((count, ids.shape[1]), -1).index_copy_(0, rows, ids)


def _renormalised(log_prob: torch.Tensor) -> torch.Tensor:
    """Renormalised ``log_prob`` [C, K]; uniform, without a gradient, where it has no mass."""
    is_nothing = (log_prob == -torch.inf).all(dim=-1, keepdim=True)
    return torch.log_softmax(log_prob.masked_fill(is_nothing, 0.0), dim=-1)


LOSS_REGISTRY.register("strict_topk", StrictTopKLoss)
