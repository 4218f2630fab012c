"""The rows of one model's head in the order of a layout; on disk they are in that of the ids.

Vp this rank's rows, D hidden, R tensor-parallel ranks.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.models.gpt import GPTModel
from numpy.typing import NDArray
from torch.distributed import ProcessGroup

from megatron_ext.distributed.vocab_parallel import reordered_rows
from megatron_ext.projection.layout import VocabularyOrder

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
