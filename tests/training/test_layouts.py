"""The same weights and data train the same model on two processes as on one.

``test_parallel_axes.py`` has those of four.
"""

from dataclasses import fields

import pytest
import torch

from megatron_ext.alignment import ChunkCounts
from megatron_ext.training.metrics import read_metrics, without_measurements
from tests.guards.golden_runs import check_golden
from tests.process_group import run_ranks
from tests.training.checkpoint_tensors import weights_of
from tests.training.rank_functions import repeat_last_iteration, train_alone, train_layouts
from tests.training.tiny_run import ITERATIONS, write_corpus, write_rank_list

TWO_RANKS = [
    ("tp2", {"tensor_model_parallel_size": 2}),
    ("pp2", {"pipeline_model_parallel_size": 2}),
    ("dp2", {}),
    # Smaller microbatches: two of them a rank, as on one process.
    ("dp2-sharded-optimizer", {"use_distributed_optimizer": True, "micro_batch_size": 1}),
    ("cp2", {"context_parallel_size": 2}),
]
LAYOUTS = [name for name, _ in TWO_RANKS]

# fp32 sums in another order: a few ulps in each gradient, which AdamW turns into at most a small
# share of one step of size lr = 1e-3 where a gradient is itself near rounding.
PARAMETER_TOLERANCE = 2e-5


# megatron-core takes each tensor's norm with torch.norm, whose fp32 sum over a vocabulary's rows is
# off by some 1e-5 on the CPU; a shard, being shorter, is off by less.
GRADIENT_NORM_TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("layouts")
    write_corpus(folder)
    write_rank_list(folder)
    run_ranks(1, train_alone, folder)
    run_ranks(2, train_layouts, folder, TWO_RANKS, timeout_s=240)
    return folder


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    # Models of so few steps never agree on a first choice; tests/distributed compares that.
    "quantity",
    ["loss", "kd", "ce", "kd/teacher_entropy", "kd/offsupport_mass"],
)
def test_every_iteration_measures_what_one_process_measures(runs, layout, quantity):
    alone, sharded = read_metrics(runs / "alone"), read_metrics(runs / layout)
    assert len(alone) == ITERATIONS
    assert [row["iteration"] for row in sharded] == [row["iteration"] for row in alone]
    for count in ("chunks", *(field.name for field in fields(ChunkCounts))):
        assert [row[count] for row in sharded] == [row[count] for row in alone]
    expected = [row[quantity] for row in alone]
    assert all(expected)
    assert [row[quantity] for row in sharded] == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("name", ["alone", "tp2", "cp2"])
def test_a_run_measures_what_was_recorded(runs, name):
    check_golden(name, read_metrics(runs / name))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_iteration_has_the_gradient_norm_of_one_process(runs, layout):
    expected = [row["grad_norm"] for row in read_metrics(runs / "alone")]
    measured = [row["grad_norm"] for row in read_metrics(runs / layout)]
    assert measured == pytest.approx(expected, rel=GRADIENT_NORM_TOLERANCE)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_held_out_bits_per_byte_do_not_depend_on_the_layout(runs, layout):
    alone, sharded = read_metrics(runs / "alone")[-1], read_metrics(runs / layout)[-1]
    for name in ("student_bits_per_byte", "teacher_bits_per_byte"):
        assert sharded[name] == pytest.approx(alone[name], rel=1e-5)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_trained_weights_are_the_same(runs, layout):
    alone, sharded = _weights(runs / "alone"), _weights(runs / layout)
    start = _weights(runs / "start", iteration=0)
    assert alone.keys() == sharded.keys()
    assert any((alone[name] - start[name]).abs().max() > 1e-3 for name in alone)
    for name, weight in alone.items():
        rows = min(len(weight), len(sharded[name]))
        torch.testing.assert_close(
            sharded[name][:rows], weight[:rows], rtol=0, atol=PARAMETER_TOLERANCE
        )


@pytest.mark.parametrize("optimizer", ["", "-sharded-optimizer"])
def test_a_run_goes_on_exactly_from_a_checkpoint(runs, optimizer):
    name = f"dp2{optimizer}"
    before, weights = read_metrics(runs / name), _weights(runs / name)
    run_ranks(2, repeat_last_iteration, runs, name, dict(TWO_RANKS)[name])
    after = read_metrics(runs / name)
    assert [*map(without_measurements, after)] == [*map(without_measurements, before)]
    for key, weight in _weights(runs / name).items():
        assert torch.equal(weight, weights[key])


def test_one_process_goes_on_from_a_checkpoint_of_ranks_that_share_sequences(runs):
    run_ranks(1, repeat_last_iteration, runs, "cp2", {})
    alone, resumed = read_metrics(runs / "alone"), read_metrics(runs / "cp2")
    for key in ("loss", "kd", "ce", "student_bits_per_byte"):
        assert resumed[-1][key] == pytest.approx(alone[-1][key], rel=1e-5)
    weights = _weights(runs / "cp2")
    for key, weight in _weights(runs / "alone").items():
        torch.testing.assert_close(weights[key], weight, rtol=0, atol=PARAMETER_TOLERANCE)


def test_the_loss_goes_down(runs):
    losses = [row["loss"] for row in read_metrics(runs / "alone")]
    assert losses[-1] < losses[0]


def _weights(run, iteration=ITERATIONS):
    return weights_of(run / "checkpoints" / f"iter_{iteration:07d}")
