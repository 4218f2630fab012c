"""A student learns from what it samples, alike under every layout and after an interruption."""

import math
import os
import re
import threading
from types import SimpleNamespace

import pytest
import torch

from megatron_ext.data.sampled_text import SampleCounts
from megatron_ext.engines.engine import AskedPrompt, Completion
from megatron_ext.errors import ConfigError, DataError
from megatron_ext.training.configuration.rollouts import RolloutConfig
from megatron_ext.training.metrics import read_metrics, without_measurements
from megatron_ext.training.rollouts import Rollouts, _Logged, check_completion
from megatron_ext.training.run_folder import ROLLOUTS_FILE
from tests.engines.stand_in_server import serving
from tests.process_group import run_ranks
from tests.training.rollout_runs import (
    config_of,
    lines_of,
    parts_of,
    train_ahead,
    train_alone,
    train_layouts,
    train_served,
)
from tests.training.run_results import (
    assert_identical,
    assert_same_numbers,
    assert_same_weights,
    tensors_of,
)
from tests.training.tiny_run import CP2, PP2, TP2, changed

LAYOUTS = {"pp2": PP2}
AHEAD = {"ahead-dp2": {}}
SERVED = {"served-cp2": CP2}
"""Those that the student samples in, too, with MEGATRON_EXT_ALL_TEXT."""
if os.environ.get("MEGATRON_EXT_ALL_TEXT"):
    LAYOUTS |= {"tp2": TP2, "dp2": {}}
    SERVED |= {f"served-{name}": parallel for name, parallel in LAYOUTS.items()}
    AHEAD |= {f"ahead-{name}": parallel for name, parallel in LAYOUTS.items()}


@pytest.fixture(scope="module")
def served(runs):
    """Runs whose samples are those of a table behind a server."""
    with serving() as stand_in:
        run_ranks(1, train_served, runs, {"served": {}}, stand_in.url, timeout_s=240)
        paths = stand_in.paths()
        run_ranks(2, train_served, runs, SERVED, stand_in.url, timeout_s=240)
    return paths


class Crowd:
    """Holds back the samples of a server until as many were asked for as it is told to expect.

    Args:
        totals: Numbers of all samples asked for by then, ascending.
        breaks_at: Number of a sample from which on the two before it are refused, once each.
    """

    def __init__(self, *totals, breaks_at=None):
        self.totals, self.breaks_at = totals, breaks_at
        self.arrived = self.answered = 0
        self.seeds, self.refused, self.at_loads = [], set(), []
        self._changed = threading.Condition()

    def meet(self, path, body):
        with self._changed:
            if path != "/v1/completions":
                self.at_loads += [(self.arrived, self.answered)] * (path == "/collective_rpc")
                return 200
            self.arrived += 1
            if self.arrived == self.breaks_at:
                self.refused |= set(self.seeds[-2:])
            self.seeds.append(body["seed"])
            self._changed.notify_all()
            expected = next((total for total in self.totals if total >= self.arrived), 0)
            assert self._changed.wait_for(lambda: self.arrived >= expected, timeout=60)
            self.answered += 1
            if body["seed"] in self.refused:
                self.refused.remove(body["seed"])
                return 400
            return 200


STEP, BROKEN, AGAIN = slice(10), slice(10, 20), slice(20, 24)
"""Samples of three runs one after the other: of one that asks for each step alone, of one that asks
ahead and does not get those of its last step, and of the same, resumed."""


@pytest.fixture(scope="module")
def ahead(runs):
    """What servers were asked for by these runs and by one under each layout, and their ends."""
    crowds = {"step": Crowd(*range(11), 16, 20, 24, breaks_at=11)}
    ends = {}

    def train(crowd, size, *names):
        stand_in.meet = crowds[crowd].meet
        ends[crowd], *_ = run_ranks(size, train_ahead, runs, names, stand_in.url, timeout_s=240)

    with serving() as stand_in:
        train("step", 1, ("step", 0, {}), ("broken", 2, {}), ("broken", 2, {}))
        for name, parallel in AHEAD.items():
            crowds[name] = Crowd(6, 10)
            train(name, 2, (name, 2, parallel))
    return crowds, ends


@pytest.fixture(scope="module")
def alone(folder):
    """What was found beside the runs of one process."""
    return run_ranks(1, train_alone, folder, timeout_s=240)[0]


@pytest.fixture(scope="module")
def runs(folder, alone):
    run_ranks(2, train_layouts, folder, LAYOUTS, timeout_s=240)
    return folder


def assert_learned_alike(runs, name, expected, names):
    """Metrics, those of rollouts too, and weights, to rounding."""
    rows, whole = read_metrics(runs / name), read_metrics(runs / expected)
    of_rollouts = [key for key in whole[0] if key.startswith("rollouts/")]
    assert_same_numbers(rows, whole, (*names, *of_rollouts), exact=("tokens", "chunks"))
    assert_same_weights(runs / name, runs / expected)


def assert_same_lines(runs, name, expected):
    """The same logged completions, numbers to rounding."""
    (numbers, texts), (its, those) = (parts_of(lines_of(runs, one)) for one in (name, expected))
    assert texts == those
    assert numbers == pytest.approx(its, rel=1e-4, abs=0.0021)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_sample_and_learn_the_same(runs, layout):
    # The main rank of several replicas is that of the last one.
    if layout != "dp2":
        assert_same_lines(runs, layout, "alone")
    assert_learned_alike(runs, layout, "alone", ("loss", "kd"))


@pytest.mark.parametrize("layout", SERVED)
def test_layouts_learn_the_same_from_a_servers_samples(runs, served, layout):
    assert "rollouts/mismatch" in read_metrics(runs / "served")[0]
    assert_learned_alike(runs, layout, "served", ("loss", "kd", "ce"))
    if layout != "served-dp2":
        assert_same_lines(runs, layout, "served")


def test_a_server_takes_the_weights_of_each_checkpoint(runs, served):
    loads = [place for place, path in enumerate(served) if path == "/collective_rpc"]
    samples = [place for place, path in enumerate(served) if path == "/v1/completions"]
    # Before the first step and after the first save; what the last one saves is not sampled from.
    assert len(loads) == 2
    assert loads[0] < samples[0] < loads[1] < samples[-1]
    assert [row["rollouts/staleness"] for row in read_metrics(runs / "served")] == [0, 0]
    assert [path.name for path in (runs / "served/engine_weights").iterdir()] == ["iter_0000001"]
    for row in read_metrics(runs / "served"):
        assert row["rollouts/tokens"] > 0
        assert row["rollouts/mismatch"] > 1


@pytest.mark.parametrize("layout", AHEAD)
def test_what_is_asked_ahead_is_what_the_step_would_have_asked(runs, ahead, layout):
    crowds, ends = ahead
    seeds, own = crowds[layout].seeds, crowds["step"].seeds[STEP]
    ((end, rows),), ((_, expected), *_) = ends[layout], ends["step"]
    # All samples up to the next weights are under way before the first is answered.
    assert end is None
    assert crowds[layout].at_loads == crowds["step"].at_loads[:2] == [(0, 0), (6, 6)]
    assert (sorted(seeds[:6]), sorted(seeds[6:])) == (sorted(own[:6]), sorted(own[6:]))
    assert [row["rollouts/staleness"] for row in rows] == [0, 1, 2, 0, 1]
    names = [name for name in expected[0] if name.startswith("rollouts/")]
    assert_same_numbers(rows, expected, ("loss", "kd", "ce", *names), exact=("tokens", "chunks"))
    assert_same_weights(runs / layout, runs / "step", iteration=5)


def test_a_server_that_fails_ahead_ends_the_run_at_the_step_that_needs_it(runs, ahead):
    crowds, ends = ahead
    seeds = crowds["step"].seeds
    (end, step), (broken_end, broken), (again_end, again) = ends["step"]
    step, broken, again = (
        [without_measurements(row) for row in of] for of in (step, broken, again)
    )
    assert end is again_end is None
    assert re.search(r"data.rollouts.engine.*has not answered.*status 400", broken_end)
    assert "\n" not in broken_end
    assert broken == step[:4]
    # From the checkpoint of the third step on, the prompts of the others are asked for again.
    assert sorted(seeds[BROKEN]) == sorted(seeds[STEP])
    assert sorted(seeds[AGAIN]) == sorted(seeds[STEP][6:])
    assert again == step
    tensors, expected = (tensors_of(runs / name, 5) for name in ("broken", "step"))
    assert all(tensors[name].equal(value) for name, value in expected.items())


def test_an_interrupted_run_samples_and_learns_the_same_again(runs):
    assert lines_of(runs, "again") == lines_of(runs, "alone")
    assert_identical(runs / "again", runs / "alone")


def test_metrics_say_what_was_sampled(runs):
    for row in read_metrics(runs / "alone"):
        assert row["rollouts/completions"] == 2
        assert 0 < row["rollouts/length"] <= 9
        assert 0 <= row["rollouts/stop_rate"] <= 1
        # An untrained student of 2,001 ids.
        assert row["rollouts/entropy"] == pytest.approx(math.log(2001), rel=0.05)
        assert row["rollouts/nats"] == pytest.approx(math.log(2001), rel=0.2)
        assert row["rollouts/tokens"] <= row["tokens"]


def test_a_logged_completion_has_the_surprise_of_both_models(runs):
    for line in lines_of(runs, "alone"):
        names = ("iteration", "prompt", "completion", "tokens", "nats_per_token", "surprise")
        assert tuple(line) == names
        its = line["surprise"]["teacher"]
        assert line["completion"].startswith("".join(text for text, _, _ in its["pieces"]))
        # The student has sampled with its own probabilities, at temperature 1.
        if line["completion"] == "".join(text for text, _, _ in its["pieces"]):
            own = sum(student for _, student, _ in its["pieces"])
            assert own == pytest.approx(line["tokens"] * line["nats_per_token"], abs=0.02)
        both = [piece for piece in its["pieces"] if None not in piece]
        assert len(both) > 3
        assert its["bytes"] == len("".join(text for text, _, _ in both).encode())
        for place, name in enumerate(("student", "teacher"), 1):
            assert its[name] == pytest.approx(sum(piece[place] for piece in both), abs=0.02)


def test_the_linear_form_finds_the_same_surprise(runs):
    (line,), (expected, _) = lines_of(runs, "linear"), lines_of(runs, "alone")
    assert parts_of(line)[1] == parts_of(expected)[1]
    assert parts_of(line)[0] == pytest.approx(parts_of(expected)[0], abs=0.002)


def test_surprise_is_that_of_a_plain_softmax_whatever_the_predictions_are(alone):
    found, logits, labels = alone
    expected = [
        rows.log_softmax(-1).gather(1, ids.clamp(min=0)[:, None])[:, 0].where(ids >= 0, math.nan)
        for rows, ids in zip(logits, labels, strict=True)
    ]
    assert expected[0].isfinite().sum() > 3
    for surprise in found.values():
        torch.testing.assert_close(surprise.student, expected[0], equal_nan=True)
    for kind in ("logits", "hidden"):
        own = found[kind].teachers["teacher"].log_probs
        torch.testing.assert_close(own, expected[1], equal_nan=True)
    assert (found["label"].teachers["teacher"].log_probs == -2).equal(labels[1] >= 0)
    assert found["topk"].teachers["teacher"].log_probs is None


def test_a_run_may_learn_from_its_own_samples_alone(runs):
    for row in read_metrics(runs / "alm"):
        assert row["rollouts/completions"] == 4
        assert row["rollouts/tokens"] == row["tokens"] > 0


def test_a_window_without_room_for_a_prompt_is_refused(folder):
    with pytest.raises(ConfigError, match="no room for a prompt"):
        changed(config_of(folder, "refused"), student={"seq_length": 9})


@pytest.mark.parametrize(
    "values",
    [
        {"share": 0.0},
        {"share": 1.5},
        {"top_p": 0.0},
        {"temperature": -1.0},
        {"max_new_tokens": 0},
        {"ahead": -1},
        {"ahead": 1},
    ],
)
def test_settings_that_cannot_be_used_are_refused(values):
    with pytest.raises(ConfigError, match=next(iter(values))):
        RolloutConfig(**values)


@pytest.mark.parametrize(
    ("answer", "match"),
    [
        (Completion([], []), "no id"),
        (Completion([3, 4], [-1.0]), "1 log-probabilities of 2 ids"),
        (Completion([3], [math.nan]), "log-probabilit"),
        (Completion([3], [0.5]), "log-probabilit"),
        (Completion([3], [-math.inf]), "log-probabilit"),
        (Completion([2, 3], [-1.0, -1.0]), "behind a stop"),
        (Completion([9], [-1.0]), "ids from 9 to 9 of 9"),
    ],
)
def test_an_answer_that_is_no_sample_is_refused(answer, match):
    with pytest.raises(DataError, match=match):
        check_completion(AskedPrompt([1], frozenset({2}), 0), answer, vocab_size=9)


def test_counts_begin_at_nothing():
    assert not any(SampleCounts())


def test_cross_entropy_is_of_recorded_text_alone(runs):
    for row in read_metrics(runs / "alone"):
        assert row["loss"] == pytest.approx(row["kd"] + 0.5 * row["ce"], rel=1e-5)
    # Nothing but samples.
    for row in read_metrics(runs / "alm"):
        assert row["ce"] is None
        assert row["loss"] == pytest.approx(row["kd"], rel=1e-6)


def test_a_completion_that_a_full_disk_does_not_take_is_left_out(tmp_path, capsys):
    texts, groups = SimpleNamespace(shown=str), SimpleNamespace(is_main=True)
    rollouts = Rollouts(engine=None, texts=texts, groups=groups, run_dir=tmp_path)
    row = SimpleNamespace(prompt=SimpleNamespace(ids=[1]))
    rollouts.logged = _Logged(row, Completion([5], [-1.0]), None)
    (tmp_path / ROLLOUTS_FILE).symlink_to("/dev/full")
    rollouts.log(1, None)
    rollouts.log(2, None)
    assert capsys.readouterr().err.count("No space left on device; the run goes on") == 1
    (tmp_path / ROLLOUTS_FILE).unlink()
    rollouts.log(3, None)
    assert [line["iteration"] for line in lines_of(tmp_path, ".")] == [3]
