"""A microbatch by places of a vocabulary layout."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from megatron_ext.losses import IdTable
from megatron_ext.projection.layout import VocabularyLayout
from megatron_ext.training.config import ModelConfig
from megatron_ext.training.data.microbatch import Microbatch, TokenBatch


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchPlaces:
    """Looks up what a microbatch has of ids: labels, completions, and inputs of tied models.

    The input embeddings of a model that does not share them with its head stay in the order of the
    ids, and so do its input ids.
    """

    student: IdTable

    teacher: IdTable

    student_is_tied: bool

    teacher_is_tied: bool

    @classmethod
    def of(
        cls,
        layout: VocabularyLayout,
        *,
        student: ModelConfig,
        teacher: ModelConfig,
        device: torch.device,
    ) -> BatchPlaces:
        """The tables of both vocabularies, 8 bytes a token of each on ``device``."""
        return cls(
            student=IdTable.of(layout.student, device),
            teacher=IdTable.of(layout.teacher, device),
            student_is_tied=not student.untie_embeddings_and_output_weights,
            teacher_is_tied=not teacher.untie_embeddings_and_output_weights,
        )

    def __call__(self, batch: Microbatch) -> Microbatch:
        """The same batch for models whose heads are permuted."""
        return replace(
            batch,
            student=_looked_up(batch.student, self.student, self.student_is_tied),
            teachers={
                name: _looked_up(side, self.teacher, self.teacher_is_tied)
                for name, side in batch.teachers.items()
            },
            completions={
                name: completions.by_place(self.student, self.teacher)
                for name, completions in batch.completions.items()
            },
        )


def _looked_up(side: TokenBatch, table: IdTable, is_tied: bool) -> TokenBatch:
    return replace(
        side,
        tokens=table.places_of(side.tokens) if is_tied else side.tokens,
        labels=table.places_of(side.labels),
    )
