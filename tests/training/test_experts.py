"""A layer of experts and its router's losses are those of their plain expressions.

E experts, T positions, B rows, D hidden width.
"""

import pytest
import torch
from torch.nn import functional

from megatron_ext.distributed.layout import Layout
from megatron_ext.errors import ConfigError
from megatron_ext.training.configuration.config import ModelConfig, ParallelConfig, TrainingConfig
from megatron_ext.training.configuration.lora import LINEAR_LAYERS, LoraConfig
from megatron_ext.training.megatron_models.experts import loads, routers
from megatron_ext.training.megatron_models.learning_parts import add_adapters, freeze_parts
from megatron_ext.training.megatron_models.models import build_model_chunks
from tests.process_group import run_ranks
from tests.training.rank_functions import fresh_groups

LENGTHS = (7, 4, 0)
"""Of three rows; the last is padding alone."""

SIZES = {
    "num_layers": 1,
    "hidden_size": 16,
    "num_attention_heads": 2,
    "seq_length": max(LENGTHS),
    "num_experts": 5,
    "moe_router_topk": 3,
    "moe_ffn_hidden_size": 12,
    "moe_shared_expert_intermediate_size": 20,
    "moe_aux_loss_coeff": 0.3,
    "moe_z_loss_coeff": 0.07,
    "init_method_std": 0.5,
}
KINDS = {
    "softmax": {"moe_shared_expert_gate": True},
    "softmax-of-all": {"moe_router_pre_softmax": True},
    "sigmoid": {
        "moe_router_score_function": "sigmoid",
        "moe_router_bias_update_rate": 0.25,
        "moe_router_topk_scaling_factor": 2.5,
    },
}
KINDS["adapted"] = KINDS["softmax"]
KINDS["adapted-frozen"] = KINDS["sigmoid"]
ADAPTERS = LoraConfig(rank=2, alpha=6.0, targets=tuple(LINEAR_LAYERS))


def measure(rank, kinds):
    """Each kind of layer and its plain expression, as pairs of what must be equal, by name."""
    groups = fresh_groups(Layout())
    found = {}
    for name, options in kinds.items():
        torch.manual_seed(5)
        (gpt,) = chunks = build_model_chunks(
            ModelConfig(**SIZES, **options),
            padded_vocab_size=8,
            parallel=ParallelConfig(),
            training=TrainingConfig(train_iters=1),
            groups=groups,
        )
        if name.startswith("adapted"):
            add_adapters(chunks, ADAPTERS, seed=3)
            for parameter_name, parameter in gpt.named_parameters():
                if parameter_name.endswith(".lora.b"):
                    torch.nn.init.normal_(parameter, std=0.2)
        if name.endswith("frozen"):
            freeze_parts(chunks, None)
        found[name] = _pairs(chunks, gpt.decoder.layers[0].mlp)
    return found


def _pairs(chunks, layer):
    lengths = torch.tensor(LENGTHS)
    count = lengths.sum().float()
    padding = torch.arange(max(LENGTHS)) >= lengths[:, None]
    hidden = torch.randn(max(LENGTHS), len(LENGTHS), 16, requires_grad=True)
    upstream = torch.randn_like(hidden)
    (router,) = routers(chunks)
    if router.expert_bias is not None:
        router.expert_bias.copy_(torch.linspace(-0.4, 0.4, 5))
    router.begin(count)
    router.set_layer_number(1)
    with torch.no_grad():
        layer(hidden, padding_mask=padding)
    layer.eval()
    layer(hidden, padding_mask=padding)
    layer.train()
    unseen = router.load.clone()

    output, _ = layer(hidden, padding_mask=padding)
    learns = router.weight.requires_grad
    weights = {name: it for name, it in layer.named_parameters() if it.requires_grad}
    inputs = [hidden, *weights.values()]
    found = torch.autograd.grad((output * upstream).sum(), inputs)

    logits = hidden @ router.weight.T
    expected, chosen = _plain_output(hidden, logits, layer)
    balance, z_loss = _plain_losses(logits, router, padding)
    config = router.config
    total = (expected * upstream).sum()
    if learns:
        total = total + (0.3 * balance + 0.07 * z_loss) / count
    gradients = torch.autograd.grad(total, inputs)

    tokens = chosen[~padding.T].sum(dim=0)
    metrics = loads(chunks, 1)
    bias = router.expert_bias
    step = 0.25 * torch.sign(tokens.float().mean() - tokens) * learns
    moved = None if bias is None else bias + step
    router.update_bias()
    pairs = {
        "a pass that does not learn": (unseen, torch.zeros_like(unseen)),
        "output": (output, expected),
        "tokens": (router.load[:-2], tokens.double()),
        "load balancing": (metrics["experts/load_balancing_loss"], float(balance / count)),
        "z-loss": (metrics["experts/z_loss"], float(z_loss / count)),
        "busiest": (metrics["experts/max_load"], float(tokens.max() / tokens.float().mean())),
        "idlest": (metrics["experts/min_load"], float(tokens.min() / tokens.float().mean())),
        **{
            f"gradient of {name}": pair
            for name, *pair in zip(["input", *weights], found, gradients, strict=True)
        },
    }
    assert config.moe_router_topk == 3
    if moved is not None:
        pairs["bias"] = (bias, moved)
    return {
        name: tuple(torch.as_tensor(value).detach().clone() for value in pair)
        for name, pair in pairs.items()
    }


def _plain_output(hidden, logits, layer):
    """[T, B, D] of every expert over every token, weighed; and [T, B, E] what is chosen."""
    config, router = layer.config, layer.router
    of_choice = logits
    if config.moe_router_score_function == "sigmoid":
        of_choice = logits.sigmoid() + router.expert_bias
    chosen = torch.zeros_like(logits, dtype=torch.bool)
    chosen.scatter_(-1, of_choice.topk(3, dim=-1).indices, True)
    if config.moe_router_score_function == "sigmoid":
        scores = logits.sigmoid() * chosen
        scores = 2.5 * scores / scores.sum(dim=-1, keepdim=True)
    elif config.moe_router_pre_softmax:
        scores = logits.softmax(dim=-1) * chosen
    else:
        scores = logits.masked_fill(~chosen, -torch.inf).softmax(dim=-1)
    outputs = [_feed_forward(hidden, expert) for expert in layer.experts.local_experts]
    routed = (torch.stack(outputs, dim=-1) * scores.unsqueeze(-2)).sum(dim=-1)
    shared = _feed_forward(hidden, layer.shared_experts)
    if config.moe_shared_expert_gate:
        shared = shared * (hidden @ layer.shared_experts.gate_weight.T).sigmoid()
    return routed + shared, chosen


def _feed_forward(hidden, mlp):
    gate, up = (hidden @ _merged(mlp.linear_fc1).T).chunk(2, dim=-1)
    return (functional.silu(gate) * up) @ _merged(mlp.linear_fc2).T


def _merged(linear):
    if linear.lora is None:
        return linear.weight
    return linear.weight + 3.0 * linear.lora.b @ linear.lora.a


def _plain_losses(logits, router, padding):
    """Both losses times N, row by row and token by token."""
    balance = z_loss = 0.0
    scores = logits.softmax(dim=-1)
    if router.config.moe_router_score_function == "sigmoid":
        scores = logits.sigmoid() / logits.sigmoid().sum(dim=-1, keepdim=True)
    for row, length in enumerate((~padding).sum(dim=1).tolist()):
        for token in logits[:length, row]:
            z_loss = z_loss + token.logsumexp(dim=-1) ** 2
        if length == 0:
            continue
        of_row = scores[:length, row]
        counts = torch.zeros(5)
        for token in of_row:
            counts[token.topk(3).indices] += 1
        share, mean = counts / (3 * length), of_row.sum(dim=0) / length
        balance = balance + length * 5 * (share * mean).sum()
    return balance, z_loss


@pytest.fixture(scope="module")
def measured():
    return run_ranks(1, measure, KINDS)[0]


@pytest.mark.parametrize("kind", KINDS)
def test_a_layer_is_its_plain_expression_in_values_and_gradients(measured, kind):
    pairs = measured[kind]
    assert len(pairs) >= 7 + 1 + 1 + 2 * 5 + 2
    for name, (found, expected) in pairs.items():
        assert name == "a pass that does not learn" or expected.abs().max() > 0.05, name
        # fp32 sums in another order.
        torch.testing.assert_close(found, expected, rtol=2e-5, atol=2e-5, msg=name)


def test_settings_of_experts_that_contradict_each_other_are_refused():
    dense = {name: value for name, value in SIZES.items() if name != "num_experts"}
    for options in (
        dense,
        SIZES | {"moe_router_topk": 6},
        SIZES | {"moe_router_topk": 1},
        SIZES | {"moe_router_bias_update_rate": 0.1},
        SIZES | {"moe_router_score_function": "sigmoid", "moe_router_pre_softmax": True},
        SIZES | {"moe_shared_expert_gate": True, "moe_shared_expert_intermediate_size": None},
        SIZES | {"post_layernorms": True},
    ):
        with pytest.raises(ConfigError):
            ModelConfig(**options)


def test_processes_that_do_not_divide_over_experts_are_refused():
    layout = Layout(expert_model_parallel_size=3, tensor_model_parallel_size=2)
    with pytest.raises(ConfigError, match="do not divide over experts"):
        layout.replicas(8)
