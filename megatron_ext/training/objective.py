"""The objective that a run names, and the constants that it reads over the whole run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

import torch

from megatron_ext.distributed.vocab_parallel import VocabShard
from megatron_ext.errors import ConfigError, LossError
from megatron_ext.losses import (
    LOSS_REGISTRY,
    BoundaryColumns,
    CompletionSource,
    CompletionTable,
    LearnedProjection,
    Needs,
    NextTokenLoss,
    Objective,
    PrefixTable,
    ProjectionShard,
    RepeatTable,
    StopSet,
    VocabularyMatch,
)
from megatron_ext.losses.objective import LAST_LAYER, FusedObjective, ModelPair, layer_number
from megatron_ext.ops.prefix_masses import PrefixColumns
from megatron_ext.projection import SparseProjection
from megatron_ext.projection.layout import VocabularyLayout
from megatron_ext.tokenizers import MegatronTokenizerText
from megatron_ext.tokenizers.token_bytes import TokenBytes
from megatron_ext.training.configuration.config import LossConfig, TeacherConfig
from megatron_ext.training.run_plan import TeacherPlan
from megatron_ext.typed_mapping import build_config

_PROJECTORS: Final = "projectors"


def make_objective(loss: LossConfig, *, section: str = "loss") -> Objective:
    """The objective of ``loss`` with its options.

    Projectors are a stand-in, which only serves to check and count.

    Args:
        section: Section of the configuration with the options, for errors.

    Raises:
        UnknownNameError: There is no such objective.
        ConfigError: The objective does not have an option, or cannot use its value.
    """
    kind: Any = LOSS_REGISTRY[loss.objective]
    values = dict(loss.options)
    where = partial(_where, section)
    if loss.temperature is not None and loss.objective != "next_token":
        if "temperature" in values:
            raise ConfigError(
                "the temperature is given twice",
                where=where(("temperature",)),
                got=f"{values['temperature']}, and loss.temperature {loss.temperature}",
                fix="remove one of them",
            )
        values["temperature"] = loss.temperature
    if getattr(kind, "projector_starts", ()):
        projector_start(loss, section=section)
        values[_PROJECTORS] = kind.projector_kind(student_hidden=1, teacher_hidden=1)
    try:
        return build_config(kind, values, where)  # type: ignore[no-any-return]
    except LossError as error:
        raise ConfigError(str(error), where=where(())) from error


def teacher_objective(teacher: TeacherPlan) -> Objective:
    """The objective for one teacher.

    Raises:
        ConfigError: The objective does not have an option, or cannot use its value.
    """
    return make_objective(teacher.loss, section=teacher.options_section)


def next_token_beside(loss: LossConfig, objectives: Iterable[Objective]) -> NextTokenLoss:
    """The cross-entropy of a run, by the implementation of its objectives if all have the same."""
    if loss.objective == "next_token":
        alone = make_objective(loss)
        assert isinstance(alone, NextTokenLoss)
        return alone
    chosen = {each.implementation for each in objectives if isinstance(each, FusedObjective)}
    return NextTokenLoss(implementation=chosen.pop() if len(chosen) == 1 else "auto")


def with_projectors(
    objective: Objective, teacher: TeacherPlan, pair: ModelPair
) -> tuple[Objective, torch.nn.Module]:
    """The objective with projectors of its own in the stand-in's place, and these.

    Collectives: those of ``Objective.make_projectors``.

    Raises:
        ConfigError: Projectors that the models cannot have.
    """
    section = teacher.options_section
    start = projector_start(teacher.loss, section=section)
    try:
        projectors = objective.make_projectors(start, pair)
    except LossError as error:
        raise ConfigError(str(error), where=_where(section, (_PROJECTORS,))) from error
    return replace(objective, projectors=projectors), projectors  # type: ignore[type-var]


def lower_layers(teacher: TeacherPlan, *, of_student: bool) -> tuple[int, ...]:
    """Numbers from 1 of the layers below the last whose states the objective reads, ascending.

    Args:
        of_student: The student's; otherwise the teacher's.

    Raises:
        ConfigError: There is no such layer.
    """
    model = teacher.student if of_student else teacher.config.model
    pairs = teacher_objective(teacher).needs.layers
    try:
        numbers = {layer_number(pair[0 if of_student else 1], model.num_layers) for pair in pairs}
    except LossError as error:
        where = _where(teacher.options_section, ("layers",))
        side = "student" if of_student else "teacher"
        raise ConfigError(f"{side}: {error}", where=where) from error
    return tuple(sorted(numbers - {LAST_LAYER}))


def reads_student_ids(teacher: TeacherPlan) -> bool:
    """Whether the teacher is compared with the student position by position and id by id."""
    if teacher.loss.teacher_mode == "averaged_logits":
        return True
    return teacher_objective(teacher).needs.same_tokenizer


def share_model(one: TeacherPlan, other: TeacherPlan) -> bool:
    """Whether one model on the student's ranks can be both teachers: what differs is the objective
    and the weight of its term."""

    def model_of(teacher: TeacherPlan) -> TeacherConfig:
        return replace(
            teacher.config,
            objective=None,
            options={},
            temperature=None,
            weight=1.0,
            sources=(),
            projection=None,
        )

    config = one.config
    is_here = config.cache is None and not config.is_remote
    is_cut_alike = reads_student_ids(one) == reads_student_ids(other)
    return is_here and is_cut_alike and model_of(one) == model_of(other)


def state_layers(teachers: Mapping[str, TeacherPlan]) -> dict[str, int]:
    """Number of layers, the last included, whose states are targets of each model; by the first of
    the teachers that share it."""
    layers: dict[str, set[int]] = {}
    for name, teacher in teachers.items():
        first = next((n for n in layers if share_model(teachers[n], teacher)), name)
        layers.setdefault(first, {LAST_LAYER}).update(lower_layers(teacher, of_student=False))
    return {name: len(numbers) for name, numbers in layers.items()}


def head_rows(teacher: TeacherPlan, vocab_size: int) -> int:
    """Rows of a teacher's whole head on the ranks that run it, padding included.

    As many as the student's where both are compared id by id, so that each rank has the same ids of
    both; models of one family are published with different padding. Rows behind the ids are never
    read, so a checkpoint may have more or fewer.

    Args:
        vocab_size: Number of the teacher's ids.
    """
    model = teacher.student if reads_student_ids(teacher) else teacher.config.model
    return model.head_rows(vocab_size, tensor_ranks=teacher.parallel.tensor_model_parallel_size)


def projector_start(loss: LossConfig, *, section: str = "loss") -> str:
    """The start of the objective's projectors that the options choose.

    Raises:
        ConfigError: They name another.
    """
    kind: Any = LOSS_REGISTRY[loss.objective]
    starts: tuple[str, ...] = kind.projector_starts
    start = loss.options.get(_PROJECTORS, starts[0])
    if start not in starts:
        raise ConfigError(
            "no such start of projectors",
            where=_where(section, (_PROJECTORS,)),
            got=repr(start),
            expected=f"one of {', '.join(starts)}",
        )
    return str(start)


def _where(section: str, keys: tuple[str, ...]) -> str:
    return ".".join((section, "options", *keys))


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConstants:
    """Inputs of an objective that stay the same over a run; made once, on the last stage.

    Each is None where the objective does not read it; see ``DistillationInputs``.
    """

    projection: ProjectionShard | None = None

    match: VocabularyMatch | None = None

    boundary: BoundaryColumns | None = None

    word_starts: torch.Tensor | None = None
    """bool [V] by the student's labels, for ``KnownAhead``."""

    learned: LearnedProjection | None = None
    """A learned projection, a submodule of the student, in place of ``projection``."""

    same_tokens: torch.Tensor | None = None
    """The result of ``validation.same_tokens``, in a run that measures on held-out text."""

    completion_table: CompletionSource | None = None
    """Table in which each batch's completions are looked up, on the host."""

    prefix_columns: PrefixColumns | None = None
    """Columns of the prefixes of a ``PrefixTable``."""

    stops: StopSet | None = None
    """Tokens with which the teacher ends a text, in a run in which the student samples."""

    def current_projection(self) -> ProjectionShard | None:
        """The projection, with its current shares where they are learned."""
        return self.projection if self.learned is None else self.learned()

    @classmethod
    def of(
        cls,
        needs: Needs,
        *,
        tokenizers: tuple[MegatronTokenizerText, MegatronTokenizerText],
        shards: tuple[VocabShard, VocabShard],
        projection: SparseProjection | None,
        layout: VocabularyLayout | None = None,
        device: torch.device,
    ) -> RunConstants:
        """The constants that ``needs`` names, of a pair of student and teacher.

        Args:
            projection: Projection of the pair; None where it is not needed.
            layout: Order of both heads' rows; None for the order of ids. The completion table is
                in the order of ids in either case, like the batches that it is applied to.

        Collectives: for boundaries an all-gather of bytes over the student's shards.

        Raises:
            MegatronExtError: The pair lacks what the objective needs.
        """
        student_shard, teacher_shard = shards
        shard = match = boundary = word_starts = columns = None
        table: CompletionSource | None = None
        if projection is not None and needs.shard:
            shard = ProjectionShard.from_projection(
                projection.permuted(layout) if layout else projection,
                student_shard=student_shard,
                teacher_shard=teacher_shard,
                device=device,
            )
        if projection is not None and needs.match:
            partition = projection.partition(needs.min_share)
            match = VocabularyMatch.from_partition(
                partition.permuted(layout) if layout else partition, device
            )
        if needs.boundary:
            student, teacher = map(TokenBytes.of, tokenizers)
            boundary = BoundaryColumns.at_word_starts(
                student,
                teacher,
                student_shard=student_shard,
                teacher_shard=teacher_shard,
                layout=layout,
                device=device,
            )
            word_starts = boundary.of_labels(student_shard) if needs.word_starts else None
        if needs.completions == "chunks":
            table = CompletionTable.from_tokenizers(*tokenizers)
        if needs.completions == "prefixes":
            assert projection is not None
            partition = projection.partition(needs.min_share)
            partners = partition.common_student, partition.common_teacher
            prefixes = PrefixTable.from_tokenizers(*tokenizers, partners)
            columns = prefixes.columns(student_shard, teacher_shard, layout=layout, device=device)
            table = prefixes
        if needs.completions == "repeats":
            assert projection is not None
            table = RepeatTable.of(projection, *tokenizers)
        return cls(
            projection=shard,
            match=match,
            boundary=boundary,
            word_starts=word_starts,
            completion_table=table,
            prefix_columns=columns,
        )
