"""The student's side of megatron-core's schedules: one microbatch forward, and its loss.

A loss is a sum. It is divided by the count over the global batch, which every rank knows before the
first forward pass because the data says it; so the loss and its gradient do not depend on how the
batch is cut into microbatches and replicas.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import astuple, dataclass, field, fields, replace
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from megatron_ext.alignment.alignment import ChunkCounts
from megatron_ext.distributed.process_groups import ProcessGroups
from megatron_ext.distributed.vocab_parallel import VocabShard
from megatron_ext.losses import (
    DistillationInputs,
    LayerGradients,
    Loss,
    LossOutput,
    LossPart,
    LossPlan,
    Objective,
    SumCount,
)
from megatron_ext.losses.diagnostics import FiniteCheck, check_finite
from megatron_ext.losses.linear import LinearDistillation, no_logits
from megatron_ext.training.microbatch import Lesson
from megatron_ext.training.models import has_head
from megatron_ext.training.student_head import Head, StudentHidden, head_of, without_head
from megatron_ext.training.teacher_term import TeacherTerm


@dataclass(frozen=True, slots=True)
class GlobalCounts:
    """What the terms of the loss are divided by."""

    tokens: int
    """Trained labels of the student."""

    of_parts: Mapping[str, int]
    """What the teachers' objectives count, chunks, some of them, or labels, by count name."""

    chunk_counts: ChunkCounts
    """Chunks by size, and labels in none."""

    @property
    def chunks(self) -> int:
        """Chunks of any size."""
        return self.chunk_counts.chunks

    @property
    def compared(self) -> int:
        """What is counted of all teachers."""
        return sum(self.of_parts.values())

    @classmethod
    def of(
        cls, lessons: Sequence[Lesson], groups: ProcessGroups, *, term: TeacherTerm | None
    ) -> GlobalCounts:
        """Counts over all microbatches and replicas; one all-reduce over ``dp``.

        Ranks that share a replica's sequences know all of its rows, and count the same.
        """
        batches = [lesson.batch for lesson in lessons]
        chunk_counts = astuple(sum((b.chunk_counts for b in batches), ChunkCounts()))
        counted = [term.counts(lesson) if term else {} for lesson in lessons]
        counts = torch.tensor(
            [sum(b.token_count for b in batches), *chunk_counts], device=groups.device
        )
        parts = list(counted[0])
        sums = [torch.stack([own[name] for own in counted]).sum() for name in parts]
        if sums:
            counts = torch.cat([counts, torch.stack(sums)])
        dist.all_reduce(counts, group=groups.dp)
        tokens, *rest = counts.tolist()
        names = [item.name for item in fields(ChunkCounts)]
        return cls(
            tokens=tokens,
            of_parts=dict(zip(parts, rest[len(names) :], strict=True)),
            chunk_counts=ChunkCounts(**dict(zip(names, rest, strict=False))),
        )


class StepReport(NamedTuple):
    """What one microbatch has to say, on the device."""

    metrics: dict[str, SumCount]
    finite: FiniteCheck


@dataclass(frozen=True, slots=True, kw_only=True)
class StudentStep:
    """A ``forward_step_func`` for megatron-core's schedules; its data iterator yields lessons."""

    shard: VocabShard
    next_token: Objective

    term: TeacherTerm | None = None
    """What is learned from teachers."""

    hidden: StudentHidden | None = None
    """On the last stage, for objectives that read hidden states."""

    linear: Mapping[str, LinearDistillation] | None = None
    """In place of logits: the loss from hidden states; by teacher, see ``linear_forms``."""

    counts: GlobalCounts = GlobalCounts(tokens=0, of_parts={}, chunk_counts=ChunkCounts())

    term_weights: Mapping[str, float] = field(default_factory=lambda: {"kd": 1.0, "ce": 1.0})
    """Of this global batch."""

    teacher_weights: torch.Tensor | None = None
    """Of this global batch, where they follow the text."""

    gradients: LayerGradients | None = None
    """On the last stage, where the weights follow each term's gradient."""

    def __call__(self, lessons: Iterator[Lesson], model: Any) -> tuple[torch.Tensor, Any]:
        """The stage's output and the function that turns it into a loss."""
        lesson = next(lessons)
        inputs = lesson.batch.student
        is_headless = self.linear is not None and has_head(model)
        with without_head(model) if is_headless else nullcontext():
            output = model(inputs.tokens, inputs.position_ids, inputs.attention_mask)
        if not has_head(model):
            return output, partial(self._loss, lesson, None)
        if is_headless:
            head = head_of(model)
            return output, partial(self._loss_from_hidden, lesson, head)
        # Now: under a pipeline, other microbatches go forward before this one has its loss.
        return output, partial(self._loss, lesson, self.hidden.take() if self.hidden else None)

    def _loss(
        self, lesson: Lesson, hidden: torch.Tensor | None, logits: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, StepReport]:
        """megatron-core's triple: this microbatch's part of the loss, 0 tokens, what to report."""
        head = self.hidden.head_weight if self.hidden else None
        plan, finite = self._plan(lesson, self._student(lesson, logits, hidden, head))
        if self.gradients is None:
            # Nobody reads the logits again: who compares hidden states has those.
            return self._report(plan, plan.loss(self._counts(), in_place=True), finite)
        combined, counts = plan.outputs(), self._counts()
        self.gradients.add(combined.terms(counts))
        loss = Loss(total=combined.total(counts), outputs=dict(combined.outputs))
        return self._report(plan, loss, finite)

    def _loss_from_hidden(
        self, lesson: Lesson, head: Head, output: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, StepReport]:
        """The same, of a stage's last hidden states [T, B, D]."""
        assert self.linear is not None
        hidden = head.whole(output, self.shard.group)
        logits = no_logits(hidden, self.shard)
        plan, finite = self._plan(lesson, self._student(lesson, logits, hidden, head.weight))
        loss = plan.loss_from_hidden(self._counts(), self.linear, lesson.batch.tiles)
        return self._report(plan, loss, finite)

    def _student(
        self,
        lesson: Lesson,
        logits: torch.Tensor,
        hidden: torch.Tensor | None,
        head_weight: torch.Tensor | None,
    ) -> DistillationInputs:
        return DistillationInputs(
            student_logits=logits,
            student_shard=self.shard,
            labels=lesson.batch.student.labels,
            student_hidden=hidden,
            student_head_weight=head_weight,
        )

    def _plan(self, lesson: Lesson, student: DistillationInputs) -> tuple[LossPlan, FiniteCheck]:
        """The loss of a microbatch, and whether the numbers that it reads are finite."""
        of_teachers = self.term.inputs(lesson, student) if self.term else {}
        finite = FiniteCheck(torch.zeros(2, dtype=torch.int32, device=student.labels.device))
        for inputs in of_teachers.values() or [student]:
            finite = finite.merged(check_finite(self._seen(inputs)))
        parts = {
            "ce": LossPart(objective=self.next_token, inputs=student, term="ce", count_name="ce")
        }
        if self.term is not None:
            parts |= self.term.aggregator(of_teachers, weights=self.teacher_weights)
        return LossPlan(parts=parts, term_weights=self.term_weights), finite

    def _seen(self, inputs: DistillationInputs) -> DistillationInputs:
        """With what is there to be checked: hidden states in place of logits that are not made."""
        hidden = inputs.student_hidden
        if self.linear is None or hidden is None:
            return inputs
        width = hidden.shape[-1]
        whole = VocabShard(start=0, stop=width, vocab_size=width, group=self.shard.group)
        return replace(inputs, student_logits=hidden, student_shard=whole)

    def _counts(self) -> dict[str, torch.Tensor | int]:
        return {"ce": self.counts.tokens, **self.counts.of_parts}

    def _report(
        self, plan: LossPlan, loss: Loss, finite: FiniteCheck
    ) -> tuple[torch.Tensor, torch.Tensor, StepReport]:
        total = loss.total
        no_tokens = torch.zeros((), dtype=torch.int, device=total.device)
        metrics = {"loss": (total.detach(), no_tokens)}
        shares = []
        for name, output in loss.outputs.items():
            called = self.term.metric_name(name) if self.term else name
            metrics |= _metrics(called, output)
            if called != name or name == "ce":
                continue
            part = plan.parts[name]
            count = max(self.counts.of_parts[part.count_name], 1)
            shares.append(part.weight * output.loss_sum.detach() / count)
            if isinstance(part.weight, torch.Tensor):
                metrics[f"{name}/weight"] = (part.weight, torch.ones_like(no_tokens))
        if shares:
            metrics["kd"] = (torch.stack(shares).sum(), no_tokens)
        return total, no_tokens, StepReport(metrics, finite)


def _metrics(name: str, output: LossOutput) -> dict[str, SumCount]:
    metrics = {f"{name}/{metric}": value for metric, value in output.metrics.items()}
    return {name: (output.loss_sum.detach(), output.count), **metrics}


def reduce_reports(
    reports: Sequence[StepReport], groups: ProcessGroups
) -> tuple[dict[str, float], FiniteCheck]:
    """Means over the global batch on the last stage, none elsewhere, and whether numbers were bad.

    One all-reduce over ``dp_cp``. What counts nothing is the sum of the microbatches' parts, which
    are divided already. Nothing of the same name is missing in another microbatch.
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
    dist.all_reduce(totals, group=groups.dp_cp)
    means = {
        name: total if count == 0 else total / count
        for name, (total, count) in zip(names, totals[:-1].tolist(), strict=True)
    }
    return means, FiniteCheck((totals[-1] > 0).to(torch.int32))
