"""Attention without Transformer Engine is megatron-core's, gradients included, on any ranks."""

import math
import sys
from importlib import import_module
from types import ModuleType, SimpleNamespace
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType

from megatron_ext.distributed.context_parallel import ContextRank, in_order
from megatron_ext.errors import ConfigError
from megatron_ext.training.megatron_models import cpu_megatron
from megatron_ext.training.megatron_models.attention import ContextAttention
from tests.process_group import run_ranks

SIZES = (4, 2, 3, 1)


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
    window: int | None = None
    """Tokens that a position sees, with itself."""

    cap: float | None = None
    """Cap of the scores."""

    has_sinks: bool = False
    """Whether every head has a learned number in its softmax."""


CASES = (
    Case(24, 1, 1, 1, 2),
    Case(48, 3, 6, 2, 5, packed=True),
    Case(24, 2, 4, 4, 7, scale=0.3),
    Case(72, 2, 3, 1, 1, packed=True),
    Case(48, 1, 2, 1, 3, window=5),
    Case(24, 2, 2, 2, 2, packed=True, window=7),
    Case(24, 1, 1, 1, 2, window=24),
    Case(24, 2, 6, 2, 5, cap=0.7),
    Case(48, 2, 3, 1, 4, packed=True, scale=0.3, window=7, cap=1.5),
    Case(24, 2, 6, 2, 5, has_sinks=True),
    Case(48, 2, 3, 3, 4, packed=True, scale=0.3, window=7, has_sinks=True),
)


UNCAPPED = tuple(case for case in CASES if case.cap is None)
"""Those that megatron-core's own attention has."""


class Attended(NamedTuple):
    """Output and gradients of whole sequences, or of a rank's part; positions first."""

    output: torch.Tensor
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor

    sinks: torch.Tensor
    """[H] a rank's part of the gradient; empty without any."""


def sinks_of(case):
    """[H] numbers of the heads."""
    return torch.linspace(-1.5, 2.5, case.heads)


def whole(case):
    """Query, key, value and the gradient of the output, [T, B, heads, D]."""
    generator = torch.Generator().manual_seed(sum(case[:5]))
    heads = case.heads, case.groups, case.groups, case.heads
    shapes = [(case.length, case.batch, count, case.width) for count in heads]
    query, key, value, grad = (torch.randn(shape, generator=generator) for shape in shapes)
    return query, key, value, grad.flatten(2)


def mask(case):
    """[B, 1, T, T] True where a position would look ahead, into another text or out of a window."""
    rows = [torch.arange(case.length) // (5 + 4 * row) for row in range(case.batch)]
    text = torch.stack(rows if case.packed else [torch.zeros(case.length)] * case.batch)
    hidden = torch.ones(case.length, case.length, dtype=torch.bool).triu(1)
    if case.window is not None:
        hidden |= hidden.new_ones(hidden.shape).tril(-case.window)
    return (hidden | (text[:, :, None] != text[:, None]))[:, None]


def window(case):
    """Tokens before and after, as megatron-core has them."""
    return None if case.window is None else (case.window - 1, 0)


def without_window(case):
    """The mask of what is packed alone, which a window is added to."""
    return mask(case._replace(window=None))


def attention(case, group):
    config = TransformerConfig(
        num_layers=1,
        hidden_size=case.heads * case.width,
        num_attention_heads=case.heads,
        num_query_groups=case.groups,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        window_size=window(case),
        softmax_type="learnable" if case.has_sinks else "vanilla",
        context_parallel_size=dist.get_world_size(group),
    )
    return with_sinks(
        case,
        ContextAttention(
            config=config,
            layer_number=1,
            attn_mask_type=AttnMaskType.causal,
            attention_type="self",
            softmax_scale=case.scale,
            score_cap=case.cap,
            pg_collection=SimpleNamespace(cp=group),
        ),
    )


def with_sinks(case, attend):
    if case.has_sinks:
        attend.softmax_offset.data.copy_(sinks_of(case))
    return attend


def gradient_of_sinks(case, attend):
    return attend.softmax_offset.grad if case.has_sinks else torch.zeros(0)


def on_a_rank(case, group):
    rank = ContextRank(rank=dist.get_rank(group), size=dist.get_world_size(group))
    # ``cut`` takes rows [B, T].
    own = [rank.cut(part.transpose(0, 1)).transpose(0, 1).contiguous() for part in whole(case)]
    *inputs, grad = own
    for part in inputs:
        part.requires_grad_()
    seen = rank.cut(without_window(case)[:, 0])[:, None] if case.packed else None
    attend = attention(case, group)
    output = attend(*inputs, seen)
    output.backward(grad)
    of_inputs = (part.grad for part in inputs)
    return Attended(output.detach(), *of_inputs, gradient_of_sinks(case, attend))


def of_one_rank(kind, case, group):
    """Output and gradients of a core attention of whole rows."""
    config = TransformerConfig(
        num_layers=1,
        hidden_size=case.heads * case.width,
        num_attention_heads=case.heads,
        num_query_groups=case.groups,
        attention_dropout=0.0,
        window_size=window(case) if kind is ContextAttention else None,
        softmax_type="learnable" if case.has_sinks else "vanilla",
        masked_softmax_fusion=False,
    )
    attend = kind(
        config=config,
        layer_number=1,
        attn_mask_type=AttnMaskType.causal,
        attention_type="self",
        softmax_scale=case.scale,
        pg_collection=SimpleNamespace(cp=group, tp=group),
    )
    with_sinks(case, attend)
    *inputs, grad = whole(case)
    for part in inputs:
        part.requires_grad_()
    seen = without_window(case) if case.packed else None
    if kind is DotProductAttention:
        seen = mask(case)
    output = attend(*inputs, seen, attn_mask_type=AttnMaskType.causal)
    output.backward(grad)
    of_inputs = (part.grad for part in inputs)
    return Attended(output.detach(), *of_inputs, gradient_of_sinks(case, attend))


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
    # megatron-core's own attention asks for both.
    parallel_state._set_global_memory_buffer()
    model_parallel_cuda_manual_seed(1, tp_rank=0, ep_rank=0, etp_rank=0)
    found["of one"] = [
        [of_one_rank(kind, case, groups[rank]) for case in UNCAPPED]
        for kind in (ContextAttention, DotProductAttention)
    ]
    return found


@pytest.fixture(scope="module")
def ranks():
    """One spawn for all sizes and cases."""
    return run_ranks(4, every_size)


def plain(case, dtype):
    *inputs, grad = (part.to(dtype) for part in whole(case))
    query, key, value = (part.requires_grad_() for part in inputs)
    heads = case.heads // case.groups
    scores = torch.einsum("ibhd,jbhd->bhij", query, key.repeat_interleave(heads, dim=2))
    scores = scores * (case.scale or 1 / math.sqrt(case.width))
    if case.cap is not None:
        scores = case.cap * torch.tanh(scores / case.cap)
    scores = scores.masked_fill(mask(case), -torch.inf)
    values = value.repeat_interleave(heads, dim=2)
    sinks = sinks_of(case).to(dtype).requires_grad_()
    if case.has_sinks:
        own = sinks[:, None, None].expand(*scores.shape[:-1], 1)
        scores = torch.cat((scores, own), dim=-1)
    shares = scores.softmax(dim=-1)[..., : case.length]
    output = torch.einsum("bhij,jbhd->ibhd", shares, values).flatten(2)
    output.backward(grad)
    of_sinks = sinks.grad if case.has_sinks else torch.zeros(0, dtype=dtype)
    return Attended(output.detach(), query.grad, key.grad, value.grad, of_sinks)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_output_and_gradients_are_those_of_whole_sequences(case, size, ranks):
    truth, single = plain(case, torch.float64), plain(case, torch.float32)
    for first in range(0, 4 // size * size, size):
        parts = [ranks[first + rank][size][CASES.index(case)] for rank in range(size)]
        for name, expected, rounded in zip(Attended._fields, truth, single, strict=True):
            pieces = [getattr(part, name) for part in parts]
            joined = sum(pieces) if name == "sinks" else in_order(torch.cat(pieces), size)
            if not joined.numel():
                continue
            # No worse than twice what the plain expression loses to fp32, and its last places.
            allowed = 2 * (rounded - expected).abs().max() + 1e-6 * expected.abs().max()
            assert (joined - expected).abs().max() <= allowed, name


@pytest.mark.parametrize("case", UNCAPPED, ids=str)
def test_values_and_gradients_are_those_of_megatron_core(case, ranks):
    for name, found, expected in zip(
        Attended._fields, *(part[UNCAPPED.index(case)] for part in ranks[0]["of one"]), strict=True
    ):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5, msg=name)


@pytest.mark.parametrize("number", [2, 4, 7, 9, 10], ids=["", "window", "cap", "sinks", "both"])
def test_the_last_positions_attend_to_a_cache_as_they_do_in_whole_rows(number, monkeypatch):
    monkeypatch.setattr("torch.distributed.get_rank", lambda _: 0)
    monkeypatch.setattr("torch.distributed.get_world_size", lambda _: 1)
    case = CASES[number]
    query, key, value, _ = whole(case)
    attend = attention(case, None)
    rows = attend(query, key, value, None)
    for last in (1, 5):
        found = attend(query[-last:], key, value, None)
        torch.testing.assert_close(found, rows[-last:], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_parts_of_rows_are_put_in_order_again(size):
    rows = torch.arange(3 * 24).view(3, 24)
    parts = [ContextRank(rank=rank, size=size).cut(rows) for rank in range(size)]
    assert all(part.shape == (3, 24 // size) for part in parts)
    joined = in_order(torch.cat([part.t() for part in parts]), size)
    assert torch.equal(joined, rows.t())


@pytest.mark.parametrize(
    ("options", "where"),
    [
        ({"attention_dropout": 0.1}, "attention_dropout"),
        ({"window_size": (8, 2)}, "window_size after a position"),
        ({"softmax_type": "off-by-one"}, "softmax_type off-by-one"),
    ],
)
def test_what_it_does_not_do_is_refused(options, where):
    config = TransformerConfig(
        num_layers=1, hidden_size=8, num_attention_heads=2, **{"attention_dropout": 0.0, **options}
    )
    with pytest.raises(ConfigError, match=f"{where}: attention without Transformer Engine"):
        ContextAttention(
            config=config, layer_number=1, attn_mask_type=AttnMaskType.causal, attention_type="self"
        )


def test_other_masks_and_kinds_are_refused():
    config = TransformerConfig(
        num_layers=1, hidden_size=8, num_attention_heads=2, attention_dropout=0.0
    )
    for kind, named in ((AttnMaskType.padding, "self"), (AttnMaskType.causal, "cross")):
        with pytest.raises(ConfigError):
            ContextAttention(
                config=config, layer_number=1, attn_mask_type=kind, attention_type=named
            )


class StandIn(torch.nn.Module):
    """For Transformer Engine's attention, which needs a GPU."""

    def __init__(self, **_):
        super().__init__()

    def forward(self, query, *_, **__):
        return torch.zeros_like(query).flatten(2)


def test_transformer_engine_has_rows_without_a_mask_alone(monkeypatch):
    module = ModuleType("megatron.core.extensions.transformer_engine")
    module.TEDotProductAttention = StandIn
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.delitem(
        sys.modules, "megatron_ext.training.megatron_models.te_attention", raising=False
    )
    monkeypatch.setattr("torch.distributed.get_rank", lambda _: 0)
    monkeypatch.setattr("torch.distributed.get_world_size", lambda _: 1)
    row_attention = import_module("megatron_ext.training.megatron_models.te_attention").RowAttention
    del sys.modules["megatron_ext.training.megatron_models.te_attention"]
    case = CASES[1]
    config = TransformerConfig(
        num_layers=1, hidden_size=30, num_attention_heads=6, attention_dropout=0.0
    )
    attend = row_attention(
        config=config,
        layer_number=1,
        attn_mask_type=AttnMaskType.causal,
        attention_type="self",
        pg_collection=type("Groups", (), {"cp": object()}),
    )
    query, key, value, _ = whole(case)
    options = {"attn_mask_type": AttnMaskType.causal, "attention_bias": None}
    assert not attend(query, key, value, None, **options).any()
    found = attend(query, key, value, mask(case), **options)
    torch.testing.assert_close(found, plain(case, torch.float32).output, rtol=1e-5, atol=1e-6)
    assert not list(attend.parameters())
