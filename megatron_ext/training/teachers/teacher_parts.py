"""Parts of a run that its teachers are built from, and a teacher of a run once it is loaded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from megatron.core.models.gpt import GPTModel

from megatron_ext.distributed.process_groups import ProcessGroups
from megatron_ext.distributed.vocab_parallel import VocabShard
from megatron_ext.projection import SparseProjection
from megatron_ext.teachers import Teacher
from megatron_ext.tokenizers import MegatronTokenizerText
from megatron_ext.training.inputs import Inputs
from megatron_ext.training.run_plan import RunPlan, TeacherPlan
from megatron_ext.training.teachers.cached_teacher import CachedTeacher
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
