"""The distillation term of a run's loss, of one teacher or several. P teachers, B rows."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from megatron_ext.constants import IGNORE_INDEX, NO_CHUNK
from megatron_ext.data.batch import CrossTokenizerBatch
from megatron_ext.distributed.context_parallel import ContextRank
from megatron_ext.distributed.process_groups import ProcessGroups
from megatron_ext.errors import ConfigError, LossError
from megatron_ext.losses import (
    Completions,
    CompletionSource,
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
from megatron_ext.losses.multi_teacher import restricted
from megatron_ext.training.configuration.config import LossConfig
from megatron_ext.training.microbatch import Microbatch, MicrobatchWithTargets
from megatron_ext.training.objective import RunConstants
from megatron_ext.training.run_plan import TeacherPlan


def make_aggregator(
    loss: LossConfig, teachers: Mapping[str, TeacherPlan], objectives: Mapping[str, Objective]
) -> MultiTeacherLossAggregator:
    """The aggregator of the teachers' objectives.

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
    """Inputs, counts and weights of the teachers' objectives, microbatch after microbatch."""

    aggregator: MultiTeacherLossAggregator

    constants: Mapping[str, RunConstants] = field(default_factory=dict)
    """By teacher, on the last stage."""

    is_single: bool = True
    """Whether the only teacher is that of a ``teacher`` section, whose metrics carry no name."""

    context: ContextRank | None = None
    """This rank among those that share every sequence; None where sequences are whole."""

    routes: Mapping[str, frozenset[int]] = field(default_factory=dict)
    """Numbers of the sources of a teacher, for those that do not teach all."""

    @property
    def names(self) -> list[str]:
        """Names of the teachers, in the order of their weights."""
        return list(self.aggregator.teachers)

    def same_tokens(self, teachers: Collection[str]) -> dict[str, torch.Tensor]:
        """Tables for ``measure_held_out``, of those ``teachers`` that have one."""
        tables = {name: self.constants[name].same_tokens for name in self.constants}
        return {
            name: table for name, table in tables.items() if name in teachers and table is not None
        }

    def plans(self, sides: CrossTokenizerBatch) -> dict[str, ContextParallelPlan]:
        """Owners of chunks, for teachers whose objective sums over chunks; on the host.

        Empty where rows are whole, and on stages without the loss.
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

    @property
    def tables(self) -> dict[str, CompletionSource]:
        """Tables of completions, of the teachers that have one."""
        tables = {name: self.constants[name].completion_table for name in self.constants}
        return {name: table for name, table in tables.items() if table is not None}

    def completions(
        self, sides: CrossTokenizerBatch, plans: Mapping[str, ContextParallelPlan] | None = None
    ) -> dict[str, Completions]:
        """Completions of chunks, for teachers that have a table of them; on the host.

        Args:
            plans: The result of ``plans``; completions are of the chunks that this rank owns.
        """
        completions: dict[str, Completions] = {}
        for name, table in self.tables.items():
            alignment = sides.alignments[name]
            labels = sides.student.labels, sides.teachers[name].labels
            plan = (plans or {}).get(name)
            if plan is not None:
                alignment, labels = plan.alignment, plan.labels(*labels)
            completions[name] = table.of_batch(alignment, *labels)
        return completions

    def with_targets(
        self, batches: Sequence[Microbatch], targets: Sequence[Mapping[str, TeacherTargets]]
    ) -> list[MicrobatchWithTargets]:
        """Microbatches with the teachers' targets, which are empty except on the last stage.

        In the mode ``select_teacher`` each row counts for the teacher that predicts it best.
        Collectives, in that mode on the last stage: those of ``MultiTeacherLossAggregator.select``.
        """
        microbatches = []
        for batch, made in zip(batches, targets, strict=True):
            of_batch = {name: self._with_stops(batch, name, made[name]) for name in made}
            known_ahead = {name: self._known_ahead(batch, name) for name in self.names}
            if of_batch and self.aggregator.mode == "select_teacher":
                # Every teacher reads the same bytes of a row, so any number of them will do.
                rows = torch.ones_like(batch.student.labels[:, 0])
                texts = _texts(batch, of_batch, dict.fromkeys(known_ahead, rows))
                known_ahead = self.aggregator.selected(known_ahead, self.aggregator.select(texts))
            microbatches.append(MicrobatchWithTargets(batch, of_batch, known_ahead))
        return microbatches

    def _with_stops(self, batch: Microbatch, name: str, targets: TeacherTargets) -> TeacherTargets:
        """Targets with all of the teacher's stop tokens where the student has stopped."""
        stops, sampled = self.constants[name].stops, batch.sides.sampled_log_probs
        if stops is None or sampled is None:
            return targets
        alignment = batch.sides.alignments[name]
        # The last entry is for rows of no chunk.
        is_sampled = torch.zeros(alignment.chunk_count + 1, dtype=torch.bool, device=sampled.device)
        ids = torch.where(sampled.isnan(), NO_CHUNK, alignment.student_chunk_id)
        is_sampled.index_fill_(0, ids.flatten(), True)
        is_sampled[NO_CHUNK:].fill_(False)
        rows = is_sampled[alignment.teacher_chunk_id]
        if batch.context is not None:
            rows = batch.context.cut(rows)
        return targets.merging(stops, batch.teachers[name].labels, rows)

    def compared(self, batch: Microbatch) -> dict[str, int] | None:
        """Counts by name of a batch on the host; None where they depend on a teacher's predictions,
        or on a table that is on the device."""
        if self.aggregator.mode == "select_teacher":
            return None
        if any(constants.word_starts is not None for constants in self.constants.values()):
            return None
        counts = self.aggregator.counts({n: self._known_ahead(batch, n) for n in self.names})
        return {name: int(count) for name, count in counts.items()}

    def counts(self, microbatch: MicrobatchWithTargets) -> dict[str, torch.Tensor]:
        """int64 scalars by count name, before the student has run."""
        return self.aggregator.counts(microbatch.known_ahead)

    def weights(
        self, microbatches: Sequence[MicrobatchWithTargets], groups: ProcessGroups
    ) -> torch.Tensor | None:
        """[P] fp32 by how well each teacher predicts a global batch; None for static weights.

        Call it on the last stage. Collectives: those of ``scores`` for each microbatch, and one
        all-reduce over ``dp``.
        """
        if self.aggregator.measure is None:
            return None
        totals = torch.stack(
            [
                self.aggregator.scores(
                    _texts(microbatch.batch, microbatch.targets, _byte_counts(microbatch.batch))
                )
                for microbatch in microbatches
            ]
        )
        return self.aggregator.weights(reduce_scores(totals.sum(dim=0), groups.dp))

    def inputs(
        self, microbatch: MicrobatchWithTargets, student: DistillationInputs
    ) -> dict[str, DistillationInputs]:
        """Inputs of the student's and each teacher's predictions, by teacher."""
        return {name: self._inputs(microbatch, student, name) for name in self.names}

    def metric_name(self, part: str) -> str:
        """Name of a part's metric: ``kd`` for a single teacher, ``kd/NAME`` for several."""
        return part.split("/")[0] if self.is_single else part

    def _inputs(
        self, microbatch: MicrobatchWithTargets, student: DistillationInputs, name: str
    ) -> DistillationInputs:
        constants, batch = self.constants[name], microbatch.batch
        known = microbatch.known_ahead[name]
        inputs = replace(
            student,
            labels=_local_labels(batch, known),
            teacher=microbatch.targets[name],
            alignment=known.alignment if batch.context is None else None,
            teacher_labels=batch.teachers[name].labels,
            chunk_mask=known.chunk_mask,
            projection=constants.current_projection(),
            match=constants.match,
            boundary=constants.boundary,
            completions=batch.completions.get(name),
            prefix_columns=constants.prefix_columns,
            sampled_log_probs=batch.sampled_log_probs,
        )
        plan = batch.plans.get(name)
        return inputs if plan is None else plan.inputs(inputs)

    def _known_ahead(self, batch: Microbatch, name: str) -> KnownAhead:
        constants = self.constants.get(name)
        known = KnownAhead(
            labels=batch.whole_labels,
            alignment=batch.sides.alignments[name],
            teacher_labels=batch.whole_labels_of(name),
            word_starts=constants.word_starts if constants else None,
        )
        if name not in self.routes:
            return known
        is_taught = [source in self.routes[name] for source in batch.sides.sources]
        rows = torch.tensor(is_taught, device=known.labels.device)
        return restricted(known, rows, self.aggregator.teachers[name].objective.sums_over)


def _local_labels(batch: Microbatch, known: KnownAhead) -> torch.Tensor:
    """[B, S] labels of this rank's part of the rows, without those that ``known`` leaves out."""
    if batch.context is None:
        return known.labels
    labels = batch.student.labels
    if known.labels is batch.whole_labels:
        return labels
    return labels.masked_fill(batch.context.cut(known.labels) == IGNORE_INDEX, IGNORE_INDEX)


def _texts(
    batch: Microbatch,
    targets: Mapping[str, TeacherTargets],
    byte_counts: Mapping[str, torch.Tensor],
) -> dict[str, TeacherText]:
    """Texts of a microbatch by teacher, with its targets and labels."""
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
    """[B] int64 by teacher. Only the sum over rows has a meaning: bytes are counted by batch."""
    counts = {}
    for name, side in batch.teachers.items():
        counts[name] = torch.zeros_like(side.labels[:, 0])
        counts[name][0] = side.byte_count
    return counts
