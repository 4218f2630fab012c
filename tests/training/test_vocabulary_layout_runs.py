"""A run with permuted heads learns, measures and saves what one without does."""

import os

import pytest
import torch

from megatron_ext.projection.layout import VocabularyLayout
from megatron_ext.training.metrics import read_metrics
from tests.guards.golden_runs import check_golden
from tests.process_group import run_ranks
from tests.training.layout_runs import Run, run_alone, run_layouts
from tests.training.run_results import assert_same_numbers, assert_same_weights, tensors_of
from tests.training.tiny_run import CP2, PP2, STUDENT_VOCAB_SIZE, TP2

SHARDED_OPTIMIZER = {"use_distributed_optimizer": True}
UNTIED = {"untied": True, "teacher": "tied-teacher", "objective": "partition_kl"}

BYTES = UNTIED | {"objective": "byte_prefix"}
GOLD = UNTIED | {"objective": "gold"}
BF16 = {"precision": "bf16", "parallel": SHARDED_OPTIMIZER}

ALL = bool(os.environ.get("MEGATRON_EXT_ALL_TEXT"))
ALONE = [
    Run("tied", "original", is_kept=True),
    Run("untied", "original", is_kept=True, **UNTIED),
]
ALONE_PERMUTED = [
    Run("tied-permuted", is_kept=ALL),
    Run("untied-permuted", **UNTIED),
    Run("tied-turned-on", goes_on_from="tied"),
]
TWO_RANKS = [
    Run("tied-tp2", parallel=TP2),
    Run("untied-linear-tp2", parallel=TP2, linear=True, **UNTIED),
]
COPY_ALONE = [Run("copy-tied", goes_on_from="tied", only_saves=True)]
COPY_ON_TWO_RANKS = [
    Run("copy-untied-tp2", parallel=TP2, goes_on_from="untied", only_saves=True, **UNTIED),
]
if ALL:
    ALONE += [Run("bf16", "original", is_kept=True, **BF16), Run("bytes", "original", **BYTES)]
    ALONE.append(Run("gold", "original", **GOLD))
    ALONE_PERMUTED.append(Run("tied-turned-off", "original", goes_on_from="tied-permuted"))
    TWO_RANKS += [
        Run("untied-tp2", parallel=TP2, **UNTIED),
        Run("tied-linear-tp2", parallel=TP2, linear=True),
        Run("bytes-linear-tp2", parallel=TP2, linear=True, **BYTES),
        Run("gold-tp2", parallel=TP2, **GOLD),
        Run("tied-pp2", parallel=PP2),
        Run("untied-cp2", parallel=CP2, **UNTIED),
        Run("tied-dp2", parallel=SHARDED_OPTIMIZER, is_kept=True),
        Run("tied-dp2-turned-off", "original", goes_on_from="tied-dp2", parallel=SHARDED_OPTIMIZER),
    ]
    COPY_ALONE.append(Run("copy-bf16", goes_on_from="bf16", only_saves=True, **BF16))
    COPY_ON_TWO_RANKS += [
        Run("copy-tied-tp2", parallel=TP2, goes_on_from="tied", only_saves=True),
        Run("copy-tied-pp2", parallel=PP2, goes_on_from="tied", only_saves=True),
    ]
PERMUTED = [run.name for run in ALONE_PERMUTED + TWO_RANKS]
COPIES = COPY_ALONE + COPY_ON_TWO_RANKS

VOCABULARY_ROWS = ("word_embeddings.weight", "output_layer.weight")


def expected_of(name):
    return name.partition("-")[0]


@pytest.fixture(scope="module")
def finished(folder):
    """The folder of all runs, and heads by id on one rank and by place on two."""
    seen = Run("seen", "original")
    by_id = run_ranks(
        1, run_alone, folder, ALONE + ALONE_PERMUTED + COPY_ALONE, seen, timeout_s=400
    )
    seen = Run("seen-permuted", parallel=TP2)
    runs = TWO_RANKS + COPY_ON_TWO_RANKS
    by_place = run_ranks(2, run_layouts, folder, runs, seen, timeout_s=400)
    return folder, by_id, by_place


@pytest.fixture(scope="module")
def runs(finished):
    return finished[0]


@pytest.mark.parametrize("name", PERMUTED)
def test_a_run_measures_what_it_does_in_the_order_of_ids(runs, name):
    expected, measured = read_metrics(runs / expected_of(name)), read_metrics(runs / name)
    assert len(expected) == 2
    assert "student_bits_per_byte" in expected[-1]
    # Where time went depends on when a run saved and was started again.
    names = [{name for name in row if not name.startswith("seconds")} for row in expected]
    assert [{name for name in row if not name.startswith("seconds")} for row in measured] == names
    assert_same_numbers(measured, expected, ("loss", "kd", "ce"), exact=("compared",))
    for key in ("student_bits_per_byte", "teacher_bits_per_byte"):
        assert measured[-1][key] == pytest.approx(expected[-1][key], rel=1e-5)


def test_a_run_measures_what_was_recorded(runs):
    check_golden("co-sharded-tp2", read_metrics(runs / "tied-tp2"))


@pytest.mark.parametrize("name", PERMUTED)
def test_what_was_trained_is_saved_in_the_order_of_ids(runs, name):
    assert_same_weights(runs / name, runs / expected_of(name))


@pytest.mark.parametrize("run", COPIES, ids=lambda run: run.name)
def test_a_checkpoint_is_bit_for_bit_the_one_without_a_layout(runs, run):
    original, saved = tensors_of(runs / run.goes_on_from, 1), tensors_of(runs / run.name)
    assert saved.keys() == original.keys()
    head = "output_layer.weight" if run.untied else "word_embeddings.weight"
    assert len([key for key in saved if key.endswith(head)]) >= 3
    for key, tensor in original.items():
        # Over two ranks megatron-core pads the vocabulary to more rows.
        rows = STUDENT_VOCAB_SIZE if key.endswith(VOCABULARY_ROWS) else None
        assert torch.equal(saved[key][:rows], tensor[:rows]), key


def test_the_heads_are_permuted_while_a_run_trains(finished):
    folder, [whole], shards = finished
    layout = VocabularyLayout.load(folder / "seen-permuted" / "vocabulary_layout.json")
    for side, order in enumerate((layout.student, layout.teacher)):
        size = order.vocab_size
        permuted = torch.cat([shard[side] for shard in shards])
        assert torch.equal(
            permuted[torch.from_numpy(order.places[:size].copy())], whole[side][:size]
        )
        assert not torch.equal(permuted[:size], whole[side][:size])
    assert sum(layout.common_counts) > 1000
