"""Students and teachers with experts, which any layout trains as one process does.

So do adapters beside experts and attention, and parts that learn alone. With MEGATRON_EXT_ALL_TEXT
four processes, too: experts beside each of the other ways to share, and sigmoid scores with a bias.
"""

import os

import pytest
import torch

from megatron_ext.training.configuration.lora import LINEAR_LAYERS, LoraConfig
from megatron_ext.training.metrics import read_metrics
from tests.process_group import run_ranks
from tests.training.layout_runs import (
    EXPERTS,
    ROUTER_LOSSES,
    AxisRun,
    Variant,
    start_and_train,
    train_runs,
)
from tests.training.run_results import assert_same_numbers, assert_same_weights, weights_of
from tests.training.tiny_run import CP2, PP2, TP2

SOFTMAX = Variant(objective="projected_kl", experts=EXPERTS | ROUTER_LOSSES, held_out=True)
SIGMOID = {
    "moe_router_score_function": "sigmoid",
    "moe_router_bias_update_rate": 0.01,
    "moe_router_topk_scaling_factor": 1.5,
}
BIASED = Variant(objective="next_token", packing=True, experts=EXPERTS | ROUTER_LOSSES | SIGMOID)

ADAPTED = Variant(
    objective="projected_kl",
    experts=EXPERTS | ROUTER_LOSSES,
    lora=LoraConfig(rank=2, alpha=8.0, targets=tuple(LINEAR_LAYERS)),
)
ATTENTION = Variant(
    objective="next_token",
    experts=EXPERTS | ROUTER_LOSSES | SIGMOID,
    lora=LoraConfig(rank=3, targets=("linear_qkv", "linear_proj")),
)
CHOSEN = Variant(
    objective="next_token",
    experts=EXPERTS | ROUTER_LOSSES | SIGMOID,
    trainable=("experts", "routers", "norms"),
    # An odd number: biases of a start without any move to and fro.
    iterations=3,
)

ALL = bool(os.environ.get("MEGATRON_EXT_ALL_TEXT"))
EP2 = {"expert_model_parallel_size": 2}
EP4 = {"expert_model_parallel_size": 4}
WHOLE_EXPERTS = {"expert_tensor_parallel_size": 1}
SEQUENCE_TP2 = TP2 | {"sequence_parallel": True}
ONE_ROW = {"micro_batch_size": 1}
SAVES = {"save_interval": 1}
LENGTHS = {"variable_seq_lengths": True, "seq_length_multiple": 8}
SHARDED = {"use_distributed_optimizer": True}
ONE_LAYER = {"recompute_num_layers": 1}
RECOMPUTED = {"recompute_granularity": "full", "recompute_method": "uniform"}

FROM_ALONE = ("alone", 1)
OVERLAPS = dict.fromkeys(
    ("use_distributed_optimizer", "overlap_grad_reduce", "overlap_param_gather"), True
)
TWO = [
    AxisRun("ep2-from-alone", SOFTMAX, EP2, ONE_ROW, FROM_ALONE),
    AxisRun("adapted-ep2", ADAPTED, EP2, ONE_ROW | SAVES),
]
if ALL:
    TWO.append(AxisRun("tp2-etp1", SOFTMAX, SEQUENCE_TP2 | WHOLE_EXPERTS, SAVES))
FOUR = [
    AxisRun("ep2-tp2-from-alone", SOFTMAX, EP2 | SEQUENCE_TP2, ONE_ROW, FROM_ALONE),
    AxisRun("ep2-tp2", SOFTMAX, EP2 | SEQUENCE_TP2, ONE_ROW | LENGTHS | SAVES),
    AxisRun("ep4-tp2", SOFTMAX, EP4 | SEQUENCE_TP2 | WHOLE_EXPERTS),
    AxisRun("ep2-pp2", SOFTMAX, EP2 | PP2, ONE_ROW | LENGTHS),
    AxisRun("tp2-pp2", SOFTMAX, SEQUENCE_TP2 | PP2, RECOMPUTED | ONE_LAYER),
    AxisRun("ep2-dp4-overlaps", SOFTMAX, EP2 | OVERLAPS, ONE_ROW | SAVES),
    AxisRun("ep2-pp2-overlaps", SOFTMAX, EP2 | PP2 | OVERLAPS, ONE_ROW, ("alone-overlaps", 1)),
    AxisRun("ep2-cp2", SOFTMAX, EP2 | CP2 | SHARDED),
    AxisRun("biased-ep2-tp2", BIASED, EP2 | SEQUENCE_TP2, ONE_ROW),
    AxisRun("biased-ep2-pp2", BIASED, EP2 | PP2, ONE_ROW),
    AxisRun("adapted-ep2-tp2", ADAPTED, EP2 | SEQUENCE_TP2, ONE_ROW | LENGTHS | SAVES),
    AxisRun("adapted-ep4-tp2", ADAPTED, EP4 | SEQUENCE_TP2 | WHOLE_EXPERTS | SHARDED),
    AxisRun("adapted-ep2-etp2", ADAPTED, EP2 | {"expert_tensor_parallel_size": 2}, ONE_ROW),
    AxisRun("adapted-tp2-pp2", ADAPTED, SEQUENCE_TP2 | PP2, RECOMPUTED | ONE_LAYER),
    AxisRun("adapted-ep2-dp4-overlaps", ADAPTED, EP2 | OVERLAPS, ONE_ROW),
    AxisRun("attention-ep2-tp2", ATTENTION, EP2 | SEQUENCE_TP2, ONE_ROW),
    AxisRun("attention-ep2-dp4-overlaps", ATTENTION, EP2 | OVERLAPS, ONE_ROW),
    AxisRun("chosen-ep2-tp2", CHOSEN, EP2 | SEQUENCE_TP2 | SHARDED, ONE_ROW),
    AxisRun("chosen-ep2-pp2", CHOSEN, EP2 | PP2, ONE_ROW),
]
BACK = [
    AxisRun("alone-from-ep2-tp2", SOFTMAX, {}, {}, ("ep2-tp2", 1)),
    AxisRun("alone-from-overlaps", SOFTMAX, OVERLAPS, {}, ("ep2-dp4-overlaps", 1)),
    AxisRun("adapted-from-ep2-tp2", ADAPTED, {}, {}, ("adapted-ep2-tp2", 1)),
    AxisRun("alone-from-tp2-etp1", SOFTMAX, {}, {}, ("tp2-etp1", 1)),
]
AGAIN = AxisRun("adapted-from-ep2", ADAPTED, {}, {}, ("adapted-ep2", 1))
RUNS = [*TWO, AGAIN, *(FOUR + BACK if ALL else [])]
ALONE = {
    SOFTMAX: "alone",
    BIASED: "biased-alone",
    ADAPTED: "adapted-alone",
    ATTENTION: "attention-alone",
    CHOSEN: "chosen-alone",
}


@pytest.fixture(scope="module")
def runs(folder):
    alone = [AxisRun("alone", SOFTMAX, training=SAVES), AxisRun("adapted-alone", ADAPTED)]
    if ALL:
        alone += [AxisRun(ALONE[variant], variant) for variant in (BIASED, ATTENTION, CHOSEN)]
        alone.append(AxisRun("alone-overlaps", SOFTMAX, OVERLAPS, SAVES))
    run_ranks(1, start_and_train, folder, alone, timeout_s=240)
    run_ranks(2, train_runs, folder, TWO, timeout_s=240)
    if ALL:
        run_ranks(4, train_runs, folder, FOUR, timeout_s=480)
    run_ranks(1, train_runs, folder, [AGAIN, *(BACK if ALL else [])], timeout_s=240)
    return folder


@pytest.mark.parametrize("run", RUNS, ids=lambda run: run.name)
def test_every_iteration_measures_what_one_process_measures(runs, run):
    alone, sharded = (read_metrics(runs / name) for name in (ALONE[run.variant], run.name))
    assert len(alone) == run.variant.iterations
    terms = [name for name in ("loss", "kd", "ce") if name in alone[0]]
    balance = ("experts/load_balancing_loss", "experts/z_loss")
    loads = ("experts/max_load", "experts/min_load")
    assert all(row[name] > 0 for row in alone for name in balance)
    assert all(row["experts/max_load"] > 1 > row["experts/min_load"] for row in alone)
    exact = ("iteration", "tokens", "compared", *loads)
    assert_same_numbers(sharded, alone, (*terms, *balance), exact=exact)
    if run.variant.held_out:
        for name in ("student_bits_per_byte", "teacher_bits_per_byte"):
            assert sharded[-1][name] == pytest.approx(alone[-1][name], rel=1e-5)


@pytest.mark.parametrize("run", RUNS, ids=lambda run: run.name)
def test_the_trained_weights_are_those_of_one_process(runs, run):
    iteration, alone = run.variant.iterations, ALONE[run.variant]
    if run.variant is SOFTMAX:
        start, trained = weights_of(runs / "start", 0), weights_of(runs / alone, iteration)
        # Every router, expert, gate and norm has learnt: an axis that forgets a gradient shows.
        assert all((trained[name] - start[name]).abs().max() > 5e-4 for name in trained)
    assert_same_weights(runs / run.name, runs / alone, iteration)


@pytest.mark.parametrize("variant", [ADAPTED, *([ATTENTION, CHOSEN] if ALL else [])], ids=str)
def test_what_is_frozen_beside_experts_stays(runs, variant):
    start = weights_of(runs / variant.start, 0)
    end = weights_of(runs / ALONE[variant], variant.iterations)
    adapters = {name for name in end if ".lora." in name}
    moved = {name for name in start if not torch.equal(start[name], end[name])}
    assert end.keys() - start.keys() == adapters
    assert all((end[name] != 0).flatten(-2).any(-1).all() for name in adapters)
    layers = {name.split(".lora.")[0].removeprefix("decoder.layers.") for name in adapters}
    mixers = {"self_attention.linear_qkv", "self_attention.linear_proj"}
    blocks = ("shared_experts", "experts.experts")
    fed = {f"mlp.{block}.linear_fc{number}" for block in blocks for number in (1, 2)}
    assert layers == {ADAPTED: mixers | fed, ATTENTION: mixers, CHOSEN: set()}[variant]
    learns = (".experts.experts.", ".router.", "layernorm", "layer_norm")
    of_parts = {name for name in start if any(part in name for part in learns)}
    assert moved == (of_parts if variant is CHOSEN else set())
