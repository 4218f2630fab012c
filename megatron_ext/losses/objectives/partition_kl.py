"""Partition KL: divergence of both models' next texts over the continuations that both can predict.

B batch, Ts Tt tokens, Vps Vpt local columns, C chunks, H chains, K top-k.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple

import torch

from megatron_ext.alignment.alignment import ChunkClass
from megatron_ext.alignment.batch import AlignmentBatch
from megatron_ext.errors import LossError
from megatron_ext.losses.base import DistillationInputs, KnownAhead, LossOutput
from megatron_ext.losses.checks import (
    check_alignment,
    check_completions,
    check_match,
    check_student,
)
from megatron_ext.losses.completions import ChunkCompletions
from megatron_ext.losses.diagnostics import (
    chunk_output,
    read_rows,
    teacher_rows,
)
from megatron_ext.losses.objective import (
    LOSS_REGISTRY,
    Evaluated,
    FusedObjective,
    Needs,
    Scale,
    TargetForm,
    in_fp32,
    label_factors,
)
from megatron_ext.losses.objectives.chunk_likelihood import labelled_ahead
from megatron_ext.losses.vocabulary_match import singles_as_chains, topk_masses
from megatron_ext.ops.divergence import Divergence, DivergenceOptions, check_divergence
from megatron_ext.ops.launch import Implementation, check_implementation
from megatron_ext.ops.partition_kl import (
    EventComparison,
    PartitionPlan,
    RowMasses,
    evaluate_partition_kl,
    shared_columns,
    values_by_chunk,
)


class ComparedEvents(NamedTuple):
    """Compared chunks of one microbatch, those of one token a side first."""

    teacher: torch.Tensor | RowMasses
    """Teacher operand of ``evaluate_partition_kl``."""

    plan: PartitionPlan

    chunk: torch.Tensor
    """int64: the number of each chunk."""

    place: torch.Tensor
    """int32: place of each chunk of the alignment among them, -1 of one that is left out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionKLLoss(FusedObjective):
    """``tau^2 * sum_c w_c D(P_c || Q_c)`` over chunks, ``w_c`` 1 or ``chain_weight``.

    P_c and Q_c are the teacher's and the student's distributions over a partition of the possible
    next texts (``ops/partition_kl``): the shared vocabulary for one token a side; the completions
    of the observed prefix for one token against several; the observed tokens for several against
    several; and in each case a rest. In nats, summed; the output counts chunks.

    Metrics: ``teacher_rest`` and ``student_rest`` (probability of the rest, at the temperature),
    ``top1_agreement`` (of the most probable event) and those of ``losses/diagnostics.py``.
    Collectives: those of ``ops.partition_kl``.

    Teacher targets: ``logits``, ``hidden`` and ``topk``. With ``topk`` an event outside the
    teacher's top-k is part of the rest, on both sides. A chunk with an observed token outside it is
    left out of sum and count, unless the targets have ``label_log_probs`` too.

    A chunk of several tokens, one of which has no label, is left out as well.

    Raises:
        LossError: Calling it without teacher, alignment, match or completions, or with ones that do
            not fit the logits. NaN logits are not looked for: they make ``loss_sum`` NaN.

    Source: Common-Support Distillation (arXiv 2610.28895).
    """

    name: ClassVar[str] = "partition_kl"
    summary: ClassVar[str] = (
        "events that both models can name, exactly; follows the teacher through cut tokens"
    )

    temperature: float = 1.0
    """tau: masses of the events to the power of 1 / tau, normalised again. It acts on the events
    and not on the tokens, since a product of tempered conditionals depends on the tokenization."""

    direction: Divergence = "forward"
    """``forward``: KL(teacher || student). ``reverse``: KL(student || teacher).
    ``jensen_shannon``: of both to their mixture."""

    mixture: float = 0.5
    """Weight of the teacher in the mixture of ``jensen_shannon``."""

    chain_weight: float = 1.0
    """Weight of a chunk that has several tokens on a side (beta of the paper); it counts as one
    chunk whatever its weight."""

    implementation: Implementation = "auto"
    """``auto``, ``triton`` or ``torch``, see ``ops/launch``."""

    def __post_init__(self) -> None:
        check_divergence(
            "partition_kl",
            temperature=self.temperature,
            direction=self.direction,
            mixture=self.mixture,
        )
        check_implementation("partition_kl", self.implementation)
        if not (math.isfinite(self.chain_weight) and self.chain_weight >= 0):
            raise LossError(
                "the chain_weight of partition_kl cannot be used",
                got=self.chain_weight,
                expected="a finite number, at least 0",
            )

    def evaluate(
        self,
        inputs: DistillationInputs,
        *,
        scale: Scale = 1.0,
        ce_scale: Scale | None = None,
        gradient: torch.Tensor | None = None,
    ) -> Evaluated:
        """``evaluate_partition_kl``; its collectives."""
        events = self._events(inputs)
        told: tuple[torch.Tensor | bool, ...] = ()
        if self.tells_bad(inputs):
            of_student = True if ce_scale is not None else read_rows(inputs).flatten()
            told = of_student, teacher_rows(inputs).flatten()
        values = evaluate_partition_kl(
            inputs.student_logits.flatten(0, 1),
            events.teacher,
            events.plan,
            grad_scale=self._event_scale(inputs, events, scale),
            labels=None if ce_scale is None else inputs.labels.flatten(),
            ce_weight=1.0 if ce_scale is None else label_factors(inputs, ce_scale),
            gradient=gradient,
            told=told,
            implementation=self.implementation,
        )
        output = self._output(inputs, (values.singles, values.chains), events)
        if self.tells_bad(inputs):
            output = replace(output, bad=lambda: self.flags(inputs, *values.bad()))
        return Evaluated(output, values.token_loss, values.top_column)

    def tells_bad(self, inputs: DistillationInputs) -> bool:
        """True with all of the teacher's logits: a row of NaN or +inf has no sum."""
        return inputs.teacher is not None and inputs.teacher.kind != "topk"

    def count_ahead(self, known: KnownAhead) -> torch.Tensor:
        """Chunks of one token a side, and others with all their labels.

        Exact with the teacher's labels. An upper bound without them, and for top-k targets without
        ``label_log_probs``, where the observed tokens outside the top-k are not known before the
        teacher has run.
        """
        is_single = known.aligned.chunk_class == ChunkClass.ONE_TO_ONE
        return known.chunks(labelled_ahead(known) | is_single)

    def _events(self, inputs: DistillationInputs) -> ComparedEvents:
        """Compared events of the chunks.

        Raises:
            LossError: See the class.
        """
        check_student(inputs)
        _, teacher = check_alignment(
            inputs, objective=self.name, kinds=("logits", "hidden", "topk")
        )
        match = check_match(inputs, objective=self.name)
        completions = check_completions(inputs, ChunkCompletions, objective=self.name)
        counted = torch.ones_like(completions.chain_chunk, dtype=torch.bool)
        if inputs.chunk_mask is not None:
            counted = inputs.chunk_mask[completions.chain_chunk]
        singles, chains = completions.singles, completions.chains
        masses = None
        if teacher.kind == "topk":
            # The rows of singles become chains without a step, whose completions are the top-k.
            singles, chains = singles_as_chains(singles, chains, teacher, match)
            chains, masses, is_known = topk_masses(chains, teacher)
            ones = torch.ones_like(completions.single_chunk, dtype=torch.bool)
            counted = torch.cat([ones, counted]) & is_known
        return ComparedEvents(
            teacher=teacher.to_logits().flatten(0, 1) if masses is None else masses,
            plan=PartitionPlan(
                singles,
                shared_columns(
                    match.common_student, match.common_teacher, inputs.student_shard, teacher.shard
                ),
                chains,
                counted,
                inputs.student_shard,
                teacher.shard,
                DivergenceOptions(
                    temperature=self.temperature, direction=self.direction, mixture=self.mixture
                ),
            ),
            chunk=completions.chunk,
            place=completions.place,
        )

    def _event_scale(
        self, inputs: DistillationInputs, events: ComparedEvents, scale: Scale
    ) -> torch.Tensor:
        """Upstream gradient of each divergence [singles + chains]."""
        assert inputs.alignment is not None
        weight = self._chunk_weight(inputs.alignment)
        factor = (weight[events.chunk] if isinstance(weight, torch.Tensor) else weight) * scale
        if inputs.chunk_mask is not None:
            return (inputs.chunk_mask[events.chunk] * in_fp32(factor)).float()
        if isinstance(factor, torch.Tensor):
            return factor.float().expand(len(events.chunk)).contiguous()
        return torch.full(
            events.chunk.shape, factor, dtype=torch.float32, device=inputs.labels.device
        )

    def _chunk_weight(
        self, alignment: AlignmentBatch, dtype: torch.dtype = torch.float32
    ) -> torch.Tensor | float:
        """Factor of each chunk's divergence, [C], or that of all."""
        if self.chain_weight == 1.0:
            return self.temperature**2
        one, other = torch.tensor([1.0, self.chain_weight], dtype=dtype, device="cpu")
        weight = torch.where(alignment.chunk_class == ChunkClass.ONE_TO_ONE, one, other)
        return self.temperature**2 * weight

    def _output(
        self,
        inputs: DistillationInputs,
        parts: tuple[EventComparison, EventComparison],
        events: ComparedEvents,
    ) -> LossOutput:
        """Output from the values of singles and chains, reordered by chunk."""
        assert inputs.alignment is not None
        factor = self._chunk_weight(inputs.alignment, parts[0].divergence.dtype)
        values, usable = values_by_chunk(
            parts, events.plan.counted, events.place, factor, implementation=self.implementation
        )
        loss, student_rest, teacher_rest, agreement = values
        return chunk_output(
            inputs,
            loss,
            usable=usable,
            means={
                "teacher_rest": teacher_rest,
                "student_rest": student_rest,
                "top1_agreement": agreement,
            },
            implementation=self.implementation,
        )

    @property
    def needs(self) -> Needs:
        """The match and the completions."""
        return Needs(projection="retokenized", match=True, completions="chunks")

    @property
    def target_forms(self) -> tuple[TargetForm, ...]:
        """Top-k targets too."""
        return ("topk", "hidden")

    @property
    def why_no_linear_form(self) -> str | None:
        """None: each chunk is a term."""
        return None


LOSS_REGISTRY.register("partition_kl", PartitionKLLoss)
