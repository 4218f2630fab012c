"""The student's side of megatron-core's schedules: one microbatch forward, and its loss.

A loss is a sum. It is divided by the count over the global batch, which every rank knows before the
first forward pass because the data says it; so the loss and its gradient do not depend on how the
batch is cut into microbatches and replicas.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import astuple, dataclass, fields
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from megatron_ext.alignment.coverage import ChunkCounts
from megatron_ext.distributed.process_groups import ProcessGroups
from megatron_ext.distributed.vocab_parallel import VocabShard
from megatron_ext.losses import (
    DistillationInputs,
    LossOutput,
    Objective,
    ProjectionShard,
    SumCount,
    TeacherTargets,
)
from megatron_ext.training.collator import Batch
from megatron_ext.training.config import LossConfig


@dataclass(frozen=True, slots=True)
class GlobalCounts:
    """What the terms of the loss are divided by."""

    tokens: int
    chunk_counts: ChunkCounts
    """Chunks by size, and labels in none."""

    @property
    def chunks(self) -> int:
        """Chunks of any size."""
        return self.chunk_counts.chunks

    @classmethod
    def of(cls, batches: list[Batch], groups: ProcessGroups) -> GlobalCounts:
        """Counts over all microbatches and replicas; one all-reduce over ``dp``."""
        chunk_counts = astuple(sum((b.chunk_counts for b in batches), ChunkCounts()))
        counts = torch.tensor(
            [sum(b.token_count for b in batches), *chunk_counts],
            dtype=torch.int64,
            device=groups.device,
        )
        dist.all_reduce(counts, group=groups.dp)
        tokens, *of_chunks = counts.tolist()
        names = (field.name for field in fields(ChunkCounts))
        return cls(
            tokens=tokens, chunk_counts=ChunkCounts(**dict(zip(names, of_chunks, strict=True)))
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class StudentStep:
    """A ``forward_step_func`` for megatron-core's schedules.

    Its data iterator yields (batch, targets) pairs; targets are None where there is no teacher or
    the stage is not the last.
    """

    shard: VocabShard
    next_token: Objective
    distillation: Objective | None
    projection: ProjectionShard | None
    config: LossConfig
    counts: GlobalCounts

    def __call__(
        self, microbatches: Iterator[tuple[Batch, TeacherTargets | None]], model: Any
    ) -> tuple[torch.Tensor, Any]:
        """The stage's output and the function that turns it into a loss."""
        batch, targets = next(microbatches)
        output = model(batch.student.tokens, batch.student.position_ids, None)
        return output, partial(self._loss, batch, targets)

    def _loss(
        self, batch: Batch, targets: TeacherTargets | None, logits: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, dict[str, SumCount]]:
        """megatron-core's triple: this microbatch's part of the loss, 0 tokens, sums to report."""
        inputs = DistillationInputs(
            student_logits=logits,
            student_shard=self.shard,
            labels=batch.student.labels,
            teacher=targets,
            alignment=batch.alignment,
            projection=self.projection,
        )
        cross_entropy = self.next_token(inputs)
        loss = self.config.ce_weight * _mean(cross_entropy, self.counts.tokens)
        report = _report("ce", cross_entropy)
        if self.distillation is not None:
            distillation = self.distillation(inputs)
            loss = loss + self.config.kd_weight * _mean(distillation, self.counts.chunks)
            report |= _report("kd", distillation)
        no_tokens = torch.zeros((), dtype=torch.int, device=logits.device)
        report["loss"] = (loss.detach(), torch.ones_like(no_tokens))
        return loss, no_tokens, report


def _mean(output: LossOutput, count: int) -> torch.Tensor:
    """The sum over the global count; a batch that has nothing to sum over contributes 0."""
    return output.loss_sum / max(count, 1)


def _report(name: str, output: LossOutput) -> dict[str, SumCount]:
    metrics = {f"{name}/{metric}": value for metric, value in output.metrics.items()}
    return {name: (output.loss_sum.detach(), output.count), **metrics}


def reduce_reports(reports: list[dict[str, SumCount]], groups: ProcessGroups) -> dict[str, float]:
    """Means over the global batch on the last stage, empty elsewhere; one all-reduce over ``dp``.

    ``loss`` is the sum of the microbatches' parts, which are divided already.
    """
    if not reports:
        return {}
    names = list(reports[0])
    totals = torch.stack(
        [
            torch.stack(
                [torch.stack([r[name][0].double(), r[name][1].double()]) for r in reports]
            ).sum(dim=0)
            for name in names
        ]
    )
    dist.all_reduce(totals, group=groups.dp)
    return {
        name: total if name == "loss" or count == 0 else total / count
        for name, (total, count) in zip(names, totals.tolist(), strict=True)
    }
