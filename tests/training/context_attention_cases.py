"""What spawned ranks run in the tests of attention over context-parallel ranks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import NamedTuple

import torch
import torch.distributed as dist
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.enums import AttnMaskType

from megatron_ext.distributed.context_parallel import ContextRank
from megatron_ext.training import cpu_megatron
from megatron_ext.training.context_attention import ContextAttention

SIZES = (4, 2, 3)


class Case(NamedTuple):
    """Shapes of one call; lengths divide over all of ``SIZES``."""

    length: int
    batch: int
    heads: int
    groups: int
    width: int

    packed: bool = False
    """Whether rows hold several texts, each row others."""

    scale: float | None = None


CASES = (
    Case(24, 1, 1, 1, 2),
    Case(48, 3, 6, 2, 5, packed=True),
    Case(24, 2, 4, 4, 7, scale=0.3),
    Case(72, 2, 3, 1, 1, packed=True),
)


class Attended(NamedTuple):
    """Output and gradients of whole sequences, or of a rank's part; positions first."""

    output: torch.Tensor
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor


def whole(case):
    """Query, key, value and the gradient of the output, [T, B, heads, D]."""
    generator = torch.Generator().manual_seed(sum(case[:5]))
    heads = case.heads, case.groups, case.groups, case.heads
    shapes = [(case.length, case.batch, count, case.width) for count in heads]
    query, key, value, grad = (torch.randn(shape, generator=generator) for shape in shapes)
    return query, key, value, grad.flatten(2)


def mask(case):
    """[B, 1, T, T] True where a position would look ahead, or into another text."""
    rows = [torch.arange(case.length) // (5 + 4 * row) for row in range(case.batch)]
    text = torch.stack(rows if case.packed else [torch.zeros(case.length)] * case.batch)
    ahead = torch.ones(case.length, case.length, dtype=torch.bool).triu(1)
    return (ahead | (text[:, :, None] != text[:, None]))[:, None]


def attention(case, group):
    config = TransformerConfig(
        num_layers=1,
        hidden_size=case.heads * case.width,
        num_attention_heads=case.heads,
        num_query_groups=case.groups,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        context_parallel_size=dist.get_world_size(group),
    )
    return ContextAttention(
        config=config,
        layer_number=1,
        attn_mask_type=AttnMaskType.causal,
        attention_type="self",
        softmax_scale=case.scale,
        pg_collection=SimpleNamespace(cp=group),
    )


def on_a_rank(case, group):
    """Output and gradients of this rank's positions."""
    rank = ContextRank.of(group)
    assert rank is not None
    # ``cut`` takes rows [B, T].
    own = [rank.cut(part.transpose(0, 1)).transpose(0, 1).contiguous() for part in whole(case)]
    *inputs, grad = own
    for part in inputs:
        part.requires_grad_()
    seen = rank.cut(mask(case)[:, 0])[:, None] if case.packed else None
    output = attention(case, group)(*inputs, seen)
    output.backward(grad)
    query, key, value = (part.grad for part in inputs)
    assert query is not None
    assert key is not None
    assert value is not None
    return Attended(output.detach(), query, key, value)


def every_size(rank):
    """All cases on context-parallel groups of each size, where this rank is in one."""
    cpu_megatron.install()
    found = {}
    for size in SIZES:
        groups = [
            dist.new_group(list(range(first, first + size)))
            for first in range(0, 4 // size * size, size)
        ]
        if rank // size < len(groups):
            found[size] = [on_a_rank(case, groups[rank // size]) for case in CASES]
    return found
