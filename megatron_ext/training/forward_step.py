"""The student's forward step for megatron-core's schedules: one microbatch forward, and its loss.

A loss is a sum. It is divided by the count over the global batch, which every rank knows before the
first forward pass because it follows from the data alone; so the loss and its gradient do not
depend on how the batch is cut into microbatches and replicas.
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
from megatron_ext.constants import IGNORE_INDEX
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
from megatron_ext.losses.diagnostics import ONE_TEACHER, FiniteCheck, check_finite
from megatron_ext.losses.linear import LinearDistillation, no_logits
from megatron_ext.losses.objective import LAST_LAYER
from megatron_ext.ops.token_log_prob import token_log_prob
from megatron_ext.teachers.megatron_teacher import without_head
from megatron_ext.training.megatron_models.experts import padding_options
from megatron_ext.training.megatron_models.models import has_head
from megatron_ext.training.megatron_models.student_head import (
    Head,
    StudentHidden,
    head_of,
)
from megatron_ext.training.microbatch import Microbatch, MicrobatchWithTargets
from megatron_ext.training.surprise import Surprise, row_surprise
from megatron_ext.training.teacher_term import TeacherTerm


@dataclass(frozen=True, slots=True)
class GlobalCounts:
    """Denominators of the terms of the loss, over a global batch."""

    tokens: int
    """Trained labels of the student."""

    recorded: int
    """Those that it has not sampled itself."""

    of_parts: Mapping[str, int]
    """Numbers of chunks or labels that the teachers' objectives sum over, by count name."""

    chunk_counts: ChunkCounts
    """Chunks by size, and labels in none."""

    @property
    def chunks(self) -> int:
        """Chunks of any size."""
        return self.chunk_counts.chunks

    @property
    def compared(self) -> int:
        """Sum of the counts of all teachers' objectives."""
        return sum(self.of_parts.values())

    @classmethod
    def ahead(cls, batches: Sequence[Microbatch], groups: ProcessGroups) -> GlobalCounts | None:
        """Counts before the teachers have run; None where the data alone does not give them.

        Collectives: with several replicas that of ``of``, where the result is not None.
        """
        if any(batch.compared is None for batch in batches):
            return None
        return cls._reduced(batches, [batch.compared or {} for batch in batches], groups)

    @classmethod
    def of(
        cls, microbatches: Sequence[MicrobatchWithTargets], groups: ProcessGroups, term: TeacherTerm
    ) -> GlobalCounts:
        """Counts over all microbatches and replicas, for which the host waits; with several
        replicas one all-reduce over ``dp``.

        Ranks that share a replica's sequences know all of its rows, and count the same.
        """
        counted = [term.counts(microbatch) for microbatch in microbatches]
        sums = {name: torch.stack([of_one[name] for of_one in counted]) for name in counted[0]}
        totals = torch.stack([each.sum() for each in sums.values()]).tolist()
        compared = [dict(zip(sums, totals, strict=True))]
        return cls._reduced([microbatch.batch for microbatch in microbatches], compared, groups)

    @classmethod
    def _reduced(
        cls,
        batches: Sequence[Microbatch],
        compared: Sequence[Mapping[str, int]],
        groups: ProcessGroups,
    ) -> GlobalCounts:
        chunk_counts = astuple(sum((b.chunk_counts for b in batches), ChunkCounts()))
        parts = list(compared[0])
        tokens = sum(b.token_count for b in batches)
        counts = [tokens, tokens - sum(b.sampled_count for b in batches), *chunk_counts]
        counts += [sum(of_one[name] for of_one in compared) for name in parts]
        if dist.get_world_size(groups.dp) > 1:
            on_device = torch.tensor(counts, device=groups.device)
            dist.all_reduce(on_device, group=groups.dp)
            counts = on_device.tolist()
        tokens, recorded, *rest = counts
        names = [item.name for item in fields(ChunkCounts)]
        return cls(
            tokens=tokens,
            recorded=recorded,
            of_parts=dict(zip(parts, rest[len(names) :], strict=True)),
            chunk_counts=ChunkCounts(**dict(zip(names, rest, strict=False))),
        )


Checks = Mapping[str, torch.Tensor | None]
"""``FiniteCheck.bad`` [1, 2] by teacher; None: the output of its part has it."""


def _told(output: LossOutput) -> torch.Tensor:
    assert output.bad is not None
    return output.bad()[None]


class StepReport(NamedTuple):
    """Metrics of one microbatch, on the device."""

    metrics: dict[str, SumCount]

    shares: dict[str, torch.Tensor]
    """Its shares of sums whose parts are divided by counts over the global batch."""

    finite: FiniteCheck

    surprise: Surprise | None = None
    """That at the microbatch's logged row."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StudentStep:
    """A ``forward_step_func`` for megatron-core's schedules over microbatches with targets."""

    shard: VocabShard
    next_token: Objective

    term: TeacherTerm | None = None
    """The distillation term; None in a run that does not distil."""

    hidden: StudentHidden | None = None
    """The student's hidden states, on the last stage, for objectives that read them."""

    linear: Mapping[str, LinearDistillation] | None = None
    """Linear forms by teacher, which compute the loss from hidden states; see ``linear_forms``.
    None where the model makes logits."""

    counts: GlobalCounts = GlobalCounts(
        tokens=0, recorded=0, of_parts={}, chunk_counts=ChunkCounts()
    )

    term_weights: Mapping[str, float] = field(default_factory=lambda: {"kd": 1.0, "ce": 1.0})
    """Weights of the terms for this global batch."""

    teacher_weights: torch.Tensor | None = None
    """[P] weights of the teachers for this global batch; None for static ones."""

    gradients: LayerGradients | None = None
    """Measures each term's gradient, on the last stage, where the weights follow it."""

    sampling_temperature: float | None = None
    """Temperature of an engine that is not the student itself, with which the student's
    log-probabilities of samples are compared; None where they are not."""

    def __call__(
        self, microbatches: Iterator[MicrobatchWithTargets], model: Any
    ) -> tuple[torch.Tensor, Any]:
        """The stage's output and the function that turns it into a loss."""
        microbatch = next(microbatches)
        inputs = microbatch.batch.student
        is_headless = self.linear is not None and has_head(model)
        with without_head(model) if is_headless else nullcontext():
            output = model(
                inputs.tokens,
                inputs.position_ids,
                inputs.attention_mask,
                **padding_options(microbatch.batch, model),
            )
        if not has_head(model):
            return output, partial(self._loss, microbatch, {})
        if is_headless:
            head = head_of(model)
            return output, partial(self._loss_from_hidden, microbatch, head)
        # Taken now: a pipeline runs other microbatches forward before it asks for this loss.
        return output, partial(self._loss, microbatch, self.hidden.take() if self.hidden else {})

    def _loss(
        self,
        microbatch: MicrobatchWithTargets,
        states: Mapping[int, torch.Tensor],
        logits: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor, StepReport]:
        """megatron-core's triple: this microbatch's share of the loss, 0 tokens, and its report."""
        head = self.hidden.head_weight if self.hidden else None
        plan, checks = self._plan(microbatch, self._student(microbatch, logits, states, head))
        surprise = self._surprise(microbatch, logits)
        mismatch = self._mismatch(microbatch, logits)
        if self.gradients is None:
            # The logits are not read again, so the gradient may take their place.
            loss = plan.loss(self._counts(), in_place=True)
        else:
            combined, counts = plan.outputs(), self._counts()
            self.gradients.add(combined.terms(counts))
            loss = Loss(total=combined.total(counts), outputs=dict(combined.outputs))
        total, no_tokens, report = self._report(plan, loss, checks)
        return (
            total,
            no_tokens,
            report._replace(metrics=report.metrics | mismatch, surprise=surprise),
        )

    def _surprise(
        self,
        microbatch: MicrobatchWithTargets,
        output: torch.Tensor,
        head_weight: torch.Tensor | None = None,
    ) -> Surprise | None:
        """``row_surprise``, of the teachers that teach the row."""
        batch = microbatch.batch
        if self.term is None or batch.logged_row is None:
            return None
        source, routes = batch.sides.sources[batch.logged_row], self.term.routes
        teachers = [n for n in self.term.names if n not in routes or source in routes[n]]
        return row_surprise(
            microbatch, output, self.shard, teachers=teachers, head_weight=head_weight
        )

    @torch.no_grad()
    def _mismatch(
        self, microbatch: MicrobatchWithTargets, logits: torch.Tensor
    ) -> dict[str, SumCount]:
        """Difference in nats of student and engine at the labels that the engine has sampled; the
        collectives of ``token_log_prob``."""
        if self.sampling_temperature is None:
            return {}
        batch = microbatch.batch
        sampled = batch.sampled_log_probs
        if sampled is None:
            nothing = torch.zeros((), device=logits.device)
            return {"rollouts/mismatch": (nothing, nothing.long())}
        labels = batch.student.labels.masked_fill(sampled.isnan(), IGNORE_INDEX).flatten()
        rows = logits.flatten(0, 1).float() / self.sampling_temperature
        own = token_log_prob(rows, labels, self.shard)
        is_sampled = labels != IGNORE_INDEX
        apart = torch.where(is_sampled, (own - sampled.flatten()).abs(), 0.0)
        return {"rollouts/mismatch": (apart.sum(), is_sampled.sum())}

    def _loss_from_hidden(
        self, microbatch: MicrobatchWithTargets, head: Head, output: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, StepReport]:
        """``_loss`` from a stage's last hidden states [T, B, D]."""
        assert self.linear is not None
        hidden = head.whole(output, self.shard.group)
        logits = no_logits(hidden, self.shard)
        plan, checks = self._plan(
            microbatch, self._student(microbatch, logits, {LAST_LAYER: hidden}, head.weight)
        )
        surprise = self._surprise(microbatch, hidden, head.weight)
        loss = plan.loss_from_hidden(self._counts(), self.linear, microbatch.batch.tiles)
        total, no_tokens, report = self._report(plan, loss, checks)
        return total, no_tokens, report._replace(surprise=surprise)

    def _student(
        self,
        microbatch: MicrobatchWithTargets,
        logits: torch.Tensor,
        states: Mapping[int, torch.Tensor],
        head_weight: torch.Tensor | None,
    ) -> DistillationInputs:
        return DistillationInputs(
            student_logits=logits,
            student_shard=self.shard,
            labels=microbatch.batch.student.labels,
            student_hidden=states.get(LAST_LAYER),
            student_states={n: states[n] for n in states if n != LAST_LAYER},
            student_head_weight=head_weight,
        )

    def _plan(
        self, microbatch: MicrobatchWithTargets, student: DistillationInputs
    ) -> tuple[LossPlan, Checks]:
        """The loss of a microbatch, and a check that its inputs are finite."""
        of_teachers = self.term.inputs(microbatch, student) if self.term else {}
        recorded = student
        if microbatch.batch.sides.sampled_log_probs is not None:
            # Cross-entropy would teach the student its own samples as if they were right.
            recorded = replace(student, labels=microbatch.batch.recorded_labels)
        parts = {
            "ce": LossPart(objective=self.next_token, inputs=recorded, term="ce", count_name="ce")
        }
        if self.term is not None:
            parts |= self.term.aggregator(of_teachers, weights=self.teacher_weights)
        plan = LossPlan(parts=parts, term_weights=self.term_weights)
        checks = {
            name: None
            if self._is_told(parts.get(self._part_name(name)), inputs)
            else self._checked(inputs)
            for name, inputs in (of_teachers or {ONE_TEACHER[0]: student}).items()
        }
        return plan, checks

    def _part_name(self, teacher: str) -> str:
        return self.term.aggregator.part_name(teacher) if self.term else "ce"

    def _is_told(self, part: LossPart | None, inputs: DistillationInputs) -> bool:
        """Whether the output of a teacher's part has the flags of these inputs.

        Of the linear form hidden states are checked, which are fewer.
        """
        if part is None or self.linear is not None or part.inputs.teacher is not inputs.teacher:
            return False
        return part.objective.tells_bad(part.inputs)

    def _checked(self, inputs: DistillationInputs) -> torch.Tensor:
        """Flags from a read of all numbers, before the gradient takes the place of the logits."""
        return check_finite(self._checkable(inputs)).bad

    def _checkable(self, inputs: DistillationInputs) -> DistillationInputs:
        """``inputs`` with hidden states in place of logits that the linear form does not make."""
        hidden = inputs.student_hidden
        if self.linear is None or hidden is None:
            return inputs
        width = hidden.shape[-1]
        whole = VocabShard(start=0, stop=width, vocab_size=width, group=self.shard.group)
        return replace(inputs, student_logits=hidden, student_shard=whole)

    def _counts(self) -> dict[str, torch.Tensor | int]:
        return {"ce": self.counts.recorded, **self.counts.of_parts}

    def _report(
        self, plan: LossPlan, loss: Loss, checks: Checks
    ) -> tuple[torch.Tensor, torch.Tensor, StepReport]:
        total = loss.total
        no_tokens = torch.zeros((), dtype=torch.int, device=total.device)
        metrics, shares = {}, {"loss": total.detach()}
        of_teachers = []
        for name, output in loss.outputs.items():
            metric_name = self.term.metric_name(name) if self.term else name
            metrics[metric_name] = (output.loss_sum.detach(), output.count)
            metrics |= {f"{metric_name}/{part}": value for part, value in output.metrics.items()}
            if metric_name != name or name == "ce":
                continue
            part = plan.parts[name]
            count = max(self.counts.of_parts[part.count_name], 1)
            of_teachers.append(part.weight * output.loss_sum.detach() / count)
            if isinstance(part.weight, torch.Tensor):
                metrics[f"{name}/weight"] = (part.weight, torch.ones_like(no_tokens))
        if of_teachers and self.counts.compared:
            shares["kd"] = torch.stack(of_teachers).sum()
        flags = [
            bad if bad is not None else _told(loss.outputs[self._part_name(name)])
            for name, bad in checks.items()
        ]
        finite = FiniteCheck(torch.cat(flags), tuple(checks))
        return total, no_tokens, StepReport(metrics, shares, finite)


def _by_dtype(report: StepReport) -> Iterator[tuple[list[tuple[str, int]], torch.Tensor]]:
    """All sums and counts of a dtype in one tensor, with the name of each and its place in the
    pair: an operation for each dtype, not for each number."""
    parts = {name: (share,) for name, share in report.shares.items()} | report.metrics
    numbers = {
        (name, place): part for name, pair in parts.items() for place, part in enumerate(pair)
    }
    for dtype in dict.fromkeys(part.dtype for part in numbers.values()):
        places = [place for place, part in numbers.items() if part.dtype == dtype]
        yield places, torch.stack([numbers[place] for place in places])


def reduce_reports(
    reports: Sequence[StepReport], groups: ProcessGroups
) -> tuple[dict[str, Any], FiniteCheck]:
    """Means over the global batch, and the finite check, on the host; on the last stage, empty on
    the others.

    A mean over nothing is None. One all-reduce over ``dp_cp``. Every microbatch has the same
    metrics.
    """
    if not reports:
        return {}, FiniteCheck(torch.zeros(1, 2, dtype=torch.int32))
    numbers = [list(_by_dtype(report)) for report in reports]
    bad = torch.stack([report.finite.bad for report in reports]).double().sum(dim=0)
    sums = [
        torch.stack([values for _, values in parts]).double().sum(dim=0)
        for parts in zip(*numbers, strict=True)
    ]
    totals = torch.cat([*sums, bad.flatten()])
    dist.all_reduce(totals, group=groups.dp_cp)
    # The only time in a step that the host waits for its forward and backward passes.
    totals = totals.cpu()
    places = [place for part, _ in numbers[0] for place in part]
    found = dict(zip(places, totals.tolist(), strict=False))
    bad = totals[len(places) :].view(bad.shape)
    means: dict[str, float | None] = {name: found[name, 0] for name in reports[0].shares}
    for name in reports[0].metrics:
        total, count = found[name, 0], found[name, 1]
        means[name] = total / count if count else None
    return means, reports[0].finite._replace(bad=(bad > 0).to(torch.int32))
