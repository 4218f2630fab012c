"""A teacher that transformers runs, whole on each rank of the student's last stage."""

from __future__ import annotations

from typing import NamedTuple

import torch

from megatron_ext.distributed.context_rank import ContextRank
from megatron_ext.distributed.process_groups import ProcessGroups
from megatron_ext.distributed.vocab_parallel import VocabShard
from megatron_ext.errors import ConfigError
from megatron_ext.teachers import Teacher
from megatron_ext.teachers.causal_lm import load_causal_lm
from megatron_ext.teachers.huggingface_teacher import HuggingFaceTeacher, StageWithoutTeacher
from megatron_ext.teachers.offloaded_teacher import HostWeights, OffloadedTeacher
from megatron_ext.tokenizers import MegatronTokenizerText
from megatron_ext.training.checkpoint_folder import find_checkpoint
from megatron_ext.training.config import DistillConfig
from megatron_ext.training.huggingface.model_check import warn_of_other_tokenizer
from megatron_ext.training.learning_step import TaughtBy, run_projection
from megatron_ext.training.loss_check import teacher_objective
from megatron_ext.training.models import DTYPES
from megatron_ext.training.objective import needs_of
from megatron_ext.training.run_models import teacher_vocab_shard
from megatron_ext.training.run_teachers.teacher_parts import StudentParts, TeacherParts


class HuggingFaceParts(NamedTuple):
    """Such a teacher on one rank."""

    teacher: Teacher

    shard: VocabShard

    head: torch.Tensor | None
    """[Vp, D] on the last stage; None elsewhere, and where targets are logits."""


def teacher_from_huggingface(name: str, run: StudentParts) -> TeacherParts:
    """Load it.

    Collectives: those of ``load_huggingface_teacher`` and ``run_projection``.

    Raises:
        ConfigError: The objective reads hidden states, of which this model's logits are no product.
    """
    config, groups = run.config, run.groups
    parts = load_huggingface_teacher(config, name, run.tokenizer(name), groups)
    if groups.is_last_stage and parts.head is None:
        _check_reads_logits(config, name)
    projection = run_projection(config, run.inputs, name, groups)
    return TeacherParts(
        TaughtBy(name, parts.head, parts.shard, projection, None), teacher=parts.teacher
    )


def load_huggingface_teacher(
    config: DistillConfig, name: str, tokenizer: MegatronTokenizerText, groups: ProcessGroups
) -> HuggingFaceParts:
    """A whole model on each rank of the last stage, where ``offload`` says so with its weights on
    the host, and nothing on the others.

    Collectives: those of ``teacher_vocab_shard``.

    Raises:
        CheckpointError: It cannot be loaded.
    """
    its = config.named_teachers[name]
    shard = teacher_vocab_shard(config, name, tokenizer, groups)
    if not groups.is_last_stage:
        return HuggingFaceParts(StageWithoutTeacher(), shard, None)
    folder = find_checkpoint(its.checkpoint, where=f"{config.section_of(name)}.checkpoint")
    dtype = DTYPES[config.training.precision]
    whole = HuggingFaceTeacher(
        load_causal_lm(folder, dtype=dtype, device=groups.device),
        shard=shard,
        group=groups.tp_cp,
        context=ContextRank.of(groups.cp),
        keeps_head=its.offload,
    )
    if groups.is_main:
        warn_of_other_tokenizer(folder, tokenizer)
    teacher = OffloadedTeacher(whole, HostWeights([whole.module])) if its.offload else whole
    return HuggingFaceParts(teacher, shard, whole.head_weight)


def _check_reads_logits(config: DistillConfig, name: str) -> None:
    if needs_of(teacher_objective(config, name)).hidden:
        objective = config.loss.of_teacher(config.named_teachers[name]).objective
        raise ConfigError(
            f"the objective {objective} reads hidden states whose product with the head is "
            "the teacher's logits",
            where=f"{config.section_of(name)}.checkpoint",
            got="a model that does more with its logits, such as capping them or adding a bias",
            fix="take another objective",
        )
