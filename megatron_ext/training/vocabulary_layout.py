"""A microbatch by places of a vocabulary layout.

The vocabulary layout of one run: made, kept in its folder, and applied to its models.

The rows of one model's head in the order of a layout; on disk they are in that of the ids.

Vp this rank's rows, D hidden, R tensor-parallel ranks.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.models.gpt import GPTModel
from numpy.typing import NDArray
from torch.distributed import ProcessGroup

from megatron_ext.distributed.process_groups import ProcessGroups
from megatron_ext.distributed.vocab_parallel import VocabShard, reordered_rows
from megatron_ext.losses import IdTable
from megatron_ext.projection import SparseProjection
from megatron_ext.projection.layout import VocabularyLayout, VocabularyOrder
from megatron_ext.training.config import ModelConfig
from megatron_ext.training.microbatch import Microbatch, TokenBatch
from megatron_ext.training.models import ModelChunks


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


_HEAD = "output_layer.weight"
_EMBEDDING = "embedding.word_embeddings.weight"


@dataclass(frozen=True, slots=True)
class VocabularyRows:
    """Moves rows of a vocabulary-parallel matrix between the order of ids and that of places.

    What moves is the head, and with it the input embeddings that are tied to it; each move of a
    matrix is one all-to-all over the tensor-parallel group, in which a rank receives at most its
    own ``Vp x D`` elements and sends as many.
    """

    order: VocabularyOrder

    group: ProcessGroup
    """Tensor-parallel: the ranks that share the rows."""

    device: torch.device
    """Where its collectives run: the distributed optimizer hands its state over on the host."""

    def permute_(self, gpt: GPTModel) -> None:
        """Put a stage's rows, which are in the order of ids, into that of places; call it once.

        It is for a model before DDP and the optimizer copy its parameters. A stage without a head,
        or embeddings tied to one, is left as it is.

        Collectives: one all-to-all on the stages that have such rows.
        """
        weight = _vocabulary_weight(gpt)
        if weight is not None:
            with torch.no_grad():
                weight.copy_(self._moved(weight, self.order.ids))

    def in_order_of_ids(
        self, gpt: GPTModel, state: dict[str, Any], *, is_loading: bool = False
    ) -> dict[str, Any]:
        """A stage's ``sharded_state_dict`` that is written, and read, in the order of ids.

        megatron-core makes the state of the optimizer from it, so that this moves too.

        Collectives: none here. When the state is saved, one all-to-all for each tensor of these
        rows, optimizer's included, which also holds a copy of each until the file is written; when
        it has been loaded, one for each.
        """
        names = (_HEAD, _EMBEDDING) if gpt.share_embeddings_and_output_weights else (_HEAD,)
        moved = {
            name: self._factory(state[name], is_loading)
            for name in names
            if isinstance(state.get(name), ShardedTensor)
        }
        return {**state, **moved}

    def _factory(self, sharded: ShardedTensor, is_loading: bool) -> ShardedTensorFactory:
        """``sharded`` by places, which becomes one by ids when it meets a file."""
        by_id = sharded.without_data()

        def build(
            key: str, rows: torch.Tensor, replica_id: Any, flattened_range: slice | None
        ) -> ShardedTensor:
            assert flattened_range is None, "rows are moved whole"
            data = (
                torch.empty_like(rows, requires_grad=False)
                if is_loading
                else self._moved(rows, self.order.places)
            )
            return replace(by_id, key=key, data=data, dtype=data.dtype, replica_id=replica_id)

        def merge(loaded: torch.Tensor) -> torch.Tensor:
            return self._moved(loaded, self.order.ids)

        return ShardedTensorFactory(
            key=sharded.key,
            data=sharded.data,
            build_fn=build,
            merge_fn=merge,
            replica_id=sharded.replica_id,
        )

    def _moved(self, rows: torch.Tensor, sources: NDArray[np.int64]) -> torch.Tensor:
        """``reordered_rows``, on the device of ``rows``."""
        return reordered_rows(rows.to(self.device), sources, self.group).to(rows.device)


def _vocabulary_weight(gpt: GPTModel) -> torch.nn.Parameter | None:
    """[Vp, D] of this stage, or None where it has none that is permuted."""
    if gpt.share_embeddings_and_output_weights:
        has_it = gpt.pre_process or gpt.post_process
        return gpt.shared_embedding_or_output_weight() if has_it else None
    return gpt.output_layer.weight if gpt.post_process else None


LAYOUT_FILE: Final = "vocabulary_layout.json"


class RunLayout(NamedTuple):
    """What a run with permuted heads knows of them."""

    layout: VocabularyLayout

    student_rows: VocabularyRows
    """For the student's checkpoints."""

    places: BatchPlaces
    """For its batches."""


def lay_out(
    run_dir: Path,
    projection: SparseProjection,
    *,
    student: ModelChunks,
    teacher: ModelChunks,
    shards: tuple[VocabShard, VocabShard],
    models: tuple[ModelConfig, ModelConfig],
    groups: ProcessGroups,
) -> RunLayout:
    """Permute the heads of both models, which hold their weights and are not wrapped yet.

    The main rank makes the layout and leaves it in the run's folder for the others, and for who
    reads the run. Nothing is read from an earlier start: checkpoints are in the order of ids, so
    that a run may go on over another number of ranks.

    Args:
        projection: Of the pair, by ids.
        shards: This rank's columns of the student and of the teacher.
        models: Both, as they are configured.

    Collectives: that of ``ProcessGroups.on_main``, and on stages with a head one all-to-all for
    each model.
    """
    ranks = dist.get_world_size(groups.tp)
    path = run_dir / LAYOUT_FILE

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
    places = BatchPlaces.of(layout, student=models[0], teacher=models[1], device=groups.device)
    return RunLayout(layout, student_rows, places)
