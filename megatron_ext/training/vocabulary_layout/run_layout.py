"""The vocabulary layout of one run: made, kept in its folder, and applied to its models."""

from __future__ import annotations

from pathlib import Path
from typing import Final, NamedTuple

import torch.distributed as dist

from megatron_ext.distributed.process_groups import ProcessGroups
from megatron_ext.distributed.vocab_parallel import VocabShard
from megatron_ext.projection import SparseProjection
from megatron_ext.projection.layout import VocabularyLayout
from megatron_ext.training.config import DistillConfig
from megatron_ext.training.model_chunks import ModelChunks
from megatron_ext.training.vocabulary_layout.batch_places import BatchPlaces
from megatron_ext.training.vocabulary_layout.vocabulary_rows import VocabularyRows

LAYOUT_FILE: Final = "vocabulary_layout.json"


class RunLayout(NamedTuple):
    """What a run with permuted heads knows of them."""

    layout: VocabularyLayout

    student_rows: VocabularyRows
    """For the student's checkpoints."""

    places: BatchPlaces
    """For its batches."""


def lay_out(
    config: DistillConfig,
    projection: SparseProjection,
    *,
    student: ModelChunks,
    teacher: ModelChunks,
    shards: tuple[VocabShard, VocabShard],
    groups: ProcessGroups,
) -> RunLayout:
    """Permute the heads of both models, which hold their weights and are not wrapped yet.

    The main rank makes the layout and leaves it in the run's folder for the others, and for who
    reads the run. Nothing is read from an earlier start: checkpoints are in the order of ids, so
    that a run may go on over another number of ranks.

    Args:
        projection: Of the pair, by ids.
        shards: This rank's columns of the student and of the teacher.

    Collectives: that of ``ProcessGroups.on_main``, and on stages with a head one all-to-all for
    each model.
    """
    ranks = dist.get_world_size(groups.tp)
    path = Path(config.run_dir) / LAYOUT_FILE

    def build() -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        VocabularyLayout.of(
            projection,
            rank_count=ranks,
            student_size=shards[0].width * ranks,
            teacher_size=shards[1].width * ranks,
        ).save(path)

    groups.on_main(build)
    layout = VocabularyLayout.load(path)
    student_rows, teacher_rows = (
        VocabularyRows(order, groups.tp, groups.device)
        for order in (layout.student, layout.teacher)
    )
    for rows, chunks in ((student_rows, student), (teacher_rows, teacher)):
        for chunk in chunks:
            rows.permute_(chunk)
    assert config.teacher is not None
    places = BatchPlaces.of(
        layout, student=config.student, teacher=config.teacher.model, device=groups.device
    )
    return RunLayout(layout, student_rows, places)
