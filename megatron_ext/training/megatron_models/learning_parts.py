"""The parts of a student that learn: adapters beside its linear layers, and parts of its own.

The other parts are frozen before DDP and the optimizer see them.

T positions, B rows, R rank; a rank of the tensor-parallel group has a share of the wide side of an
adapter, as it has of its layer: the output of a column-parallel one, the input of a row-parallel
one; of an expert's, a rank of the group that shares the expert has. Matrices are drawn whole and
cut, so that a layout does not change them.
"""

from __future__ import annotations

import math
import re
import zlib
from collections.abc import Collection, Iterator
from typing import Any, Final

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import (
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
    set_tensor_model_parallel_attributes,
)
from megatron.core.transformer.moe.moe_layer import MoELayer
from torch.nn import functional

from megatron_ext.distributed.shard_collectives import copy_to_shards
from megatron_ext.training.configuration.lora import LoraConfig
from megatron_ext.training.megatron_models.gated_delta_net import GatedDeltaNet
from megatron_ext.training.megatron_models.layers import ColumnLinear, RowLinear
from megatron_ext.training.megatron_models.models import ModelChunks

ADAPTER: Final = "lora"
"""Submodule of a linear layer that holds its adapter."""


class Adapter(torch.nn.Module):
    """``scale * B A x`` for one linear layer; A [R, in] is drawn, B [out, R] is zero.

    Beside an expert's layer it is the expert's: its gradient is summed over the ranks that the
    gradient of the layer is summed over.

    Args:
        linear: The layer, whose share of the weights on this rank decides that of A and B.
        rank: R
        scale: Factor of the product.
        seed: Seed of A, which has the values of a linear layer of torch.
    """

    def __init__(
        self, linear: ColumnLinear | RowLinear, *, rank: int, scale: float, seed: int
    ) -> None:
        super().__init__()
        self.scale = scale
        self._group = linear.tp_group
        self._is_of_expert = bool(linear.is_expert)
        self._is_cut_by_sequence = bool(linear.config.sequence_parallel)
        outputs, inputs = linear.weight.shape
        size, place = self._group.size(), self._group.rank()
        self._is_of_columns = isinstance(linear, ColumnLinear)
        width = inputs if self._is_of_columns else inputs * size
        bound = 1 / math.sqrt(width)
        drawn = torch.empty(rank, width, dtype=torch.float32).uniform_(
            -bound, bound, generator=torch.Generator().manual_seed(seed)
        )
        own = drawn if self._is_of_columns else drawn.chunk(size, dim=1)[place]
        like = {"dtype": linear.weight.dtype, "device": linear.weight.device}
        self.a = torch.nn.Parameter(own.to(**like).contiguous())
        self.b = torch.nn.Parameter(torch.zeros(outputs, rank, **like))
        cut, axis, whole = (self.b, 0, self.a) if self._is_of_columns else (self.a, 1, self.b)
        set_tensor_model_parallel_attributes(cut, is_parallel=True, dim=axis, stride=1)
        if self._is_of_expert:
            self._mark_expert(whole, allreduce=linear.weight.allreduce)
        else:
            # Each rank has a part of its gradient.
            whole.sequence_parallel = self._is_cut_by_sequence  # type: ignore[attr-defined]

    def _mark_expert(self, whole: torch.nn.Parameter, *, allreduce: bool) -> None:
        """Say which ranks have a gradient of an expert's matrices, and which has the norm of it.

        Tensor-parallel ranks have different experts, so that a rank of theirs says nothing here.
        """
        set_tensor_model_parallel_attributes(whole, is_parallel=True, dim=0, stride=1)
        whole.shared = self._group.rank() > 0  # type: ignore[attr-defined]
        for matrix in (self.a, self.b):
            matrix.allreduce = allreduce  # type: ignore[attr-defined]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """What is added to the layer's output, [T, B, out], of its input [T, B, in]; of an expert
        [T, out] of [T, in].

        Collectives over the tensor-parallel group, R wide: column-parallel an all-reduce backward,
        row-parallel one forward; under sequence parallelism an all-gather and a reduce-scatter.
        Over the ranks that share an expert, an all-reduce backward of the matrix that all have.
        """
        if self._is_of_expert:
            return self._of_expert(x)
        narrow = functional.linear(x, self.a)
        if self._is_of_columns and self._is_cut_by_sequence:
            narrow = gather_from_sequence_parallel_region(
                narrow, tensor_parallel_output_grad=True, group=self._group
            )
        elif self._is_of_columns:
            narrow = copy_to_shards(narrow, self._group)
        elif self._is_cut_by_sequence:
            narrow = reduce_scatter_to_sequence_parallel_region(narrow, group=self._group)
        else:
            narrow = reduce_from_tensor_model_parallel_region(narrow, group=self._group)
        return functional.linear(narrow * self.scale, self.b)

    def _of_expert(self, x: torch.Tensor) -> torch.Tensor:
        """``forward`` between the collectives of the experts' dispatcher, which sums outputs, and
        gradients of inputs, over the ranks that share an expert."""
        narrow = functional.linear(x, self._of_all(self.a, self._is_of_columns))
        return functional.linear(narrow * self.scale, self._of_all(self.b, not self._is_of_columns))

    def _of_all(self, matrix: torch.Tensor, is_whole: bool) -> torch.Tensor:
        return copy_to_shards(matrix, self._group) if is_whole else matrix


def add_adapters(chunks: ModelChunks, lora: LoraConfig, *, seed: int) -> None:
    """Give the linear layers of a student their adapters; before it is wrapped.

    Args:
        chunks: This rank's part of the student, with its first weights.
        seed: Seed of the run.
    """
    for chunk in chunks:
        for target, name, linear in _linear_layers(chunk):
            if target in lora.targets:
                own_seed = zlib.crc32(f"{seed} {name}".encode())
                linear.lora = Adapter(linear, rank=lora.rank, scale=lora.scale, seed=own_seed)


def _linear_layers(chunk: GPTModel) -> Iterator[tuple[str, str, Any]]:
    """Linear layers of a chunk, each with its name among targets and one of its own, by the numbers
    of its layer over all stages and of its expert over all ranks."""
    for layer in chunk.decoder.layers:
        number, attention = layer.layer_number, layer.self_attention
        is_linear = isinstance(attention, GatedDeltaNet)
        for name, of_linear in (("linear_qkv", "in_proj"), ("linear_proj", "out_proj")):
            own = of_linear if is_linear else name
            yield name, f"{number}.{own}", getattr(attention, own)
        has_experts = isinstance(layer.mlp, MoELayer)
        dense = layer.mlp.shared_experts if has_experts else layer.mlp
        experts = layer.mlp.experts.local_experts if has_experts else ()
        for name in ("linear_fc1", "linear_fc2"):
            if dense is not None:
                yield name, f"{number}.{name}", getattr(dense, name)
            for place, expert in enumerate(experts):
                own = f"{number}.{layer.mlp.local_expert_indices[place]}.{name}"
                yield f"experts.{name}", own, getattr(expert, name)


_NORM: Final = re.compile(r"layer_?norm|out_norm")
_PARTS_OF_LAYER: Final = {".mlp.experts.": "experts", ".mlp.router.": "routers"}
"""By the place of a parameter in a layer."""


def parts_of(name: str, *, is_tied: bool) -> set[str]:
    """Names of ``training.trainable`` that a parameter of a ``GPTModel`` belongs to.

    A norm of a layer belongs to ``layers`` and to ``norms``, and so do an expert and a router to
    ``layers`` and to ``experts`` or ``routers``; an adapter belongs to none.
    """
    if _is_of_adapter(name):
        return set()
    if name.startswith(("embedding.", "output_layer.")):
        is_head = name.startswith("output_layer.")
        if is_tied and name.endswith(("word_embeddings.weight", "output_layer.weight")):
            return {"embeddings", "head"}
        return {"head"} if is_head else {"embeddings"}
    parts = {"layers"} if name.startswith("decoder.layers.") else set()
    parts |= {part for place, part in _PARTS_OF_LAYER.items() if place in name}
    return parts | ({"norms"} if _NORM.search(name) else set())


def freeze_parts(chunks: ModelChunks, trainable: Collection[str] | None) -> None:
    """Freeze the parts that are not to learn; adapters always do.

    Args:
        chunks: This rank's part of the student, with its adapters if any, not wrapped yet.
        trainable: Parts that learn; None for all, or none where there are adapters.
    """
    parameters = [
        (name, parameter, chunk.share_embeddings_and_output_weights)
        for chunk in chunks
        for name, parameter in chunk.named_parameters()
    ]
    if trainable is None and not any(_is_of_adapter(name) for name, _, _ in parameters):
        return
    chosen = set(trainable or ())
    for name, parameter, is_tied in parameters:
        learns = _is_of_adapter(name) or bool(chosen & parts_of(name, is_tied=is_tied))
        parameter.requires_grad_(learns)
    config = chunks[0].config
    if config.pipeline_model_parallel_size > 1 or config.recompute_granularity is not None:
        _pass_gradients(chunks[0])


def _is_of_adapter(name: str) -> bool:
    return f".{ADAPTER}." in name


def _pass_gradients(chunk: GPTModel) -> None:
    """Make the embeddings' output require a gradient even where the embeddings do not.

    Stages of a pipeline and recomputed layers pass a gradient back whatever learns.
    """
    if not chunk.pre_process:
        return

    def require(_: torch.nn.Module, inputs: Any, embeddings: torch.Tensor) -> torch.Tensor:
        is_asked = torch.is_grad_enabled() and not embeddings.requires_grad
        return embeddings.requires_grad_() if is_asked else embeddings

    chunk.embedding.register_forward_hook(require)
