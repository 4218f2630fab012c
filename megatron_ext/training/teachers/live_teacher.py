"""A teacher of a run on one rank, and its model under megatron-core or transformers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from megatron.core.models.gpt import GPTModel

from megatron_ext.distributed.context_parallel import ContextRank
from megatron_ext.distributed.process_groups import ProcessGroups
from megatron_ext.distributed.vocab_parallel import VocabShard
from megatron_ext.errors import ConfigError
from megatron_ext.losses import BoundaryColumns
from megatron_ext.projection import SparseProjection
from megatron_ext.teachers import Teacher
from megatron_ext.teachers.causal_lm import load_causal_lm
from megatron_ext.teachers.formed_targets import FormedTargets
from megatron_ext.teachers.huggingface_teacher import HuggingFaceTeacher, StageWithoutTeacher
from megatron_ext.teachers.megatron_teacher import (
    HostWeights,
    MegatronTeacher,
    OffloadedTeacher,
    head_weight,
)
from megatron_ext.teachers.target_form import TargetForm
from megatron_ext.tokenizers import MegatronTokenizerText
from megatron_ext.tokenizers.token_bytes import TokenBytes
from megatron_ext.training.inputs import Inputs
from megatron_ext.training.megatron_models.first_weights import frozen_teacher, teacher_vocab_shard
from megatron_ext.training.megatron_models.models import DTYPES
from megatron_ext.training.run_plan import RunPlan, TeacherPlan
from megatron_ext.training.teachers.cached_teacher import CachedTeacher
from megatron_ext.training.teachers.student_average import StudentAverage
from megatron_ext.training.vocabulary_layout import RunLayout


@dataclass(frozen=True, slots=True, kw_only=True)
class StudentParts:
    """A run on this rank before its teachers are built."""

    plan: RunPlan
    inputs: Inputs
    groups: ProcessGroups

    chunks: list[GPTModel]
    """The student's, with its first weights and not wrapped yet."""

    shard: VocabShard
    """This rank's columns of the student's vocabulary."""

    def tokenizer(self, teacher: TeacherPlan) -> MegatronTokenizerText:
        """The tokenizer of a teacher."""
        return self.inputs.teachers[teacher.name].tokenizer


class LoadedTeacher(NamedTuple):
    """One teacher of a run on this rank, loaded."""

    plan: TeacherPlan

    shard: VocabShard
    """This rank's columns of its vocabulary."""

    projection: SparseProjection | None
    """The result of ``run_projection``, in the order of ids."""

    head: torch.Tensor | None = None
    """[Vp, D] this rank's rows of its head on the last stage; None for a remote model and for
    cached targets."""

    teacher: Teacher | None = None
    """Predicts microbatches; None where targets are read from a cache."""

    cached: CachedTeacher | None = None
    """Reads targets from a cache; None where the teacher predicts."""

    laid_out: RunLayout | None = None
    """Order of both heads' rows; None for the order of ids."""

    average: StudentAverage | None = None
    """The average of the student that it is; None for a frozen model."""


class LiveTeacher(NamedTuple):
    """A loaded teacher on one rank, with its weights on the host between batches if offloaded."""

    teacher: Teacher

    shard: VocabShard
    """This rank's columns of its vocabulary."""

    head: torch.Tensor | None
    """[Vp, D] on the last stage; None on the others, and for a model whose targets are logits."""


def live_teacher(
    teacher: TeacherPlan,
    tokenizer: MegatronTokenizerText,
    groups: ProcessGroups,
    *,
    layers: tuple[int, ...] = (),
) -> LiveTeacher:
    """Build and load a teacher.

    Args:
        tokenizer: The teacher's.
        layers: Numbers from 1 of layers below the last whose states are targets, too, ascending.

    Collectives: those that build a model of megatron-core, or of ``teacher_vocab_shard``.

    Raises:
        CheckpointError: It cannot be loaded.
    """
    if teacher.config.library == "huggingface":
        return _of_huggingface(teacher, tokenizer, groups, layers)
    chunks, shard = frozen_teacher(teacher, tokenizer, groups)
    offload = teacher.config.offload
    return live_megatron_teacher(chunks, shard, groups, offload=offload, layers=layers)


def live_megatron_teacher(
    chunks: Sequence[GPTModel],
    shard: VocabShard,
    groups: ProcessGroups,
    *,
    offload: bool,
    layers: tuple[int, ...] = (),
) -> LiveTeacher:
    """The teacher of a loaded megatron-core model; ``layers`` as in ``live_teacher``."""
    head = head_weight(chunks[-1]) if groups.is_last_stage else None
    teacher: Teacher = MegatronTeacher(chunks, shard=shard, layers=layers)
    if offload:
        # Objectives read the head while the student runs.
        teacher = OffloadedTeacher(
            teacher, HostWeights(chunks, kept=[] if head is None else [head])
        )
    return LiveTeacher(teacher, shard, head)


def check_gives_hidden(
    teacher: LiveTeacher, groups: ProcessGroups, *, where: str, why: str
) -> None:
    """Check that a teacher's targets are hidden states.

    Args:
        where: Configuration key that needs them, for the error.
        why: Beginning of the error message: the subject and verb that need hidden states.

    Raises:
        ConfigError: They are logits; on the last stage.
    """
    if groups.is_last_stage and teacher.head is None:
        raise ConfigError(
            f"{why} hidden states whose product with the head is the teacher's logits",
            where=where,
            got="a model that does more with its logits, such as capping them or adding a bias",
            fix="take another objective, or another kind of targets",
        )


def formed_targets(
    form: TargetForm,
    tokenizer: MegatronTokenizerText,
    shard: VocabShard,
    groups: ProcessGroups,
    *,
    tile_rows: int,
) -> FormedTargets:
    """The converter of a teacher's targets to a form.

    Args:
        tokenizer: The teacher's.
        tile_rows: As in ``FormedTargets``.
    """
    boundary = None
    if form.kind == "label":
        tokens = TokenBytes.of(tokenizer)
        boundary = BoundaryColumns.at_word_starts(
            tokens, tokens, student_shard=shard, teacher_shard=shard, device=groups.device
        ).teacher
    context = ContextRank.of(groups.cp)
    return FormedTargets(form=form, boundary=boundary, tile_rows=tile_rows, context=context)


def _of_huggingface(
    teacher: TeacherPlan,
    tokenizer: MegatronTokenizerText,
    groups: ProcessGroups,
    layers: tuple[int, ...],
) -> LiveTeacher:
    """A whole model on each rank of the last stage, and nothing on the others."""
    shard = teacher_vocab_shard(teacher, tokenizer, groups)
    if not groups.is_last_stage:
        return LiveTeacher(StageWithoutTeacher(), shard, None)
    model = load_causal_lm(
        teacher.checkpoint,
        dtype=DTYPES[teacher.training.precision],
        device=groups.device,
        vocab_size=tokenizer.vocab_size,
        weight_precision=teacher.config.weight_precision,
    )
    offload = teacher.config.offload
    live = HuggingFaceTeacher(
        model,
        shard=shard,
        group=groups.tp_cp,
        context=ContextRank.of(groups.cp),
        keeps_head=offload,
        layers=layers,
    )
    if not offload:
        return LiveTeacher(live, shard, live.head_weight)
    weights = HostWeights([live.module])
    return LiveTeacher(OffloadedTeacher(live, weights), shard, live.head_weight)
