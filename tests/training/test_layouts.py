"""The same weights and data train the same model on two processes as on one.

``test_parallel_axes.py`` has those of four.
"""

import os
from dataclasses import fields
from itertools import pairwise

import pytest
import torch

from megatron_ext.alignment import ChunkCounts
from megatron_ext.training.metrics import read_metrics, without_measurements
from tests.guards.golden_runs import check_golden
from tests.process_group import run_ranks
from tests.training.rank_functions import (
    first_layer,
    go_on,
    repeat_last_iteration,
    train_alone,
    train_layouts,
)
from tests.training.run_results import assert_same_numbers, assert_same_weights, weights_of
from tests.training.tiny_run import CP2, ITERATIONS, PP2, TP2

TWO_RANKS = {
    "tp2": TP2,
    "pp2": PP2,
    # Smaller microbatches: two of them a rank, as on one process.
    "dp2-sharded-optimizer": {"use_distributed_optimizer": True, "micro_batch_size": 1},
    "cp2": CP2,
}
OPTIMIZERS = ["-sharded-optimizer"]
if os.environ.get("MEGATRON_EXT_ALL_TEXT"):
    TWO_RANKS["dp2"] = {}
    OPTIMIZERS.append("")
GOES_ON = ["cp2", *(f"dp2{optimizer}" for optimizer in OPTIMIZERS)]
# Models of so few steps never agree on a first choice; tests/distributed compares that.
MEASURED = ("loss", "kd", "ce", "kd/teacher_entropy", "kd/offsupport_mass")


@pytest.fixture(scope="module")
def runs(folder):
    run_ranks(1, train_alone, folder)
    run_ranks(2, train_layouts, folder, [*TWO_RANKS.items()], GOES_ON, timeout_s=240)
    return folder


@pytest.mark.parametrize("layout", TWO_RANKS)
def test_every_iteration_measures_what_one_process_measures(runs, layout):
    alone, sharded = read_metrics(runs / "alone"), read_metrics(runs / layout)
    assert len(alone) == ITERATIONS
    assert all(row[name] for row in alone for name in MEASURED)
    exact = ("iteration", "chunks", *(field.name for field in fields(ChunkCounts)))
    assert_same_numbers(sharded, alone, MEASURED, exact=exact)
    for name in ("student_bits_per_byte", "teacher_bits_per_byte"):
        assert sharded[-1][name] == pytest.approx(alone[-1][name], rel=1e-5)


@pytest.mark.parametrize("name", ["alone", "tp2", "cp2"])
def test_a_run_measures_what_was_recorded(runs, name):
    check_golden(name, read_metrics(runs / name))


@pytest.mark.parametrize("layout", TWO_RANKS)
def test_the_trained_weights_are_the_same(runs, layout):
    alone, start = weights_of(runs / "alone"), weights_of(runs / "start", 0)
    assert any((alone[name] - start[name]).abs().max() > 1e-3 for name in alone)
    assert_same_weights(runs / layout, runs / "alone")


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_run_goes_on_exactly_from_a_checkpoint(runs, optimizer):
    name = f"dp2{optimizer}"
    before, weights = read_metrics(runs / name), weights_of(runs / name)
    run_ranks(2, repeat_last_iteration, runs, name, TWO_RANKS[name])
    after = read_metrics(runs / name)
    assert [*map(without_measurements, after)] == [*map(without_measurements, before)]
    for key, weight in weights_of(runs / name).items():
        assert torch.equal(weight, weights[key])


def test_one_process_goes_on_from_a_checkpoint_of_ranks_that_share_sequences(runs):
    run_ranks(1, repeat_last_iteration, runs, "cp2", {})
    alone, resumed = read_metrics(runs / "alone"), read_metrics(runs / "cp2")
    for key in ("loss", "kd", "ce", "student_bits_per_byte"):
        assert resumed[-1][key] == pytest.approx(alone[-1][key], rel=1e-5)
    assert_same_weights(runs / "cp2", runs / "alone")


def test_the_stages_of_a_pipeline_draw_different_weights(tmp_path):
    first, second = run_ranks(2, first_layer, tmp_path)
    assert first.shape == second.shape
    assert not torch.isclose(first, second).any(dim=1).all()
    # Of the same distribution all the same.
    torch.testing.assert_close(first.std(), second.std(), rtol=0.1, atol=0)


@pytest.fixture(scope="module")
def stretches(folder):
    """TP2, again TP2, then PP2; by stretch what each rank saw."""
    layouts = [(1, TP2), (2, TP2), (3, PP2)]
    by_rank = run_ranks(2, go_on, folder, layouts, timeout_s=240)
    return [*map(list, zip(*by_rank, strict=True))]


def test_every_stretch_begins_with_the_model_that_the_one_before_left(stretches):
    for before, after in pairwise(stretches):
        assert after[0]["done"] == before[0]["done"] + 1
        # The last stage measures, which is another rank under PP2.
        trained = max(rank["trained"] or 0.0 for rank in before)
        loaded = max(rank["loaded"] or 0.0 for rank in after)
        assert loaded == pytest.approx(trained, rel=1e-5)
        assert max(rank["trained"] or 0.0 for rank in after) != pytest.approx(loaded, rel=1e-6)


def test_random_numbers_go_on_under_the_same_layout_and_are_seeded_under_another(stretches):
    first, second, third = stretches
    for rank in range(2):
        # Held-out measuring draws none, so that the numbers behind a save are those behind a load.
        assert second[rank]["numbers"] == first[rank]["next_numbers"]
        assert third[rank]["numbers"] != second[rank]["next_numbers"]
    assert third[0]["numbers"] != third[1]["numbers"]
