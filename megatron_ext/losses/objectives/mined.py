"""MinED: a teacher's distribution moved to the student tokens nearest in spelling. C chunks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, get_args

import torch

from megatron_ext.alignment.alignment import ChunkClass
from megatron_ext.distributed.vocab_parallel import VocabShard, row_slices
from megatron_ext.losses.base import DistillationInputs, KnownAhead, LossOutput
from megatron_ext.losses.checks import (
    check_alignment,
    check_choice,
    check_projection,
    check_student,
)
from megatron_ext.losses.diagnostics import chunk_output
from megatron_ext.losses.objective import LOSS_REGISTRY, Needs, Objective
from megatron_ext.losses.projection_shard import ProjectionShard, Sharing, carried_targets
from megatron_ext.ops.divergence import Divergence, DivergenceOptions, check_divergence
from megatron_ext.ops.vocab_kl import vocab_kl


@dataclass(frozen=True, slots=True, kw_only=True)
class MinedLoss(Objective):
    """``tau^2 * sum_c D(P_c || Q_c)`` over chunks of one student and one teacher token.

    ``Q_c`` is the student's distribution at the position that predicts the chunk, at the
    temperature tau, over the tokens that map to one of the teacher's. ``P_c[v]`` is the teacher's
    probability of the token that v maps to, shared among all the student tokens that map to it and
    normalised; ``inputs.projection`` is that map and should have one entry a row (the builder
    method ``mined``). The output counts one-to-one chunks. In nats; zero, with a zero gradient,
    where ``Q_c = P_c``: for one tokenizer and a projection that is the identity. Zero as well, and
    counted, for a chunk whose teacher masks (-inf) all tokens that a student token maps to.

    Metrics, a chunk: ``teacher_entropy`` of ``P_c``, ``top1_agreement``, ``offsupport_mass`` (the
    teacher's, on tokens that no student token maps to), and those of ``losses/diagnostics``.

    Teacher targets: ``logits``, ``hidden``. Collectives on the tensor-parallel group, forward:
    a slice of C' chunks those of ``carried_targets`` and of ``ops/vocab_kl``, eight all-reduces and
    one all-gather of [C', Vt]; backward none. Keeps [C, Vps] in the student's dtype.

    Source: FuseLLM (Wan et al. 2024, arXiv 2401.10491), in the form that tokenkit gives it, from
    which this differs as ``docs/losses.md`` says.

    Raises:
        LossError: Invalid options; calling it without teacher, alignment or projection,
            or with ones that do not fit. NaN logits make ``loss_sum`` NaN.
    """

    name: ClassVar[str] = "mined"
    summary: ClassVar[str] = (
        "one-to-one chunks, each student token with the nearest spelling; a baseline"
    )

    temperature: float = 1.0
    """tau, at which both distributions are compared."""

    direction: Divergence = "forward"
    """``forward``: KL(teacher || student). ``reverse``: KL(student || teacher).
    ``jensen_shannon``: of both to their mixture."""

    mixture: float = 0.5
    """Weight of the teacher in the mixture of ``jensen_shannon``."""

    sharing: Sharing = "split"
    """Probability of several student tokens that map to one teacher token: equal parts of its
    probability (``split``), or all of it each, before ``P_c`` is normalised (``copy``, as
    published)."""

    def __post_init__(self) -> None:
        check_divergence(
            self.name,
            temperature=self.temperature,
            direction=self.direction,
            mixture=self.mixture,
        )
        check_choice(self.name, "sharing", self.sharing, get_args(Sharing))

    def compute(self, inputs: DistillationInputs) -> LossOutput:
        """See ``Objective``."""
        check_student(inputs)
        alignment, teacher = check_alignment(inputs, objective=self.name)
        projection = check_projection(inputs, objective=self.name)
        # Chunks of other classes take part, since selecting would wait for the device.
        student_logits = inputs.student_logits.flatten(0, 1)[alignment.student_spans[:, 0]]
        teacher_logits = teacher.to_logits().flatten(0, 1)[alignment.teacher_spans[:, 0]]
        slices = row_slices(
            len(student_logits), inputs.student_shard.width, device=student_logits.device
        )
        sizes = [rows.stop - rows.start for rows in slices] or [0]
        compared = [
            self._compare(inputs, student_rows, teacher_rows, teacher.shard, projection)
            for student_rows, teacher_rows in zip(
                student_logits.split(sizes), teacher_logits.split(sizes), strict=True
            )
        ]
        loss, entropy, agreement, offsupport = map(torch.cat, zip(*compared, strict=True))
        return chunk_output(
            inputs,
            loss,
            usable=alignment.chunk_class == ChunkClass.ONE_TO_ONE,
            means={
                "teacher_entropy": entropy,
                "top1_agreement": agreement,
                "offsupport_mass": offsupport,
            },
        )

    def _compare(
        self,
        inputs: DistillationInputs,
        student_logits: torch.Tensor,
        teacher_logits: torch.Tensor,
        teacher_shard: VocabShard,
        projection: ProjectionShard,
    ) -> tuple[torch.Tensor, ...]:
        """Loss, entropy, agreement and off-support mass of a few chunks."""
        targets = carried_targets(
            teacher_logits,
            projection,
            teacher_shard=teacher_shard,
            temperature=self.temperature,
            sharing=self.sharing,
        )
        empty = targets.is_empty
        # A finite stand-in where there is no distribution; its loss is discarded below.
        log_probs = targets.log_probs.masked_fill_(empty[:, None], 0.0)
        out = vocab_kl(
            student_logits.masked_fill(projection.row_mass == 0, -torch.inf),
            # Multiplied by the temperature, which vocab_kl divides by.
            log_probs.mul_(self.temperature),
            student_shard=inputs.student_shard,
            teacher_shard=inputs.student_shard,
            options=DivergenceOptions(
                temperature=self.temperature, direction=self.direction, mixture=self.mixture
            ),
            grad_scale=torch.ones_like(empty, dtype=torch.float32) * inputs.grad_scale,
        )
        return (
            torch.where(empty, 0.0, out.row_loss),
            out.teacher_entropy.masked_fill(empty, 0.0),
            out.top1_agreement & ~empty,
            targets.offsupport_mass,
        )

    def count_ahead(self, known: KnownAhead) -> torch.Tensor:
        """See ``Objective``."""
        return known.chunks(known.aligned.chunk_class == ChunkClass.ONE_TO_ONE)

    @property
    def needs(self) -> Needs:
        """The projection, built by edit distance."""
        return Needs(projection="mined", shard=True)

    @property
    def why_no_linear_form(self) -> str | None:
        """None: each chunk is a term."""
        return None


LOSS_REGISTRY.register("mined", MinedLoss)
