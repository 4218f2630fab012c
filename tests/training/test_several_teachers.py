"""A student learns from several teachers, the same under every layout."""

import math
import os

import pytest

from megatron_ext.training.metrics import read_metrics
from tests.guards.golden_runs import check_golden
from tests.process_group import run_ranks
from tests.training.run_results import assert_same_numbers, assert_same_weights, weights_of
from tests.training.teacher_runs import Run, train_runs, train_teachers
from tests.training.tiny_run import CP2, ITERATIONS, PP2, TP2

THREE = {
    "other": {},
    "again": {"objective": "partition_kl", "weight": 0.5},
    "own": {"objective": "alm", "options": {"debias": False}, "weight": 2.0, "temperature": 2.0},
}
ALIKE = {
    "own-a": {"weight": 0.5},
    "own-b": {"weight": 2.0, "model": {"make_vocab_size_divisible_by": 128}},
}
"""With other padding than each other's."""
LATENTS = {
    "likelihood": {"objective": "alm", "options": {"debias": False}},
    "states": {
        "objective": "hidden_mse",
        "options": {"layers": [[-1, -1], [1, 1]], "relative": True},
        "weight": 0.1,
    },
}
"""ALM and the distance of hidden states, by one model (tokenkit's ``alm_latents``)."""
DYNAMIC = {
    "teacher_weights": "bits_per_byte",
    "teacher_weights_alpha": 0.5,
    "weighting": "matched",
    "weighting_options": {"decay": 0.5},
    "learned_projection": True,
    "ce_weight": 1.0,
}
SELECTED = {"teacher_mode": "select_teacher"}
UNWEIGHTED = {name: teacher | {"weight": 1.0} for name, teacher in THREE.items()}
VOCAB = {"objective": "vocab_kl"}

ALONE = [
    Run("three", THREE, is_measured=True),
    Run("three-linear", THREE, {"linear": True, "linear_tile_rows": 48}),
    Run("dynamic", THREE, DYNAMIC, is_kept=True),
    Run("selected", UNWEIGHTED, SELECTED),
    Run("one", {"own": {}}, VOCAB),
    Run("averaged", ALIKE, VOCAB | {"teacher_mode": "averaged_logits"}),
    Run("latents", LATENTS),
    Run("pulled", None, {"weighting": "gradient_magnitude", "ce_weight": 1.0}),
]
LAYOUTS = {"tp2": TP2, "pp2": PP2, "dp2": {}, "cp2": CP2}
SHARDED = ["dynamic", "three", "three-linear", "selected", "pulled", "latents"]
OF_LAYOUT = {
    "tp2": ["three-linear"],
    "pp2": ["dynamic"],
    "cp2": ["latents"],
}
"""What each layout runs; all that is sharded with MEGATRON_EXT_ALL_TEXT."""
if os.environ.get("MEGATRON_EXT_ALL_TEXT"):
    OBJECTIVES = {"projected_kl": {}, "partition_kl": {}, "alm": {"debias": False}}
    for name, options in OBJECTIVES.items():
        loss = {"objective": name, "options": options}
        two = {"other": {}, "again": {"weight": 0.5}}
        ALONE += [Run(f"{name}-1", None, loss), Run(f"{name}-2", two, loss)]
        SHARDED += [f"{name}-1", f"{name}-2"]
    OF_LAYOUT = dict.fromkeys(LAYOUTS, SHARDED)
    # States of the first of two stages are not at hand where they are compared.
    OF_LAYOUT["pp2"] = [name for name in SHARDED if name != "latents"]
    # The linear form is not for parts of sequences.
    OF_LAYOUT["cp2"] = ["averaged", *(name for name in SHARDED if "linear" not in name)]
CASES = [(name, layout) for layout, names in OF_LAYOUT.items() for name in names]


@pytest.fixture(scope="module")
def runs(folder):
    run_ranks(1, train_teachers, folder, ALONE, timeout_s=900)
    by_name = {run.name: run for run in ALONE}
    sharded = [
        by_name[name]._replace(name=f"{name}-{layout}", parallel=LAYOUTS[layout])
        for name, layout in CASES
    ]
    run_ranks(2, train_runs, folder, sharded, timeout_s=900)
    return folder


def test_each_teacher_has_its_own_numbers_and_their_weighted_sum_is_the_term(runs):
    for row in read_metrics(runs / "three"):
        terms = [row["kd/other"], 0.5 * row["kd/again"], 2.0 * row["kd/own"]]
        assert all(term > 0 for term in terms)
        assert row["kd"] == pytest.approx(sum(terms), rel=1e-5)
        assert row["loss"] == pytest.approx(row["kd"] + 0.5 * row["ce"], rel=1e-5)
        counts = [row[f"compared/{name}"] for name in THREE]
        assert row["compared"] == sum(counts)
        # A teacher with the student's tokenizer has a chunk at each label.
        assert counts[2] == row["tokens"] > counts[0]
        assert row["kd/other/teacher_entropy"] > 0
        assert row["kd/again/teacher_rest"] > 0


@pytest.mark.parametrize("name", ["three", "three-linear"])
def test_a_run_measures_what_was_recorded(runs, name):
    check_golden(f"{name}-teachers", read_metrics(runs / name))


def test_a_distance_of_hidden_states_is_a_term_beside_another_objective(runs):
    for row in read_metrics(runs / "latents"):
        of_layers = [row["kd/states/layers/-1:-1"], row["kd/states/layers/1:1"]]
        assert all(distance > 0 for distance in of_layers)
        assert row["kd/states"] == pytest.approx(sum(of_layers) / 2, rel=1e-5)
        assert row["kd"] == pytest.approx(row["kd/likelihood"] + 0.1 * row["kd/states"], rel=1e-5)


def test_every_teacher_is_measured_on_held_out_text(runs):
    last = read_metrics(runs / "three")[-1]
    own, other, again = (last[f"teacher_bits_per_byte/{n}"] for n in ("own", "other", "again"))
    assert other == again
    assert own != other
    assert all(math.isfinite(value) and value > 0 for value in (own, other))


def test_the_average_of_equal_teachers_is_one_of_them(runs):
    expected = read_metrics(runs / "one")
    assert expected[0]["kd"] > 0
    assert_same_numbers(read_metrics(runs / "averaged"), expected, ("loss", "kd", "ce"))


def test_the_weights_of_teachers_follow_how_well_they_know_the_text(runs):
    for row in read_metrics(runs / "dynamic"):
        weights = {name: row[f"kd/{name}/weight"] for name in THREE}
        assert sum(weights.values()) == pytest.approx(1.0, rel=1e-5)
        assert weights["other"] == weights["again"]
        assert abs(weights["own"] - weights["other"]) > 1e-3
        assert row["kd"] == pytest.approx(
            sum(weight * row[f"kd/{name}"] for name, weight in weights.items()), rel=1e-5
        )


def test_distillation_is_matched_to_the_size_of_cross_entropy(runs):
    first, second = read_metrics(runs / "dynamic")
    assert first["kd_weight"] == 1.0
    assert second["kd_weight"] == pytest.approx(first["ce"] / first["kd"], rel=1e-5)
    assert second["loss"] == pytest.approx(
        second["kd_weight"] * second["kd"] + second["ce"], rel=1e-5
    )


def test_terms_are_weighed_by_the_size_of_their_gradients(runs):
    first, second = read_metrics(runs / "pulled")
    assert (first["kd_weight"], first["ce_weight"]) == (0.5, 0.5)
    assert second["kd_weight"] + second["ce_weight"] == pytest.approx(1.0)
    # Distillation pulls less than cross-entropy at the first step.
    assert second["kd_weight"] > 0.6
    assert second["loss"] == pytest.approx(
        second["kd_weight"] * second["kd"] + second["ce_weight"] * second["ce"], rel=1e-5
    )


def test_each_sample_is_learned_from_one_teacher(runs):
    for row, whole in zip(
        read_metrics(runs / "selected"), read_metrics(runs / "three"), strict=True
    ):
        assert 0 < row["compared"] < whole["compared"]
        # One count for all of them.
        assert not any(name.startswith("compared/") for name in row)


def test_a_loss_without_logits_trains_the_same_student(runs):
    rows, linear = read_metrics(runs / "three"), read_metrics(runs / "three-linear")
    names = ("loss", "kd", "kd/other", "kd/again", "kd/own", "ce", "ce/accuracy")
    assert_same_numbers(linear, rows, names)
    assert_same_weights(runs / "three-linear", runs / "three")


def test_a_learned_projection_is_trained_and_saved_with_the_student(runs):
    first, last = (weights_of(runs / "dynamic", iteration) for iteration in (1, ITERATIONS))
    key = "distillation_projection_other.logits"
    assert (last[key] - first[key]).abs().max() > 1e-5
    assert not [name for name in last if "projection_again" in name or "projection_own" in name]
    assert not [name for name in weights_of(runs / "three") if "projection" in name]


@pytest.mark.parametrize(
    ("name", "layout"), CASES, ids=[f"{name}-{layout}" for name, layout in CASES]
)
def test_a_layout_trains_the_student_of_one_process(runs, name, layout):
    alone, sharded = read_metrics(runs / name), read_metrics(runs / f"{name}-{layout}")
    for key in alone[0]:
        if key.startswith("compared"):
            assert [row[key] for row in sharded] == [row[key] for row in alone]
    names = [key for key in alone[0] if key.startswith("kd") and key.count("/") < 2]
    assert_same_numbers(sharded, alone, ["loss", "ce", *names])
    start, trained = weights_of(runs / "start", 0), weights_of(runs / name)
    assert any((trained[key] - start[key]).abs().max() > 1e-4 for key in start)
    assert_same_weights(runs / f"{name}-{layout}", runs / name)


def test_a_run_goes_on_exactly_with_the_weights_it_had_come_to(runs):
    before = read_metrics(runs / "dynamic-pp2")
    again = Run("dynamic-pp2", THREE, DYNAMIC, PP2, is_kept=True, goes_on=True)
    run_ranks(2, train_runs, runs, [again])
    after = read_metrics(runs / "dynamic-pp2")
    keys = ("loss", "kd", "ce", "grad_norm", "kd_weight", "kd/other/weight")
    assert [[row[key] for key in keys] for row in after] == [
        [row[key] for key in keys] for row in before
    ]
