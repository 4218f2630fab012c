"""What a run gives each of its teachers, and what the teacher brings to the run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from megatron.core.models.gpt import GPTModel

from megatron_ext.distributed.process_groups import ProcessGroups
from megatron_ext.distributed.vocab_parallel import VocabShard
from megatron_ext.teachers import Teacher
from megatron_ext.tokenizers import MegatronTokenizerText
from megatron_ext.training.inputs import Inputs
from megatron_ext.training.learning_step import TaughtBy
from megatron_ext.training.run_plan import RunPlan, TeacherPlan
from megatron_ext.training.teachers.cached_teacher import CachedTeacher
from megatron_ext.training.vocabulary_layout import RunLayout


@dataclass(frozen=True, slots=True, kw_only=True)
class StudentParts:
    """A run on this rank before it has teachers."""

    plan: RunPlan
    inputs: Inputs
    groups: ProcessGroups

    chunks: list[GPTModel]
    """The student's, with its first weights and not wrapped yet."""

    shard: VocabShard
    """This rank's columns of the student's vocabulary."""

    def teacher(self, name: str) -> TeacherPlan:
        """What is said of a teacher."""
        return self.plan.teachers[name]

    def tokenizer(self, name: str) -> MegatronTokenizerText:
        """A teacher's."""
        return self.inputs.teachers[name].tokenizer


class TeacherParts(NamedTuple):
    """One teacher on this rank."""

    taught_by: TaughtBy
    """What the objectives need to know of it."""

    teacher: Teacher | None = None
    """Predicts microbatches; None where its targets are recorded."""

    cached: CachedTeacher | None = None
    """Has recorded them; None where it predicts."""

    laid_out: RunLayout | None = None
    """The order of both heads, where that is not the ids'."""
