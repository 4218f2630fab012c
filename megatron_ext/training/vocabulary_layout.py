"""The vocabulary layout of a run: the permuted heads of its models, and microbatches for them.

Checkpoints stay in the order of ids. Vp this rank's rows, D hidden, R tensor-parallel ranks.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.models.gpt import GPTModel
from numpy.typing import NDArray
from torch.distributed import ProcessGroup

from megatron_ext.distributed.vocab_parallel import VocabShard, reordered_rows
from megatron_ext.losses import IdTable
from megatron_ext.projection import SparseProjection
from megatron_ext.projection.layout import VocabularyLayout, VocabularyOrder
from megatron_ext.training.configuration.config import ModelConfig
from megatron_ext.training.megatron_models.models import ModelChunks
from megatron_ext.training.microbatch import Microbatch, TokenBatch

if TYPE_CHECKING:
    from megatron_ext.training.teachers.live_teacher import StudentParts


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchPlaces:
    """Maps the ids of a microbatch to places of permuted heads: labels, completions, tied inputs.

    It takes 8 bytes of the device for each token of both vocabularies.
    Input embeddings that are not tied to a head stay in the order of ids, and so do their inputs.
    """

    student: IdTable

    teacher: IdTable

    student_is_tied: bool

    teacher_is_tied: bool

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
            tiles={
                name: tiles.by_place(self.student, self.teacher)
                for name, tiles in batch.tiles.items()
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
    """Permutation of a head's rows between the order of ids and that of places.

    It applies to the head and to input embeddings that are tied to it. Each permutation of a matrix
    is one all-to-all over the tensor-parallel group, in which a rank receives and sends at most
    ``Vp x D`` elements.
    """

    order: VocabularyOrder

    group: ProcessGroup
    """The tensor-parallel group, whose ranks share the rows."""

    device: torch.device
    """Device of the collectives, since the distributed optimizer's state is on the host."""

    def permute_(self, gpt: GPTModel) -> None:
        """Permute a stage's rows from the order of ids to that of places; call it once.

        Call it before DDP and the optimizer copy the parameters. A stage without a head or
        embeddings tied to one is left as it is.

        Collectives: one all-to-all on the stages that have such rows.
        """
        weight = _vocabulary_weight(gpt)
        if weight is not None:
            with torch.no_grad():
                weight.copy_(self._moved(weight, self.order.ids))

    def in_order_of_ids(
        self, gpt: GPTModel, state: dict[str, Any], *, is_loading: bool = False
    ) -> dict[str, Any]:
        """A stage's ``sharded_state_dict`` that is written and read in the order of ids.

        megatron-core derives the optimizer's state from it, which is permuted likewise.

        Collectives: none here. When the state is saved or has been loaded, one all-to-all for each
        tensor of these rows, the optimizer's included. Saving keeps a copy of each until the file
        is written.
        """
        names = (_HEAD, _EMBEDDING) if gpt.share_embeddings_and_output_weights else (_HEAD,)
        moved = {
            name: self._factory(state[name], is_loading)
            for name in names
            if isinstance(state.get(name), ShardedTensor)
        }
        return {**state, **moved}

    def _factory(self, sharded: ShardedTensor, is_loading: bool) -> ShardedTensorFactory:
        """``sharded``, which is in the order of places, converted to that of ids in files."""
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
    """[Vp, D] the permuted matrix of this stage; None where it has none."""
    if gpt.share_embeddings_and_output_weights:
        has_it = gpt.pre_process or gpt.post_process
        return gpt.shared_embedding_or_output_weight() if has_it else None
    return gpt.output_layer.weight if gpt.post_process else None


LAYOUT_FILE: Final = "vocabulary_layout.json"


class RunLayout(NamedTuple):
    """The layout of a run with permuted heads."""

    layout: VocabularyLayout

    student_rows: VocabularyRows
    """Permutation of the student's head, for its checkpoints."""

    places: BatchPlaces
    """Maps of ids to places, for batches."""


def lay_out(
    run: StudentParts,
    projection: SparseProjection,
    teacher: ModelConfig,
    chunks: ModelChunks,
    shard: VocabShard,
) -> RunLayout:
    """Permute the heads of both models, which hold their weights and are not wrapped yet.

    The main rank makes the layout and writes it to the run's folder for the others and for the
    user. It is made anew at each start: checkpoints are in the order of ids, so that a run may
    resume over another number of ranks.

    Args:
        projection: Projection of the pair, in the order of ids.
        chunks: This rank's part of the teacher.
        shard: This rank's columns of the teacher's vocabulary.

    Collectives: that of ``ProcessGroups.on_main``, and on stages with a head one all-to-all for
    each model.
    """
    groups, student = run.groups, run.plan.student
    ranks = dist.get_world_size(groups.tp)
    path = run.plan.run_dir / LAYOUT_FILE

    def build() -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        VocabularyLayout.of(
            projection,
            rank_count=ranks,
            student_size=run.shard.width * ranks,
            teacher_size=shard.width * ranks,
        ).save(path)

    groups.on_main(build)
    layout = VocabularyLayout.load(path)
    student_rows, teacher_rows = (
        VocabularyRows(order, groups.tp, groups.device)
        for order in (layout.student, layout.teacher)
    )
    for rows, model in ((student_rows, run.chunks), (teacher_rows, chunks)):
        for chunk in model:
            rows.permute_(chunk)
    places = BatchPlaces(
        student=IdTable.of(layout.student, groups.device),
        teacher=IdTable.of(layout.teacher, groups.device),
        student_is_tied=not student.untie_embeddings_and_output_weights,
        teacher_is_tied=not teacher.untie_embeddings_and_output_weights,
    )
    return RunLayout(layout, student_rows, places)
