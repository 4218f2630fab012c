"""The head of a student whose loss is made without logits. B batch, T tokens, D hidden."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region

from megatron_ext.distributed.shard_collectives import copy_to_shards
from megatron_ext.teachers.megatron_teacher import head_weight

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class Head(NamedTuple):
    """This rank's columns of an output layer, applied by the loss."""

    weight: torch.Tensor
    """[Vp, D]"""

    sequence_parallel: bool

    def whole(self, hidden: torch.Tensor, group: ProcessGroup | None) -> torch.Tensor:
        """[B, T, D] of a last stage's output [T, B, D], or this rank's part of T.

        The gradient that comes back is of this rank's columns, and is summed over the
        tensor-parallel ``group``. Collectives: backward one all-reduce of [B, T, D]; under sequence
        parallelism forward one all-gather, backward one reduce-scatter.
        """
        if self.sequence_parallel:
            gathered = gather_from_sequence_parallel_region(
                hidden, tensor_parallel_output_grad=True
            )
            batch_first: torch.Tensor = gathered.transpose(0, 1).contiguous()
            return batch_first
        # megatron-core's own copy loses the sum of a gradient that is not contiguous.
        return copy_to_shards(hidden.transpose(0, 1).contiguous(), group)


def head_of(model: Any) -> Head:
    """Of a chunk with a head, wrapped or not."""
    gpt = _unwrapped(model)
    return Head(head_weight(gpt), gpt.config.sequence_parallel)


@contextmanager
def without_head(model: Any) -> Iterator[None]:
    """A chunk returns its last hidden states meanwhile, as one without a head does."""
    gpt = _unwrapped(model)
    gpt.post_process = False
    try:
        yield
    finally:
        gpt.post_process = True


def _unwrapped(model: Any) -> GPTModel:
    while not isinstance(model, GPTModel):
        model = model.module
    return model
