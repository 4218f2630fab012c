"""The distillation term of a run: one teacher or several. P teachers, B rows."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from megatron_ext.constants import IGNORE_INDEX
from megatron_ext.data.batch import CrossTokenizerBatch
from megatron_ext.distributed.context_parallel import ContextRank
from megatron_ext.distributed.process_groups import ProcessGroups
from megatron_ext.errors import ConfigError, LossError
from megatron_ext.losses import (
    ChunkCompletions,
    DistillationInputs,
    KnownAhead,
    MultiTeacherLossAggregator,
    Objective,
    TeacherObjective,
    TeacherTargets,
    TeacherText,
    reduce_scores,
)
from megatron_ext.losses.context_parallel import ContextParallelPlan
from megatron_ext.training.config import LossConfig
from megatron_ext.training.microbatch import Lesson, Microbatch
from megatron_ext.training.objective import RunConstants
from megatron_ext.training.run_plan import TeacherPlan


def make_aggregator(
    loss: LossConfig, teachers: Mapping[str, TeacherPlan], objectives: Mapping[str, Objective]
) -> MultiTeacherLossAggregator:
    """The teachers of a run together.

    Args:
        objectives: By teacher, in the order of the configuration.

    Raises:
        ConfigError: Modes, weights and objectives that do not go together.
    """
    try:
        return MultiTeacherLossAggregator(
            teachers={
                name: TeacherObjective(
                    objective=objective,
                    weight=teachers[name].config.weight,
                )
                for name, objective in objectives.items()
            },
            mode=loss.teacher_mode,
            measure=None if loss.teacher_weights == "static" else loss.teacher_weights,
            alpha=loss.teacher_weights_alpha,
            vocab_normalisation=loss.vocab_normalisation,
        )
    except LossError as error:
        raise ConfigError(str(error), where="loss.teacher_mode") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class TeacherTerm:
    """What is learned from the teachers, microbatch after microbatch."""

    aggregator: MultiTeacherLossAggregator

    constants: Mapping[str, RunConstants] = field(default_factory=dict)
    """By teacher, on the last stage."""

    is_single: bool = True
    """Whether there is but the one of a ``teacher`` section: its numbers go without a name."""

    context: ContextRank | None = None
    """This rank among those that share every sequence; None: it has them whole."""

    @property
    def names(self) -> list[str]:
        """Of the teachers, in the order of their weights."""
        return list(self.aggregator.teachers)

    def same_tokens(self, teachers: Collection[str]) -> dict[str, torch.Tensor]:
        """For ``measure_held_out``, of those ``teachers`` that agreement is measured with."""
        tables = {name: self.constants[name].same_tokens for name in self.constants}
        return {
            name: table for name, table in tables.items() if name in teachers and table is not None
        }

    def plans(self, sides: CrossTokenizerBatch) -> dict[str, ContextParallelPlan]:
        """Who owns which chunks, of the teachers that chunks are compared with; on the host.

        Nothing where rows are whole, and on stages without the loss.
        """
        if self.context is None:
            return {}
        return {
            name: ContextParallelPlan.from_alignment(
                sides.alignments[name],
                student=self.context.layout,
                teacher=self.context.layout,
                rank=self.context.rank,
                group=self.context.group,
            )
            for name in self.constants
            if self.aggregator.teachers[name].objective.sums_over == "chunks"
        }

    def completions(
        self, sides: CrossTokenizerBatch, plans: Mapping[str, ContextParallelPlan] | None = None
    ) -> dict[str, ChunkCompletions]:
        """Of the teachers that have a table of them; on the host.

        Args:
            plans: What ``plans`` returned: completions are of the chunks that this rank owns.
        """
        found = {}
        for name, constants in self.constants.items():
            if constants.completion_table is None:
                continue
            alignment = sides.alignments[name]
            labels = sides.student.labels, sides.teachers[name].labels
            plan = (plans or {}).get(name)
            if plan is not None:
                alignment, labels = plan.alignment, plan.labels(*labels)
            found[name] = ChunkCompletions.of(alignment, *labels, constants.completion_table)
        return found

    def lessons(
        self, batches: Sequence[Microbatch], targets: Sequence[Mapping[str, TeacherTargets]]
    ) -> list[Lesson]:
        """Microbatches with what each teacher is asked; targets are empty but on the last stage.

        In the mode ``select_teacher`` a teacher is asked of the rows that it knows best.
        Collectives, in that mode on the last stage: those of ``MultiTeacherLossAggregator.select``.
        """
        lessons = []
        for batch, of_batch in zip(batches, targets, strict=True):
            known = {name: self._known(batch, name) for name in self.names}
            if of_batch and self.aggregator.mode == "select_teacher":
                # Every teacher reads the same bytes of a row: their number decides nothing.
                rows = torch.ones_like(batch.student.labels[:, 0])
                choice = self.aggregator.select(_texts(batch, of_batch, dict.fromkeys(known, rows)))
                known = self.aggregator.selected(known, choice)
            lessons.append(Lesson(batch, of_batch, known))
        return lessons

    def counts(self, lesson: Lesson) -> dict[str, torch.Tensor]:
        """int64 scalars by the count names of the parts, before the student has run."""
        return self.aggregator.counts(lesson.known)

    def weights(self, lessons: Sequence[Lesson], groups: ProcessGroups) -> torch.Tensor | None:
        """[P] fp32 by how well each teacher knows a global batch; None for static ones.

        Call it on the last stage. Collectives: those of ``scores`` for each microbatch, and one
        all-reduce over ``dp``.
        """
        if self.aggregator.measure is None:
            return None
        totals = torch.stack(
            [
                self.aggregator.scores(
                    _texts(lesson.batch, lesson.targets, _byte_counts(lesson.batch))
                )
                for lesson in lessons
            ]
        )
        return self.aggregator.weights(reduce_scores(totals.sum(dim=0), groups.dp))

    def inputs(self, lesson: Lesson, student: DistillationInputs) -> dict[str, DistillationInputs]:
        """The student with each teacher."""
        return {name: self._inputs(lesson, student, name) for name in self.names}

    def metric_name(self, part: str) -> str:
        """What a part is called in the log: ``kd`` of the one teacher, ``kd/NAME`` of others."""
        return part.split("/")[0] if self.is_single else part

    def _inputs(self, lesson: Lesson, student: DistillationInputs, name: str) -> DistillationInputs:
        constants, known, batch = self.constants[name], lesson.known[name], lesson.batch
        inputs = replace(
            student,
            labels=_own_labels(batch, known),
            teacher=lesson.targets[name],
            alignment=known.alignment if batch.context is None else None,
            teacher_labels=batch.teachers[name].labels,
            chunk_mask=known.chunk_mask,
            projection=constants.current_projection(),
            match=constants.match,
            boundary=constants.boundary,
            completions=batch.completions.get(name),
        )
        plan = batch.plans.get(name)
        return inputs if plan is None else plan.inputs(inputs)

    def _known(self, batch: Microbatch, name: str) -> KnownAhead:
        constants = self.constants.get(name)
        return KnownAhead(
            labels=batch.whole_labels,
            alignment=batch.sides.alignments[name],
            teacher_labels=batch.whole_labels_of(name),
            word_starts=constants.word_starts if constants else None,
        )


def _own_labels(batch: Microbatch, known: KnownAhead) -> torch.Tensor:
    """[B, S] labels of this rank's part of the rows, without those that ``known`` leaves out."""
    if batch.context is None:
        return known.labels
    own = batch.student.labels
    if known.labels is batch.whole_labels:
        return own
    return own.masked_fill(batch.context.cut(known.labels) == IGNORE_INDEX, IGNORE_INDEX)


def _texts(
    batch: Microbatch,
    targets: Mapping[str, TeacherTargets],
    byte_counts: Mapping[str, torch.Tensor],
) -> dict[str, TeacherText]:
    """Of the rows of a microbatch, as each teacher reads them."""
    return {
        name: TeacherText(
            targets=targets[name],
            labels=batch.teachers[name].labels,
            byte_counts=counts,
            context_group=None if batch.context is None else batch.context.group,
        )
        for name, counts in byte_counts.items()
    }


def _byte_counts(batch: Microbatch) -> dict[str, torch.Tensor]:
    """[B] int64 by teacher, of which only the sum means anything: bytes are known of a batch."""
    counts = {}
    for name, side in batch.teachers.items():
        counts[name] = torch.zeros_like(side.labels[:, 0])
        counts[name][0] = side.byte_count
    return counts
