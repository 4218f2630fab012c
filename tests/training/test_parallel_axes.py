"""Two or four processes in any layout train the model that one process trains.

Each run has another layout and other options that may not change a result. A run goes from TP2 PP2
to one process, and from there to a pipeline with two chunks a rank. With MEGATRON_EXT_ALL_TEXT
every layout, objective and option is met; ``layout_matrix.py`` has all of them together.
"""

import os

import pytest

from megatron_ext.training.metrics import read_metrics
from tests.process_group import run_ranks
from tests.training.layout_runs import FULL, LAYOUTS, AxisRun, Variant, start_and_train, train_runs
from tests.training.run_results import assert_same_numbers, assert_same_weights, weights_of

PROJECTED = Variant(objective="projected_kl", packing=True, iterations=3, held_out=True)
PARTITION = Variant(objective="partition_kl", packing=True)
ALM = Variant(objective="alm")
VARIANTS = [PROJECTED, PARTITION]

OVERLAPS = ("use_distributed_optimizer", "overlap_grad_reduce", "overlap_param_gather")
ONE_ROW = {"micro_batch_size": 1}
"""Where replicas or stages are many, for the four rows of a global batch."""
SAVES = {"save_interval": 1}
FROM_ALONE = ("alone-from-tp2-pp2", 2)
THERE = AxisRun("tp2-pp2", PROJECTED, LAYOUTS["tp2-pp2"], SAVES)
ALONE_FROM_THERE = AxisRun("alone-from-tp2-pp2", PROJECTED, {}, SAVES, ("tp2-pp2", 1))
TWO_RANKS = [
    AxisRun("pp2-vp2-from-alone", PROJECTED, LAYOUTS["pp2-vp2"], FULL | ONE_ROW, FROM_ALONE),
]
FOUR_RANKS = [
    AxisRun(
        "cp2-tp2-sequence-parallel-variable-lengths",
        PARTITION,
        LAYOUTS["cp2-tp2"] | {"sequence_parallel": True, "use_distributed_optimizer": True},
        {"variable_seq_lengths": True, "seq_length_multiple": 6},
    ),
]
if os.environ.get("MEGATRON_EXT_ALL_TEXT"):
    VARIANTS.append(ALM)
    # Of four, it has two replicas.
    FOUR_RANKS += [TWO_RANKS.pop()]
    FOUR_RANKS += [
        AxisRun("tp2-pp2-from-alone", PROJECTED, LAYOUTS["tp2-pp2"], {}, FROM_ALONE),
        AxisRun(
            "pp4-full-recompute-variable-lengths",
            ALM,
            LAYOUTS["pp4"],
            {**FULL, **ONE_ROW, "variable_seq_lengths": True, "seq_length_multiple": 8},
        ),
        AxisRun("dp4-overlaps", ALM, LAYOUTS["dp4"] | dict.fromkeys(OVERLAPS, True), ONE_ROW),
        AxisRun("cp2-pp2-from-alone", PROJECTED, LAYOUTS["cp2-pp2"], {}, FROM_ALONE),
        AxisRun(
            "tp2-dp2-sequence-parallel",
            PARTITION,
            LAYOUTS["tp2-dp2"] | {"sequence_parallel": True},
            {"recompute_granularity": "selective"} | ONE_ROW,
        ),
    ]
RUNS = TWO_RANKS + FOUR_RANKS


@pytest.fixture(scope="module")
def runs(folder):
    alone = [AxisRun(str(variant), variant) for variant in VARIANTS]
    run_ranks(1, start_and_train, folder, alone, timeout_s=240)
    run_ranks(4, train_runs, folder, [THERE], timeout_s=480)
    run_ranks(1, train_runs, folder, [ALONE_FROM_THERE], timeout_s=240)
    if TWO_RANKS:
        run_ranks(2, train_runs, folder, TWO_RANKS, timeout_s=240)
    run_ranks(4, train_runs, folder, FOUR_RANKS, timeout_s=480)
    return folder


@pytest.mark.parametrize("run", [THERE, ALONE_FROM_THERE, *RUNS], ids=lambda run: run.name)
def test_every_iteration_measures_what_one_process_measures(runs, run):
    alone, sharded = read_metrics(runs / str(run.variant)), read_metrics(runs / run.name)
    assert len(alone) == run.variant.iterations
    # What a step took its time for depends on where a run was started.
    assert [*map(_untimed, sharded)] == [*map(_untimed, alone)]
    exact = ("iteration", "tokens", "compared", "chunks")
    assert_same_numbers(sharded, alone, ("loss", "kd", "ce"), exact=exact)
    if run.variant.held_out:
        for name in ("student_bits_per_byte", "teacher_bits_per_byte"):
            assert sharded[-1][name] == pytest.approx(alone[-1][name], rel=1e-5)


def _untimed(row):
    return {name for name in row if not name.startswith("seconds")}


@pytest.mark.parametrize("run", [THERE, ALONE_FROM_THERE, *RUNS], ids=lambda run: run.name)
def test_the_trained_weights_are_those_of_one_process(runs, run):
    iteration = run.variant.iterations
    start, alone = weights_of(runs / "start", 0), weights_of(runs / str(run.variant), iteration)
    # Every matrix and every norm has learnt: an axis that forgets a gradient shows.
    assert all((alone[name] - start[name]).abs().max() > 5e-4 for name in alone)
    assert_same_weights(runs / run.name, runs / str(run.variant), iteration)
