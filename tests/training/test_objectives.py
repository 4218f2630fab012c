"""A run learns by every objective, and by the same numbers under every layout."""

import math
import os

import pytest

from megatron_ext.alignment.alignment import CHUNK_KINDS
from megatron_ext.losses import LOSS_REGISTRY, DskdProjectors
from megatron_ext.training.metrics import read_metrics, without_measurements
from tests.guards.golden_runs import check_golden
from tests.process_group import run_ranks
from tests.training.rank_functions import (
    resume_dskd_in_bf16,
    train_objectives,
    train_with_broken_teacher,
)
from tests.training.run_results import assert_same_numbers, assert_same_weights, weights_of
from tests.training.tiny_run import CP2, PP2, TP2, student_run

BROKEN = "LossError: iteration 1: the teacher's predictions hold NaN or infinity"
OBJECTIVES = {
    "next_token": ("next_token", {}),
    "projected_kl": ("projected_kl", {"vocab_topk": 16, "direction": "jensen_shannon"}),
    "gold": ("gold", {"uncommon_topk": 64}),
    "repeats": ("projected_kl", {"repeat_weight": 1.0}),
    "hybrid_kl": ("hybrid_kl", {"uncommon_topk": 64, "min_share": 0.5}),
    "uld": ("uld", {}),
    "strict_topk": ("strict_topk", {"top_k": 8}),
    "alm": ("alm", {"merge": "words"}),
    "alm-whole": ("alm", {}),
    "alm-linear": ("alm", {}),
    "sampled_kl": ("sampled_kl", {}),
    "mined": ("mined", {}),
    "dskd": ("dskd", {"target": "teacher"}),
    "dskd-heads": ("dskd", {"projectors": "heads"}),
    "hidden_mse": ("hidden_mse", {"layers": [[-1, -1], [1, 1]]}),
    "hidden_cosine": ("hidden_cosine", {}),
    "partition_kl": ("partition_kl", {}),
    "byte_prefix": ("byte_prefix", {"direction": "jensen_shannon"}),
    "vocab_kl": ("vocab_kl", {}),
    "added": ("brier", {"weight": 2.0}),
}
"""Folder -> objective and options; ``vocab_kl`` learns from the first; the last is a user's."""

LAYOUTS = {"tp2": TP2, "pp2": PP2, "dp2": {}, "cp2": CP2}
OF_LAYOUT = {
    "tp2": ("byte_prefix", "dskd-heads"),
    "pp2": ("hybrid_kl",),
    "cp2": ("dskd", "repeats"),
}
"""What each layout runs. Rows of 41 and 53 positions are filled up to divide over two ranks."""
if os.environ.get("MEGATRON_EXT_ALL_TEXT"):
    SHARDED = ("partition_kl", "byte_prefix", "hybrid_kl", "dskd-heads", "repeats")
    OF_LAYOUT = dict.fromkeys(("tp2", "pp2", "dp2"), SHARDED)
    OF_LAYOUT["cp2"] = ("next_token", "byte_prefix", "repeats", "hybrid_kl", "dskd", "hidden_mse")
CASES = [(name, layout) for layout, names in OF_LAYOUT.items() for name in names]
TWO_STEPS = {"next_token", "partition_kl", "gold", *(name for name, _ in CASES)}
"""Those whose runs are compared with others, or with what was saved or recorded."""
if os.environ.get("MEGATRON_EXT_ALL_TEXT"):
    TWO_STEPS |= set(OBJECTIVES)


@pytest.fixture(scope="module")
def runs(folder):
    alone = [(f"{name}-alone", objective, {}) for name, objective in OBJECTIVES.items()]
    one_step = [f"{name}-alone" for name in OBJECTIVES if name not in TWO_STEPS]
    run_ranks(1, train_objectives, folder, alone, one_step, timeout_s=240)
    sharded = [(f"{name}-{its}", OBJECTIVES[name], LAYOUTS[its]) for name, its in CASES]
    run_ranks(2, train_objectives, folder, sharded, timeout_s=480)
    return folder


def test_every_objective_is_run():
    assert {name for name, _ in OBJECTIVES.values()} == {*LOSS_REGISTRY, "brier"}


@pytest.mark.parametrize("name", [name for name in OBJECTIVES if name != "next_token"])
def test_an_objective_has_a_finite_loss_over_what_it_counts(runs, name):
    rows = read_metrics(runs / f"{name}-alone")
    assert len(rows) == (2 if name in TWO_STEPS else 1)
    for row in rows:
        assert math.isfinite(row["kd"])
        assert row["kd"] > 0
        assert row["grad_norm"] > 0
    is_one_to_one = name in ("strict_topk", "mined", "dskd", "dskd-heads")
    for row in rows:
        chunks = row["one_to_one"] if is_one_to_one else sum(row[kind] for kind in CHUNK_KINDS)
        if name in ("alm", "hidden_mse", "hidden_cosine"):
            # Chunks are merged up to words; no token follows the last chunk of a row.
            assert 0 < row["compared"] < chunks
        elif name == "byte_prefix":
            # Rows of chunks, of which longer ones have several.
            assert chunks < row["compared"] <= row["tokens"]
        else:
            assert row["compared"] == (row["tokens"] if name in ("vocab_kl", "added") else chunks)


@pytest.mark.parametrize("name", ["partition_kl", "strict_topk", "mined", "gold"])
def test_the_loss_is_the_weighted_sum_of_its_terms(runs, name):
    for row in read_metrics(runs / f"{name}-alone"):
        assert row["loss"] == pytest.approx(row["kd"] + 0.5 * row["ce"], rel=1e-5)


def test_tiles_of_logits_with_the_rows_behind_their_chunks_change_nothing(runs):
    whole, tiled = (read_metrics(runs / f"alm-{form}-alone") for form in ("whole", "linear"))
    assert [row.keys() for row in whole] == [row.keys() for row in tiled]
    assert_same_numbers(tiled, whole, {"loss", "kd", "ce", "grad_norm"}, exact=("compared",))


def test_a_run_compares_how_long_repeats_are(runs):
    for row in read_metrics(runs / "repeats-alone"):
        assert row["kd/repeats"] > 0


def test_a_run_measures_what_was_recorded(runs):
    check_golden("partition_kl", read_metrics(runs / "partition_kl-alone"))


@pytest.mark.parametrize(("name", "layout"), CASES)
def test_an_objective_measures_under_a_layout_what_it_does_on_one_rank(runs, name, layout):
    alone, sharded = read_metrics(runs / f"{name}-alone"), read_metrics(runs / f"{name}-{layout}")
    assert len(sharded) == len(alone) == 2
    assert [row.keys() for row in sharded] == [row.keys() for row in alone]
    names = {"loss", "kd", "ce"} & alone[0].keys()
    assert_same_numbers(sharded, alone, names, exact=("compared",))


def test_projectors_are_trained_and_saved_with_the_student(runs):
    config = student_run(runs, "dskd")
    start = DskdProjectors(
        student_hidden=config.student.hidden_size,
        teacher_hidden=config.teacher.model.hidden_size,
        seed=config.training.seed,
    )
    saved = weights_of(runs / "dskd-alone")
    for name, before in start.named_parameters():
        moved = (saved[f"distillation_projectors.{name}"] - before).abs()
        # Two steps of AdamW at this rate or below, and its decay.
        assert 1e-5 < float(moved.max()) < 3 * config.optimizer.lr
    assert "distillation_projectors.student_to_teacher" not in weights_of(runs / "dskd-heads-alone")
    assert not any("projectors" in key for key in weights_of(runs / "gold-alone"))


def test_projectors_learn_from_all_parts_of_a_sequence(runs):
    assert_same_weights(runs / "dskd-cp2", runs / "dskd-alone")


def test_projectors_go_on_exactly_from_a_checkpoint_in_bf16(runs):
    [(whole, resumed)] = run_ranks(1, resume_dskd_in_bf16, runs)
    assert [*map(without_measurements, resumed)] == [*map(without_measurements, whole)]
    assert len(whole) == 2


def test_nan_predictions_end_the_run_on_every_rank_before_anything_is_saved(runs):
    (first, read_first), (last, read_last) = run_ranks(2, train_with_broken_teacher, runs, PP2)
    assert first == last
    assert first.startswith(BROKEN)
    # The last stage reads the logits of both microbatches.
    assert (read_first, read_last) == (0, 2)
    assert not (runs / "broken" / "checkpoints").exists()


@pytest.mark.parametrize(
    ("objective", "ranks", "parallel"),
    [
        ("projected_kl", 1, {}),
        ("partition_kl", 2, TP2),
        ("byte_prefix", 1, {}),
        ("vocab_kl", 1, {}),
    ],
)
def test_what_an_objective_knows_of_a_broken_teacher_is_not_read_again(
    runs, objective, ranks, parallel
):
    for error, reads in run_ranks(ranks, train_with_broken_teacher, runs, parallel, objective):
        assert error.startswith(BROKEN)
        assert reads == 0
