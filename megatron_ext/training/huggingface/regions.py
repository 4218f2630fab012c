"""What a rank has of a model, rectangle by rectangle, by the keys of megatron-core checkpoints."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories

from megatron_ext.huggingface.tensor_map import MegatronTensor, TensorMap


def sharded_tensors(state: dict[str, Any]) -> Iterator[ShardedTensor]:
    """Every tensor of a chunk's sharded state, gated matrices cut into their halves.

    Args:
        state: As ``GPTModel.sharded_state_dict`` makes it; changed.
    """
    apply_factories(state)
    for value in state.values():
        for item in value if isinstance(value, (list, tuple)) else (value,):
            if isinstance(item, ShardedTensor):
                yield item


def tensor_of(shard: ShardedTensor, tensors: TensorMap) -> MegatronTensor:
    """The tensor, of one layer where it is in layers, that a shard is a rectangle of."""
    layer = shard.global_offset[0] if shard.prepend_axis_num else None
    return tensors.tensor(shard.key, layer)


def corner_of(shard: ShardedTensor) -> tuple[int, int]:
    """Row and column of that tensor at which the shard begins."""
    row, *column = shard.global_offset[shard.prepend_axis_num :]
    return row, column[0] if column else 0
