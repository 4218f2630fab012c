"""The student's side of megatron-core's schedules: one microbatch forward, and its loss.

A loss is a sum. It is divided by the count over the global batch, which every rank knows before the
first forward pass because the data says it; so the loss and its gradient do not depend on how the
batch is cut into microbatches and replicas.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import astuple, dataclass, field, fields
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from megatron_ext.alignment.coverage import ChunkCounts
from megatron_ext.distributed.process_groups import ProcessGroups
from megatron_ext.distributed.vocab_parallel import VocabShard
from megatron_ext.losses import (
    CombinedOutput,
    DistillationInputs,
    KnownAhead,
    LossOutput,
    LossPart,
    Objective,
    SumCount,
    TeacherTargets,
)
from megatron_ext.losses.checks.finite_check import FiniteCheck, check_finite
from megatron_ext.losses.count_ahead import count_ahead
from megatron_ext.training.config import LossConfig
from megatron_ext.training.data.microbatch import Microbatch
from megatron_ext.training.inputs import TEACHER
from megatron_ext.training.model_chunks import has_head
from megatron_ext.training.objective import sums_over
from megatron_ext.training.run_constants import RunConstants
from megatron_ext.training.student_hidden import StudentHidden


@dataclass(frozen=True, slots=True)
class GlobalCounts:
    """What the terms of the loss are divided by."""

    tokens: int
    """Trained labels of the student."""

    compared: int
    """What the distillation objective counts: chunks, some of them, or labels."""

    chunk_counts: ChunkCounts
    """Chunks by size, and labels in none."""

    @property
    def chunks(self) -> int:
        """Chunks of any size."""
        return self.chunk_counts.chunks

    @classmethod
    def of(
        cls,
        batches: Sequence[Microbatch],
        groups: ProcessGroups,
        *,
        compared: Callable[[Microbatch], torch.Tensor],
    ) -> GlobalCounts:
        """Counts over all microbatches and replicas; one all-reduce over ``dp``.

        Args:
            compared: int64 scalar, what the distillation objective counts in a batch.
        """
        chunk_counts = astuple(sum((b.chunk_counts for b in batches), ChunkCounts()))
        on_host = torch.tensor(
            [sum(b.token_count for b in batches), *chunk_counts], device=groups.device
        )
        of_objective = torch.stack([compared(batch) for batch in batches]).sum()
        counts = torch.cat([of_objective[None], on_host])
        dist.all_reduce(counts, group=groups.dp)
        of_objective, tokens, *of_chunks = counts.tolist()
        names = (item.name for item in fields(ChunkCounts))
        return cls(
            tokens=tokens,
            compared=of_objective,
            chunk_counts=ChunkCounts(**dict(zip(names, of_chunks, strict=True))),
        )


class StepReport(NamedTuple):
    """What one microbatch has to say, on the device."""

    metrics: dict[str, SumCount]
    finite: FiniteCheck


@dataclass(frozen=True, slots=True, kw_only=True)
class StudentStep:
    """A ``forward_step_func`` for megatron-core's schedules.

    Its data iterator yields (batch, targets) pairs; targets are None where there is no teacher or
    the stage is not the last.
    """

    shard: VocabShard
    next_token: Objective
    distillation: Objective | None
    config: LossConfig
    constants: RunConstants = field(default_factory=RunConstants)

    hidden: StudentHidden | None = None
    """On the last stage, for an objective that reads hidden states."""

    counts: GlobalCounts = GlobalCounts(tokens=0, compared=0, chunk_counts=ChunkCounts())

    def __call__(
        self, microbatches: Iterator[tuple[Microbatch, TeacherTargets | None]], model: Any
    ) -> tuple[torch.Tensor, Any]:
        """The stage's output and the function that turns it into a loss."""
        batch, targets = next(microbatches)
        inputs = batch.student
        output = model(inputs.tokens, inputs.position_ids, inputs.attention_mask)
        # Now: under a pipeline, other microbatches go forward before this one has its loss.
        hidden = self.hidden.take() if self.hidden and has_head(model) else None
        return output, partial(self._loss, batch, targets, hidden)

    def compared(self, batch: Microbatch) -> torch.Tensor:
        """int64 scalar: what the distillation objective counts in a batch; 0 without one."""
        if self.distillation is None:
            return torch.zeros((), dtype=torch.int64, device=batch.student.labels.device)
        known = KnownAhead(
            labels=batch.student.labels,
            alignment=batch.sides.alignments[TEACHER],
            teacher_labels=batch.teachers[TEACHER].labels,
        )
        return count_ahead(self.distillation, known, over=sums_over(self.config))

    def _loss(
        self,
        batch: Microbatch,
        targets: TeacherTargets | None,
        hidden: torch.Tensor | None,
        logits: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor, StepReport]:
        """megatron-core's triple: this microbatch's part of the loss, 0 tokens, what to report."""
        inputs = self._inputs(batch, targets, hidden, logits)
        terms = {"ce": self.next_token(inputs)}
        if self.distillation is not None:
            terms["kd"] = self.distillation(inputs)
        combined = CombinedOutput(
            parts={
                name: LossPart(output=output, term=name, count_name=name)
                for name, output in terms.items()
            },
            term_weights={"ce": self.config.ce_weight, "kd": self.config.kd_weight},
        )
        loss = combined.total({"ce": self.counts.tokens, "kd": self.counts.compared})
        no_tokens = torch.zeros((), dtype=torch.int, device=logits.device)
        metrics = {"loss": (loss.detach(), torch.ones_like(no_tokens))}
        for name, output in terms.items():
            metrics |= _metrics(name, output)
        return loss, no_tokens, StepReport(metrics, check_finite(inputs))

    def _inputs(
        self,
        batch: Microbatch,
        targets: TeacherTargets | None,
        hidden: torch.Tensor | None,
        logits: torch.Tensor,
    ) -> DistillationInputs:
        teacher = batch.teachers.get(TEACHER)
        return DistillationInputs(
            student_logits=logits,
            student_shard=self.shard,
            labels=batch.student.labels,
            teacher=targets,
            alignment=batch.sides.alignments.get(TEACHER),
            projection=self.constants.projection,
            match=self.constants.match,
            teacher_labels=teacher.labels if teacher else None,
            student_hidden=hidden,
            student_head_weight=self.hidden.head_weight if self.hidden else None,
            boundary=self.constants.boundary,
            completions=batch.completions.get(TEACHER),
        )


def _metrics(name: str, output: LossOutput) -> dict[str, SumCount]:
    metrics = {f"{name}/{metric}": value for metric, value in output.metrics.items()}
    return {name: (output.loss_sum.detach(), output.count), **metrics}


def reduce_reports(
    reports: Sequence[StepReport], groups: ProcessGroups
) -> tuple[dict[str, float], FiniteCheck]:
    """Means over the global batch on the last stage, none elsewhere, and whether numbers were bad.

    One all-reduce over ``dp``. ``loss`` is the sum of the microbatches' parts, which are divided
    already. Nothing of the same name is missing in another microbatch.
    """
    if not reports:
        return {}, FiniteCheck(torch.zeros(2, dtype=torch.int32, device=groups.device))
    names = list(reports[0].metrics)
    sums = [
        torch.stack([torch.stack([part.double() for part in r.metrics[name]]) for r in reports])
        for name in names
    ]
    bad = torch.stack([report.finite.bad for report in reports])
    totals = torch.stack([*(part.sum(dim=0) for part in sums), bad.double().sum(dim=0)])
    dist.all_reduce(totals, group=groups.dp)
    means = {
        name: total if name == "loss" or count == 0 else total / count
        for name, (total, count) in zip(names, totals[:-1].tolist(), strict=True)
    }
    return means, FiniteCheck((totals[-1] > 0).to(torch.int32))
