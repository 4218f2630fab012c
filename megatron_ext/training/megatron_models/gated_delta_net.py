"""Linear attention of Qwen3-Next and Qwen3.5: a gated delta net, in a layer spec's place for
attention.

T positions, S of this context-parallel rank, B rows, D hidden; N key heads of this tensor-parallel
rank, M of which it computes for all positions, G value heads to each, K and V widths of a head, W
positions of the convolution.
"""

from __future__ import annotations

import math
from typing import Any, Final, NamedTuple

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import (
    all_to_all,
    gather_from_sequence_parallel_region,
    set_tensor_model_parallel_attributes,
)
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.utils import (
    make_sharded_tensors_for_checkpoint,
    sharded_state_dict_default,
)
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from megatron_ext.distributed.context_parallel import ContextRank, by_rank, in_order
from megatron_ext.distributed.shard_collectives import copy_to_shards
from megatron_ext.training.megatron_models.gated_delta_rule import (
    Heads,
    fused_delta_rule,
    gated_delta_rule,
    has_fused_rule,
    once_of,
)
from megatron_ext.training.megatron_models.layers import ColumnLinear, RowLinear

_EPSILON: Final = 1e-6
"""Added to the squared lengths of queries and keys, as in transformers."""


class _Past(NamedTuple):
    """What a layer keeps of the positions that it has read, in generation."""

    length: int
    """Number of these positions."""

    inputs: torch.Tensor
    """[B, W - 1, channels] of the convolution, the last ones."""

    state: torch.Tensor | None
    """[B, M G, K, V] in fp32; None for zeros."""


class GatedDeltaNet(MegatronModule):  # type: ignore[misc]
    """Attention by the gated delta rule, whose cost grows with T as that of a recurrence does.

    One product gives queries, keys, values, output gates, corrections and decays, a key head after
    the other, so that a tensor-parallel rank has the rows of its own heads. Queries, keys and
    values pass a causal convolution of W positions and SiLU; queries and keys get the length 1.
    Then ``gated_delta_rule``, a norm of each head, and the gate.

    What is between the two products is computed again in the backward pass, and only their inputs
    are kept.

    Context-parallel ranks exchange positions for heads: a rank has M of the N heads for all T
    positions between the two products, as megatron-core has it in state-space layers.

    It reads no position behind another's document: where ``attention_mask`` separates the texts of
    a packed row, state and convolution begin anew with each.

    Equivalent: ``Qwen3_5GatedDeltaNet`` of transformers, of the same weights.

    Collectives: those of its two linear layers; backward one all-reduce of [V]. Over
    context-parallel ranks two all-to-alls each way, of [S, B, channels and more] and [S, B, N G V],
    and one all-gather of [S, B] where there is a mask, for all layers that read it.

    Args:
        config: Of the model.
        layer_number: From 1, over all stages.
        pg_collection: Process groups with the tensor- and the context-parallel one.
        unused: Other arguments, which depend on the release of megatron-core.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        pg_collection: ProcessGroupCollection | None = None,
        **unused: Any,
    ) -> None:
        super().__init__(config=config)
        if pg_collection is None:
            pg_collection = ProcessGroupCollection.use_mpu_process_groups(["tp", "cp"])
        self.layer_number, self._group = layer_number, pg_collection.tp
        self._context = ContextRank.of(pg_collection.cp)
        self._key, self._value = config.linear_key_head_dim, config.linear_value_head_dim
        of_key = config.linear_num_value_heads // config.linear_num_key_heads
        self._of_key = of_key
        self._channels = 2 * self._key + of_key * self._value
        heads = config.linear_num_key_heads
        shared: dict[str, Any] = {
            "config": config,
            "bias": False,
            "is_expert": False,
            "tp_group": self._group,
        }
        self.in_proj = ColumnLinear(
            config.hidden_size,
            heads * (self._channels + of_key * self._value + 2 * of_key),
            init_method=config.init_method,
            gather_output=False,
            skip_bias_add=False,
            **shared,
        )
        self.out_proj = RowLinear(
            config.linear_num_value_heads * self._value,
            config.hidden_size,
            init_method=config.output_layer_init_method,
            input_is_parallel=True,
            skip_bias_add=True,
            **shared,
        )
        width = config.linear_conv_kernel_dim
        bound = 1 / math.sqrt(width)
        self.conv_weight = self._cut(
            torch.empty(heads * self._channels, 1, width).uniform_(-bound, bound)
        )
        self.A_log = self._cut(torch.empty(heads * of_key).uniform_(1, 16).log())
        self.dt_bias = self._cut(torch.ones(heads * of_key))
        self.out_norm = torch.nn.RMSNorm(self._value, eps=config.layernorm_epsilon)

    def _cut(self, whole: torch.Tensor) -> torch.nn.Parameter:
        """This rank's rows of a parameter of all heads, the same whatever the layout."""
        own = whole.chunk(self._group.size())[self._group.rank()]
        parameter = torch.nn.Parameter(own.to(self.config.params_dtype).contiguous())
        set_tensor_model_parallel_attributes(parameter, True, 0, 1)
        return parameter

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None,
        *,
        inference_context: Any = None,
        packed_seq_params: Any = None,
        **unused: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Attend.

        Args:
            hidden_states: [S, B, D]; a part of S under sequence parallelism.
            attention_mask: [B or 1, 1, S, T] bool, True where a position may not attend to another;
                None for rows of one document.
            inference_context: Cache of the positions before, megatron-core's.
            packed_seq_params: None; the mask separates several texts in a row.

        Returns:
            [S, B, D] and no bias.
        """
        assert packed_seq_params is None
        mixed = self._of_heads(self.in_proj(hidden_states)[0])
        documents = None
        if attention_mask is not None:
            documents = once_of(attention_mask, lambda: self._documents(attention_mask))
        weight = copy_to_shards(self.out_norm.weight, self._group)
        if torch.is_grad_enabled() and inference_context is None:
            opened = checkpoint(
                lambda products: self._attended(products, weight, documents, None)[0],
                mixed,
                use_reentrant=False,
                preserve_rng_state=False,
            )
        else:
            past = self._past(inference_context)
            opened, past = self._attended(mixed, weight, documents, past)
            if inference_context is not None:
                inference_context.key_value_memory_dict[self.layer_number] = past
        result: tuple[torch.Tensor, torch.Tensor | None] = self.out_proj(self._of_positions(opened))
        return result

    def _of_heads(self, products: torch.Tensor) -> torch.Tensor:
        """[T, B, M and its share] of [S, B, N and all]."""
        if self._context is None:
            return products
        parts = products.unflatten(-1, (self._context.size, -1)).movedim(2, 0).flatten(0, 1)
        exchanged: torch.Tensor = all_to_all(self._context.group, parts)
        return in_order(exchanged, self._context.size)

    def _of_positions(self, opened: torch.Tensor) -> torch.Tensor:
        """[S, B, N G V] of [T, B, M G V]."""
        if self._context is None:
            return opened
        parts = all_to_all(self._context.group, by_rank(opened, self._context.size))
        of_heads = parts.unflatten(0, (self._context.size, -1)).movedim(0, 2)
        joined: torch.Tensor = of_heads.flatten(2)
        return joined

    def _own(self, parameter: torch.Tensor) -> torch.Tensor:
        """A parameter of M of N heads."""
        if self._context is None:
            return parameter
        return parameter.chunk(self._context.size)[self._context.rank]

    def _documents(self, attention_mask: torch.Tensor) -> torch.Tensor:
        """[B or 1, T] int64 numbers of the documents of positions, from [B or 1, 1, S, T].

        A document begins where a position may not attend to the one before it.
        """
        if self._context is None:
            begins = attention_mask[:, 0].diagonal(-1, dim1=-2, dim2=-1)
            return functional.pad(begins, (1, 0)).long().cumsum(-1)
        rows, _, count, length = attention_mask.shape
        first = self._context.first_positions(length)
        device = attention_mask.device
        slices = [torch.arange(at, at + count // 2, device=device) for at in first]
        before = torch.cat(slices) - 1
        index = before.clamp(min=0).view(1, count, 1).expand(rows, -1, -1)
        begins = attention_mask[:, 0].gather(2, index)[..., 0] & (before >= 0)
        gathered = gather_from_sequence_parallel_region(
            begins.T.long().contiguous(), group=self._context.group
        )
        return in_order(gathered, self._context.size).T.cumsum(-1)

    def _attended(
        self,
        mixed: torch.Tensor,
        weight: torch.Tensor,
        documents: torch.Tensor | None,
        past: _Past | None,
    ) -> tuple[torch.Tensor, _Past]:
        """[T, B, M G V] of [T, B, channels and more] and the norm's weights, and what to keep."""
        width = self._channels + self._of_key * (self._value + 2)
        mixed = mixed.transpose(0, 1).unflatten(-1, (-1, width))
        channels, gate, beta, decay = mixed.split(
            (self._channels, self._of_key * self._value, self._of_key, self._of_key), dim=-1
        )
        own = channels.flatten(2)
        if past is None:
            before = own.new_zeros(len(own), self.conv_weight.shape[-1] - 1, own.shape[-1])
            past = _Past(0, before, None)
        inputs = torch.cat((past.inputs, own), dim=1)
        read = functional.silu(self._convolved(inputs, documents))
        heads = self._heads(
            read.unflatten(-1, channels.shape[2:]), beta.flatten(2), decay.flatten(2)
        )
        if mixed.is_cuda and has_fused_rule():
            output, state = fused_delta_rule(heads, past.state, documents, dtype=mixed.dtype)
        else:
            output, state = gated_delta_rule(heads, past.state, documents)
        opened = self._opened(output.to(mixed.dtype), gate.unflatten(-1, (-1, self._value)), weight)
        # Not a view, which would keep all of the inputs.
        kept = inputs[:, own.shape[1] :].clone()
        return opened.transpose(0, 1), _Past(past.length + own.shape[1], kept, state)

    def _heads(self, read: torch.Tensor, beta: torch.Tensor, decay: torch.Tensor) -> Heads:
        """What the rule reads, of [B, T, M, channels] and twice [B, T, M G]."""
        query, key, value = read.float().split(
            (self._key, self._key, self._of_key * self._value), dim=-1
        )
        query, key = (
            (part * (part.square().sum(-1, keepdim=True) + _EPSILON).rsqrt()).repeat_interleave(
                self._of_key, dim=2
            )
            for part in (query, key)
        )
        value = value.unflatten(-1, (self._of_key, -1)).flatten(2, 3)
        log_decay = -self._own(self.A_log).float().exp() * functional.softplus(
            decay.float() + self._own(self.dt_bias).float()
        )
        return Heads(query * self._key**-0.5, key, value, log_decay, beta.float().sigmoid())

    def _convolved(self, inputs: torch.Tensor, documents: torch.Tensor | None) -> torch.Tensor:
        """[B, T, channels] of [B, W - 1 + T, channels], each channel with weights of its own."""
        weight = self._own(self.conv_weight)
        width = weight.shape[-1]
        if documents is None:
            out = functional.conv1d(inputs.transpose(1, 2), weight, groups=len(weight))
            return out.transpose(1, 2)
        length = documents.shape[1]
        before = functional.pad(documents, (width - 1, 0), value=-1)
        taps = [
            inputs[:, place : place + length].float()
            * (before[:, place : place + length] == documents).unsqueeze(-1)
            * weight[:, 0, place].float()
            for place in range(width)
        ]
        return torch.stack(taps).sum(0).to(inputs.dtype)

    def _opened(
        self, output: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor
    ) -> torch.Tensor:
        """[B, T, M G V]: normalised heads times SiLU of their gates."""
        normed = functional.rms_norm(output.float(), weight.shape, eps=self.out_norm.eps)
        gates = functional.silu(gate.flatten(2, 3).float())
        return (normed.to(output.dtype) * weight * gates).to(output.dtype).flatten(2)

    def _past(self, context: Any) -> _Past | None:
        """What is known of the positions before; None where there are none."""
        if context is None or context.sequence_len_offset == 0:
            return None
        past: _Past = context.key_value_memory_dict[self.layer_number]
        assert past.length == context.sequence_len_offset, "a state cannot be taken back"
        return past

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None
    ) -> dict[str, Any]:
        """The weights for ``dist_checkpointing``, cut by heads."""
        own: dict[str, torch.Tensor] = {}
        self._save_to_state_dict(own, "", keep_vars=True)
        sharded: dict[str, Any] = make_sharded_tensors_for_checkpoint(
            own, prefix, dict.fromkeys(own, 0), sharded_offsets
        )
        for name, module in self.named_children():
            sharded |= sharded_state_dict_default(
                module, f"{prefix}{name}.", sharded_offsets, metadata, tp_group=self._group
            )
        return sharded
