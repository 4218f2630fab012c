"""Which tokens two vocabularies have in common. N common tokens, Vs Vt vocabularies."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from megatron_ext.projection.vocabulary_partition import VocabularyPartition


@dataclass(frozen=True, slots=True, kw_only=True)
class VocabularyMatch:
    """Pairs of a student and a teacher token that stand for the same; one to one.

    The same on every rank: ids are global, and an objective cuts them to its shards.
    """

    common_student: torch.Tensor
    """[N] int64, ascending."""

    common_teacher: torch.Tensor
    """[N] int64: ``common_teacher[n]`` stands for what ``common_student[n]`` does."""

    def student_of(self, teacher_vocab: int) -> torch.Tensor:
        """int64 [Vt]: the student token of each teacher token, -1 where there is none."""
        partner = self.common_teacher.new_full((teacher_vocab,), -1)
        return partner.index_copy_(0, self.common_teacher, self.common_student)

    @classmethod
    def from_partition(
        cls, partition: VocabularyPartition, device: torch.device | str = "cpu"
    ) -> VocabularyMatch:
        """The common part of a projection's partition."""
        return cls(
            common_student=torch.from_numpy(partition.common_student.copy()).to(device),
            common_teacher=torch.from_numpy(partition.common_teacher.copy()).to(device),
        )
