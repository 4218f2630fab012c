"""Linear attention reads what its recurrence says, and of a packed row each text alone."""

import sys
import weakref
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer import TransformerConfig

from megatron_ext.distributed.context_parallel import ContextRank, in_order
from megatron_ext.errors import ConfigError
from megatron_ext.training.configuration.config import ModelConfig
from megatron_ext.training.dry_run.memory import _of_linear_rule
from megatron_ext.training.megatron_models import cpu_megatron
from megatron_ext.training.megatron_models.gated_delta_net import GatedDeltaNet
from megatron_ext.training.megatron_models.gated_delta_rule import (
    Heads,
    fused_delta_rule,
    gated_delta_rule,
    gated_delta_rule_reference,
    once_of,
)
from tests.process_group import run_ranks
from tests.training.dry_run.planned_runs import plan_of, planned_run
from tests.training.tiny_run import changed

ROWS, HEADS, KEY, VALUE = 2, 3, 8, 5


def heads_of(length):
    """Random numbers of each kind, which a gradient is asked of."""
    generator = torch.Generator().manual_seed(length)

    def drawn(*shape):
        return torch.randn(ROWS, length, HEADS, *shape, dtype=torch.float64, generator=generator)

    query, key = (torch.nn.functional.normalize(drawn(KEY), dim=-1) for _ in range(2))
    heads = Heads(query, key, drawn(VALUE), -drawn().abs(), drawn().sigmoid())
    return Heads(*(part.requires_grad_() for part in heads))


def documents_of(length, rows):
    """Ascending numbers, of texts of other lengths in each row."""
    texts = [torch.arange(length) // (7 + 60 * row) for row in range(rows)]
    return torch.stack(texts)


@pytest.mark.parametrize("rows_of_documents", [0, 1, ROWS])
@pytest.mark.parametrize("length", [1, 5, 64, 65, 150])
def test_chunks_compute_what_the_recurrence_does(length, rows_of_documents):
    heads = heads_of(length)
    documents = documents_of(length, rows_of_documents) if rows_of_documents else None
    state = torch.randn(ROWS, HEADS, KEY, VALUE, dtype=torch.float64, requires_grad=True)
    found = []
    for rule in (gated_delta_rule, gated_delta_rule_reference):
        output, last = rule(heads, state, documents)
        weighed = (output * torch.linspace(-1, 2, output.numel()).view_as(output)).sum()
        weighed = weighed + (last * torch.linspace(1, 3, last.numel()).view_as(last)).sum()
        found.append((output, last, *torch.autograd.grad(weighed, [*heads, state])))
    for own, expected in zip(*found, strict=True):
        torch.testing.assert_close(own, expected, rtol=1e-10, atol=1e-12)


def test_a_state_is_carried_on():
    heads = heads_of(90)
    whole, last = gated_delta_rule(heads)
    first, state = gated_delta_rule(Heads(*(part[:, :70] for part in heads)))
    second, end = gated_delta_rule(Heads(*(part[:, 70:] for part in heads)), state)
    torch.testing.assert_close(torch.cat((first, second), dim=1), whole, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(end, last, rtol=1e-10, atol=1e-12)


def chunk_gated_delta_rule(
    q, k, v, *, g, beta, scale, initial_state, output_final_state, cu_seqlens
):
    """What flash-linear-attention's function of the name computes, of its arguments."""
    documents = None
    if cu_seqlens is not None:
        assert len(q) == 1
        documents = torch.repeat_interleave(cu_seqlens.diff())[None]
    heads = Heads(*(part.double() for part in (scale * q, k, v, g, beta)))
    output, last = gated_delta_rule_reference(heads, initial_state, documents)
    return output.to(q.dtype), last if output_final_state else None


@pytest.mark.parametrize("rows_of_documents", [0, 1, ROWS])
def test_the_fused_rule_is_asked_for_the_same(monkeypatch, rows_of_documents):
    name = "fla.ops.gated_delta_rule"
    stand_in = SimpleNamespace(chunk_gated_delta_rule=chunk_gated_delta_rule)
    for module in ("fla", "fla.ops", name):
        monkeypatch.setitem(sys.modules, module, stand_in)
    heads = heads_of(70)
    documents = documents_of(70, rows_of_documents) if rows_of_documents else None
    output, last = fused_delta_rule(heads, None, documents, dtype=torch.float64)
    expected, state = gated_delta_rule(heads, None, documents)
    torch.testing.assert_close(output, expected, rtol=1e-10, atol=1e-12)
    if documents is None:
        torch.testing.assert_close(last, state, rtol=1e-10, atol=1e-12)
    rounded, _ = fused_delta_rule(heads, None, documents, dtype=torch.bfloat16)
    assert rounded.dtype == torch.bfloat16
    torch.testing.assert_close(rounded.double(), expected, rtol=0.05, atol=0.05)


LENGTHS = (5, 1, 79, 3)


def test_what_is_made_of_a_mask_is_made_once_and_goes_with_it():
    mask, another = torch.ones(2), torch.ones(2)
    made = [once_of(mask, lambda: torch.zeros(3)) for _ in range(2)]
    assert made[0] is made[1]
    assert once_of(another, lambda: torch.zeros(3)) is not made[0]
    gone = weakref.ref(made.pop())
    del mask, made
    assert gone() is None


def kept_by_the_rule(rank, length):
    """Bytes that autograd keeps between the two products."""
    net, saved = net_of({}), {}

    def keep(tensor):
        saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
        return tensor

    products = net.in_proj(torch.randn(length, 1, 16))[0].detach().requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        net._attended(products, net.out_norm.weight, None, None)
    return sum(storage.nbytes() for storage in saved.values())


def test_what_is_kept_while_it_is_computed_again_is_planned():
    length = 256
    model = ModelConfig(
        num_layers=2,
        hidden_size=16,
        num_attention_heads=2,
        seq_length=length,
        **WHOLE | {"linear_attention_freq": 2, "linear_value_head_dim": VALUE},
    )
    plan = plan_of(changed(planned_run(model), training={"micro_batch_size": 1}))
    (kept,) = run_ranks(1, kept_by_the_rule, length)
    # Of narrow heads the numbers of a head as a whole are a part, too.
    assert _of_linear_rule(plan, plan.student) == pytest.approx(kept, rel=0.15)


def net_of(layout):
    """Random weights that remember more than the last tokens, the same in every layout."""
    cpu_megatron.install()
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(**layout)
    model_parallel_cuda_manual_seed(1)
    torch.manual_seed(3)
    net = GatedDeltaNet(
        TransformerConfig(
            num_layers=1,
            hidden_size=16,
            num_attention_heads=2,
            use_cpu_initialization=True,
            init_method=lambda weight: torch.nn.init.normal_(weight, std=0.5),
            linear_num_key_heads=2,
            linear_num_value_heads=4,
            linear_key_head_dim=KEY,
            linear_value_head_dim=VALUE,
            linear_conv_kernel_dim=4,
            **layout,
        ),
        layer_number=1,
    )
    with torch.no_grad():
        net.A_log.sub_(4)
    return net


def packed():
    """Hidden states [T, 2, 16], weights of their outputs, and the mask of texts of ``LENGTHS``."""
    length = sum(LENGTHS)
    hidden = torch.randn(length, 2, 16, generator=torch.Generator().manual_seed(5))
    text = torch.repeat_interleave(torch.tensor(LENGTHS))
    mask = torch.ones(length, length, dtype=torch.bool).triu(1) | (text[:, None] != text)
    return hidden, torch.linspace(-1, 1, hidden.numel()).view_as(hidden), mask[None, None]


def read(net, parts, weights):
    """Outputs of parts, one after the other, and the gradients of all weights."""
    net.zero_grad()
    output = torch.cat([net(*part)[0] for part in parts])
    (output * weights).sum().backward()
    return output.detach(), {name: p.grad.clone() for name, p in net.named_parameters()}


def read_packed_rows(rank):
    """A packed row, and each of its texts alone."""
    net, (hidden, weights, mask) = net_of({}), packed()
    alone = [(part, None) for part in hidden.split(LENGTHS)]
    return read(net, [(hidden, mask)], weights), read(net, alone, weights)


def read_cut_rows(rank):
    """Of this rank's part of a packed row and of a whole one: outputs, and the ranks' gradients."""
    net, (hidden, weights, mask) = net_of({"context_parallel_size": 2}), packed()
    context = ContextRank.of(parallel_state.get_context_parallel_group())
    own, weights = (context.cut(part.transpose(0, 1)).transpose(0, 1) for part in (hidden, weights))
    found = []
    for seen in (context.cut(mask[0])[None], None):
        output, gradients = read(net, [(own, seen)], weights)
        for gradient in gradients.values():
            dist.all_reduce(gradient)
        gathered = [torch.empty_like(output) for _ in range(2)]
        dist.all_gather(gathered, output.contiguous())
        found.append((in_order(torch.cat(gathered), 2), gradients))
    return found


@pytest.fixture(scope="module")
def alone():
    return run_ranks(1, read_packed_rows)[0]


def assert_same(found, expected):
    torch.testing.assert_close(found[0], expected[0], rtol=0, atol=1e-5)
    assert len(found[1]) == 6
    for name, gradient in expected[1].items():
        atol = 1e-4 * float(gradient.abs().max())
        torch.testing.assert_close(found[1][name], gradient, rtol=0, atol=atol)


def test_texts_of_a_packed_row_do_not_see_each_other(alone):
    together, one_by_one = alone
    assert one_by_one[0].std() > 0.05
    assert_same(together, one_by_one)


def test_context_parallel_ranks_read_what_one_does(alone):
    for packed_row, whole_row in run_ranks(2, read_cut_rows):
        assert_same(packed_row, alone[0])
        assert (whole_row[0] - packed_row[0]).abs().max() > 0.01


WHOLE = {
    "linear_attention_freq": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4,
}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"linear_attention_freq": None}, "linear_num_key_heads is of linear attention"),
        ({"linear_value_head_dim": None}, "linear attention needs linear_value_head_dim"),
        ({"linear_attention_freq": 1}, "every layer would have full attention"),
        ({"linear_num_value_heads": 3}, "linear_num_value_heads is not a multiple"),
        ({"window_size": 8}, "linear attention does not go with window_size"),
    ],
)
def test_linear_attention_that_cannot_be_is_refused(changes, message):
    with pytest.raises(ConfigError, match=message):
        ModelConfig(num_layers=4, hidden_size=32, num_attention_heads=4, **WHOLE | changes)
