"""Adapters and chosen parts of a student learn alike in every layout, and nothing else does."""

import os

import pytest
import torch

from megatron_ext.training.configuration.lora import LoraConfig
from megatron_ext.training.metrics import read_metrics
from tests.process_group import run_ranks
from tests.training.layout_runs import FULL, LAYOUTS, AxisRun, Variant, start_and_train, train_runs
from tests.training.run_results import (
    assert_identical,
    assert_same_numbers,
    assert_same_weights,
    tensors_of,
    weights_of,
)
from tests.training.tiny_run import PP2, TP2

ADAPTED = Variant(objective="projected_kl", lora=LoraConfig(rank=4, alpha=8.0))
MIXED = Variant(
    objective="next_token",
    lora=LoraConfig(rank=2, targets=("linear_qkv", "linear_fc2")),
    trainable=("norms",),
)
VOCABULARY = Variant(objective="projected_kl", trainable=("embeddings", "head"), linear=True)
VARIANTS = (ADAPTED, MIXED, VOCABULARY)
ONE_ROW = {"micro_batch_size": 1}
SEQUENCE = {"sequence_parallel": True, "use_distributed_optimizer": True}
TWO_RANKS = [
    AxisRun("adapted-tp2", ADAPTED, TP2 | {"sequence_parallel": True}, FULL | {"save_interval": 1}),
    AxisRun("vocabulary-pp2", VOCABULARY, PP2, ONE_ROW),
]
FOUR_RANKS = []
if os.environ.get("MEGATRON_EXT_ALL_TEXT"):
    FOUR_RANKS += [
        AxisRun("adapted-tp2-pp2", ADAPTED, LAYOUTS["tp2-pp2"]),
        AxisRun("adapted-cp2-tp2", ADAPTED, LAYOUTS["cp2-tp2"] | SEQUENCE, FULL),
        AxisRun("adapted-pp2-vp2", ADAPTED, LAYOUTS["pp2-vp2"], ONE_ROW),
        AxisRun("mixed-tp2-pp2", MIXED, LAYOUTS["tp2-pp2"] | SEQUENCE),
        AxisRun("mixed-pp4-recompute", MIXED, LAYOUTS["pp4"], FULL | ONE_ROW),
        # Stages in the middle have nothing that learns.
        AxisRun("vocabulary-pp4", VOCABULARY, LAYOUTS["pp4"], ONE_ROW),
        AxisRun("vocabulary-tp2-dp2", VOCABULARY, LAYOUTS["tp2-dp2"] | SEQUENCE, ONE_ROW),
    ]
RUNS = TWO_RANKS + FOUR_RANKS
AGAIN = AxisRun("again", ADAPTED, {}, {"save_interval": 1}, ("adapted-tp2", 1))


@pytest.fixture(scope="module")
def runs(folder):
    alone = [AxisRun(str(variant), variant, {}, {"save_interval": 1}) for variant in VARIANTS]
    run_ranks(1, start_and_train, folder, alone, timeout_s=240)
    run_ranks(2, train_runs, folder, TWO_RANKS, timeout_s=240)
    if FOUR_RANKS:
        run_ranks(4, train_runs, folder, FOUR_RANKS, timeout_s=480)
    run_ranks(1, train_runs, folder, [AGAIN, _again(ADAPTED)], timeout_s=240)
    return folder


def _again(variant):
    """The last iteration of a run of one process, done again in a copy of it."""
    save = {"save_interval": 1}
    name = f"{variant}-again"
    return AxisRun(name, variant, {}, save, (str(variant), variant.iterations - 1))


@pytest.mark.parametrize("run", [*RUNS, AGAIN], ids=lambda run: run.name)
def test_layouts_train_the_same_adapters_and_parts(runs, run):
    alone, sharded = str(run.variant), run.name
    names = ("loss", "student_bits_per_byte") if run.variant.held_out else ("loss",)
    rows, expected = read_metrics(runs / sharded), read_metrics(runs / alone)
    assert_same_numbers(rows, expected, names)
    assert_same_weights(runs / sharded, runs / alone, run.variant.iterations)


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_only_what_is_named_learns(runs, variant):
    start, end = weights_of(runs / "start", 0), weights_of(runs / str(variant), variant.iterations)
    moved = {name for name in start if not torch.equal(start[name], end[name])}
    adapters = {name for name in end if ".lora." in name}
    expected = {
        ADAPTED: set(),
        MIXED: {name for name in start if "layer_norm" in name or "layernorm" in name},
        VOCABULARY: {"embedding.word_embeddings.weight"},
    }[variant]
    assert moved == expected
    assert end.keys() - start.keys() == adapters
    targets = variant.lora.targets if variant.lora else ()
    assert {name.split(".")[-3] for name in adapters} == set(targets)
    assert all(tensor.count_nonzero() for name, tensor in end.items() if name in adapters)


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_the_optimizer_has_a_state_of_what_learns_alone(runs, variant):
    tensors = tensors_of(runs / str(variant), variant.iterations)
    of_optimizer = {name for name in tensors if name.startswith("optimizer.state.exp_avg.")}
    stated = {name.removeprefix("optimizer.state.exp_avg.") for name in of_optimizer}
    learning = {name for name in tensors if ".lora." in name and not name.startswith("optimizer")}
    assert of_optimizer
    assert learning <= stated
    if variant is ADAPTED:
        assert stated == learning
    if variant is VOCABULARY:
        assert stated == {"embedding.word_embeddings.weight"}


def test_a_run_goes_on_bit_for_bit(runs):
    assert_identical(runs / f"{ADAPTED}-again", runs / str(ADAPTED), ADAPTED.iterations)
