"""Core attention where there is no Transformer Engine, also over context-parallel ranks.

S positions of this rank, T of whole sequences, B rows, H heads, G key-value heads, D head width,
E width of a value, which is D but in latent attention.
"""

from __future__ import annotations

from typing import Any, Final

import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import (
    gather_from_sequence_parallel_region,
    set_tensor_model_parallel_attributes,
)
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.utils import (
    is_layer_window_attention,
    make_sharded_tensors_for_checkpoint,
)
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from megatron_ext.distributed.context_parallel import ContextRank, in_order
from megatron_ext.errors import ConfigError

_CAPPED_ROWS: Final = 512
"""Queries whose capped scores are made at a time."""


class ContextAttention(MegatronModule):  # type: ignore[misc]
    """A core attention for megatron-core's layer specs, on any number of context-parallel ranks.

    Each rank has the queries of its own positions (``ContextRank``) and gathers the keys and values
    of all, as Transformer Engine does with ``cp_comm_type="all_gather"``. A slice of queries is
    compared with the keys up to its end and no further, so that the ranks have equal work.

    Equivalent, of whole sequences: ``scaled_dot_product_attention(q, k, v, ~attention_mask)``,
    which it calls: no scores are kept where torch has a fused kernel. Whole rows of one text, and
    those alone, need no mask: on a GPU they take the flash kernel, of [T, B, G, D] as it is.

    With sinks (``config.softmax_type`` learnable) the softmax of a head divides by the sum of the
    exponentials of its scores and of one learned number, ``softmax_offset`` [H]. It is the score of
    one more key, before the first, whose value is zero: queries have the number as one more
    component, that key has the inverse of the scale there, and other keys zero. So values and
    gradients are those of the same kernels.

    In a layer with a window (``config.window_size``) of W tokens, position ``i`` is compared with
    the keys ``i - W < j <= i`` alone. Rows that are no longer than that are as without one.

    In generation, the keys and values are those of the cache and the queries their last positions.

    Collectives: forward one all-gather of [T, B, G, D + E], backward one reduce-scatter of it.

    Args:
        config: Of the model.
        layer_number: From 1, over all stages; says whether the layer has a window.
        attn_mask_type: Causal.
        attention_type: ``self``.
        softmax_scale: Factor of the scores; None for ``1 / sqrt(D)``.
        score_cap: ``c`` of scores ``c tanh(s / c)``; None for scores as they are.
        pg_collection: Process groups with the context-parallel one.
        unused: Other arguments, which depend on the release of megatron-core.

    Raises:
        ConfigError: The configuration asks for something that it does not support.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        softmax_scale: float | None = None,
        score_cap: float | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        **unused: Any,
    ) -> None:
        super().__init__(config=config)
        _check(config, attn_mask_type, attention_type)
        if pg_collection is None:
            pg_collection = ProcessGroupCollection.use_mpu_process_groups(required_pgs=["cp"])
        self._group: dist.ProcessGroup = pg_collection.cp
        self._rank = ContextRank(
            rank=dist.get_rank(self._group), size=dist.get_world_size(self._group)
        )
        # Latent attention has one of its own, and reads the model's nowhere.
        self._scale = softmax_scale if config.softmax_scale is None else config.softmax_scale
        self._cap = score_cap
        sizes, interval = config.window_size, config.window_attn_skip_freq
        has_window = is_layer_window_attention(sizes, interval, layer_number)
        self.window = sizes[0] + 1 if sizes is not None and has_window else None
        """Tokens that a position sees, with itself; None for all up to it."""
        self.has_sinks = config.softmax_type == "learnable"
        if self.has_sinks:
            # Of the heads of this tensor-parallel rank.
            heads = config.num_attention_heads // config.tensor_model_parallel_size
            self.softmax_offset = torch.nn.Parameter(torch.zeros(heads, dtype=config.params_dtype))
            set_tensor_model_parallel_attributes(self.softmax_offset, True, 0, 1)

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: torch.Tensor | None = None,
        packed_seq_params: Any = None,
        **unused: Any,
    ) -> torch.Tensor:
        """Attend.

        Args:
            query: [S, B, H, D]
            key: [S, B, G, D]
            value: [S, B, G, E]
            attention_mask: [B or 1, 1, S, T] bool, True where a position may not attend to another;
                it must be causal at least. None for the causal mask.
            attn_mask_type: Ignored; attention is causal.
            attention_bias: None.
            packed_seq_params: None; the mask separates several texts in a row.

        Returns:
            [S, B, H E]
        """
        assert attention_bias is None
        assert packed_seq_params is None
        keys, values = self._gathered(key, value)
        if self._rank.size == 1:
            sees = self._seen(attention_mask, query, len(keys))
            return self._attend(query, keys, values, sees)
        width = len(query) // 2
        parts = []
        for index, first in enumerate(self._rank.first_positions(len(keys))):
            rows, seen = slice(index * width, (index + 1) * width), first + width
            mask = None if attention_mask is None else attention_mask[..., rows, :seen]
            sees = self._sees(mask, query[rows], seen)
            parts.append(self._attend(query[rows], keys[:seen], values[:seen], sees))
        return torch.cat(parts)

    def _seen(
        self, mask: torch.Tensor | None, query: torch.Tensor, keys: int
    ) -> torch.Tensor | None:
        """``_sees``; None where causality says it all."""
        is_cut = self.window is not None and keys > self.window
        if mask is None and not is_cut and len(query) in (1, keys):
            return None
        return self._sees(mask, query, keys)

    def _sees(self, mask: torch.Tensor | None, query: torch.Tensor, keys: int) -> torch.Tensor:
        """Bool mask, [S, keys] or [B, 1, S, keys], of what the last positions see of ``keys``."""
        count = len(query)
        first = keys - count
        every = query.new_ones(count, keys, dtype=torch.bool)
        sees = every.tril(first) if mask is None else ~mask
        if self.window is None or keys <= self.window:
            return sees
        return sees & every.triu(first + 1 - self.window)

    def _gathered(
        self, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """[T, B, G, D] and [T, B, G, E] of all ranks, in the order of positions."""
        if self._rank.size == 1:
            return key, value
        widths = key.shape[-1], value.shape[-1]
        both = torch.cat((key, value), dim=-1)
        whole = in_order(
            gather_from_sequence_parallel_region(both, group=self._group), self._rank.size
        )
        keys, values = whole.split(widths, dim=-1)
        return keys, values

    def _attend(
        self,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        sees: torch.Tensor | None,
    ) -> torch.Tensor:
        """[S, B, H E]; None for the causal mask, and for a single query that sees all keys."""
        if self._cap is not None:
            return self._attend_capped(query, keys, values, sees)
        rows, width, scale = len(query), values.shape[-1], self._scale
        if self.has_sinks:
            scale = query.shape[-1] ** -0.5 if scale is None else scale
            query, keys, values, sees = self._with_sinks(query, keys, values, sees, scale=scale)
        if sees is not None:
            # With a mask torch's fused kernels want as many heads of keys as of queries.
            heads = query.shape[2] // keys.shape[2]
            keys = keys.repeat_interleave(heads, dim=2)
            values = values.repeat_interleave(heads, dim=2)
        out = functional.scaled_dot_product_attention(
            query.permute(1, 2, 0, 3),
            keys.permute(1, 2, 0, 3),
            values.permute(1, 2, 0, 3),
            attn_mask=sees,
            is_causal=sees is None and len(query) > 1,
            scale=scale,
            enable_gqa=sees is None,
        )
        # Without a first row that sees the sinks alone, and the width that they add.
        out = out[:, :, out.shape[2] - rows :, :width]
        return out.permute(2, 0, 1, 3).flatten(2)

    def _attend_capped(
        self,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        sees: torch.Tensor | None,
    ) -> torch.Tensor:
        """``_attend`` with capped scores, which torch's fused kernels do not have.

        Scores are of a slice of queries at a time, and are computed again in the backward pass.
        """
        sees = self._sees(None, query, len(keys)) if sees is None else sees
        parts = [
            checkpoint(
                self._capped_rows,
                query[start : start + _CAPPED_ROWS],
                keys,
                values,
                sees[..., start : start + _CAPPED_ROWS, :],
                use_reentrant=False,
                preserve_rng_state=False,
            )
            for start in range(0, len(query), _CAPPED_ROWS)
        ]
        return torch.cat(parts)

    def _capped_rows(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, sees: torch.Tensor
    ) -> torch.Tensor:
        """[S, B, H E] of some queries; scores and softmax in fp32."""
        assert self._cap is not None
        scale = query.shape[-1] ** -0.5 if self._scale is None else self._scale
        # Heads that share keys are a dimension of their own.
        grouped = query.unflatten(2, (keys.shape[2], -1))
        scores = torch.einsum("sbgrd,tbgd->bgrst", grouped, keys).float() * scale
        scores = torch.tanh(scores / self._cap) * self._cap
        hidden = ~(sees if sees.ndim == 2 else sees.unsqueeze(2))
        shares = scores.masked_fill(hidden, -torch.inf).softmax(dim=-1).to(values.dtype)
        return torch.einsum("bgrst,tbge->sbgre", shares, values).flatten(2)

    def _with_sinks(
        self,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        sees: torch.Tensor | None,
        *,
        scale: float,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """What ``_attend`` has, with the key of the sinks first.

        Under the causal mask a query is first, too, so that the others see as many keys as before
        and that one.
        """
        sinks = self.softmax_offset.view(-1, 1).expand(*query.shape[:-1], 1)
        query = torch.cat((query, sinks), dim=-1)
        sink_key = functional.pad(torch.zeros_like(keys[:1]), (0, 1), value=1 / scale)
        keys = torch.cat((sink_key, functional.pad(keys, (0, 1))))
        # Fused kernels take values of the width of keys.
        values = functional.pad(values, (0, 1, 0, 0, 0, 0, 1, 0))
        if sees is not None:
            return query, keys, values, functional.pad(sees, (1, 0), value=True)
        if len(query) > 1:
            query = functional.pad(query, (0, 0, 0, 0, 0, 0, 1, 0))
        return query, keys, values, None

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None
    ) -> dict[str, Any]:
        """The sinks for ``dist_checkpointing``, cut by heads."""
        state = self.state_dict(prefix="", keep_vars=True)
        sharded: dict[str, Any] = make_sharded_tensors_for_checkpoint(
            state, prefix, {"softmax_offset": 0}, sharded_offsets
        )
        return sharded


def _check(config: TransformerConfig, mask: AttnMaskType, attention_type: str) -> None:
    for what, got, expected in (
        ("attention_type", attention_type, "self"),
        ("attn_mask_type", mask, AttnMaskType.causal),
        ("attention_dropout", config.attention_dropout, 0.0),
        ("softmax_type off-by-one", config.softmax_type == "off-by-one", False),
        ("window_size after a position", (config.window_size or (0, 0))[1], 0),
    ):
        if got != expected:
            raise ConfigError(
                "attention without Transformer Engine does not have it",
                where=what,
                got=got,
                expected=expected,
                fix="install Transformer Engine, or take a model without it",
            )
