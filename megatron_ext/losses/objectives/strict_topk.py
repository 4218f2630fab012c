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
from megatron_ext.distributed.vocab_parallel import MadeOnce, VocabShard
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
from megatron_ext.ops.divergence import Divergence, DivergenceOptions, check_divergence
from megatron_ext.ops.launch import Implementation, check_implementation
from megatron_ext.ops.selected_tokens import (
    SelectedPair,
    SelectedTokens,
    evaluate_selected_tokens,
    selected_divergence,
    tokens_of_chunks,
)
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
    """Most shared tokens compared in a chunk."""

    tail: Tail = "bucket"
    """``bucket``: the rest of either model is one more token, so that the student also learns the
    total mass of the top tokens. ``renormalise``: only their proportions count."""

    implementation: Implementation = "auto"
    """``auto``, ``triton``, ``cpu`` or ``torch``, see ``ops/launch``. At a temperature other than 1
    torch reads and writes the student's logits."""

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
        top = self._top_tokens(inputs, teacher, match)
        ids = tokens_of_chunks(
            top.token_id,
            top.partner,
            (alignment.student_spans, alignment.teacher_spans),
            inputs.labels.numel(),
            implementation=self.implementation,
        )
        return evaluate_selected(
            inputs,
            ids,
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
        """The loss from the student's log-probabilities [T, K' + 1]."""
        compared = selected_divergence(
            SelectedPair(
                log_prob, found, top.log_prob, alignment.student_spans, alignment.teacher_spans
            ),
            DivergenceOptions(direction=self.direction, mixture=self.mixture),
            renormalises=self.tail == "renormalise",
            implementation=self.implementation,
        )
        weight = self.temperature**2
        output = chunk_output(
            inputs,
            compared.divergence if weight == 1.0 else weight * compared.divergence,
            usable=alignment.chunk_class == ChunkClass.ONE_TO_ONE,
            means={"top1_agreement": compared.agreement, "rest_mass": compared.rest_mass},
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

    def _top_tokens(
        self, inputs: DistillationInputs, teacher: TeacherTargets, match: VocabularyMatch
    ) -> _TopTokens:
        """Top tokens of every teacher row."""
        shards = inputs.student_shard, teacher.shard
        partner, excluded = _PARTNERS(match.common_student, match.common_teacher, shards, _partners)
        if teacher.kind == "topk":
            return self._top_of_topk(teacher, partner)
        logits, shard = teacher.to_logits().flatten(0, 1), teacher.shard
        ids = top_columns(logits, self.top_k, shard, excluded, implementation=self.implementation)
        found = evaluate_selected_tokens(
            logits,
            ids,
            shard,
            temperature=self.temperature,
            implementation=self.implementation,
        )
        return _TopTokens(ids, found.log_prob, partner, found.whole.log_sum)

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

    token_id: torch.Tensor
    """int64 [Tt, K], -1 where there are fewer than K."""

    log_prob: torch.Tensor
    """[Tt, K + 1] the teacher's log-probabilities, the rest last."""

    partner: torch.Tensor | None = None
    """int64 [Vt]: the student's token of each of the teacher's; None: they are the student's."""

    log_sum: torch.Tensor | None = None
    """[Tt] logarithm of the row's sum, NaN where it has NaN or +inf; None of a ``topk`` teacher."""


_PARTNERS: MadeOnce[tuple[torch.Tensor, torch.Tensor | None]] = MadeOnce()


def _partners(
    own: torch.Tensor, other: torch.Tensor, _: VocabShard, teacher: VocabShard
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The student's token of each of the teacher's, int64 [Vt], -1 for none; and this rank's
    columns of the teacher without one, padding among them, bool [Vpt]."""
    partner = VocabularyMatch(common_student=own, common_teacher=other).student_of(
        teacher.vocab_size
    )
    allowed = torch.zeros(teacher.width, dtype=torch.bool, device=own.device)
    allowed[: teacher.valid_width] = (
        partner[teacher.start : teacher.start + teacher.valid_width] >= 0
    )
    return partner, teacher.excluded_columns(own.device, allowed)


LOSS_REGISTRY.register("strict_topk", StrictTopKLoss)
