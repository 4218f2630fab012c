"""Rows of the log reach TensorBoard and Weights & Biases, whichever a run names."""

import dataclasses
import sys
from types import SimpleNamespace

import pytest

from megatron_ext.errors import MissingDependencyError
from megatron_ext.training import metrics
from megatron_ext.training.metrics import (
    MetricsLog,
    check_writers,
    open_writers,
    without_measurements,
)
from megatron_ext.training.run_plan import RunPlan
from tests.training.dry_run.planned_runs import planned_run

ROW = {"iteration": 4, "loss": 1.5, "kd/kl": 0.25, "teacher_bits_per_byte": None, "tokens": 7}


class Recorder:
    """Stands in for a package: keeps what it is called with."""

    def __init__(self, *arguments, **options):
        self.options, self.calls = options, []

    def __getattr__(self, name):
        return lambda *arguments, **options: self.calls.append((name, *arguments, *options.items()))


@pytest.fixture
def opened(monkeypatch):
    """Both packages, and what was opened of them."""
    found = {}

    def opens(name):
        def open_one(**options):
            found[name] = Recorder(**options)
            return found[name]

        return open_one

    monkeypatch.setitem(
        sys.modules, "torch.utils.tensorboard", SimpleNamespace(SummaryWriter=opens("tensorboard"))
    )
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=opens("wandb")))
    return found


def watched(tmp_path, **keys):
    config = planned_run()
    training = dataclasses.replace(config.training, **keys)
    changed = dataclasses.replace(config, run_dir=str(tmp_path / "a-run"), training=training)
    return RunPlan.of(changed)


def test_a_run_that_names_no_writer_opens_none(tmp_path):
    assert open_writers(watched(tmp_path), last_iteration=0) == []


def test_tensorboard_gets_every_number_and_hides_what_comes_again(tmp_path, opened):
    run = watched(tmp_path, tensorboard_dir=str(tmp_path / "events"))
    (writer,) = open_writers(run, last_iteration=3)
    writer.write(ROW)
    writer.close()
    recorder = opened["tensorboard"]
    assert recorder.options == {"log_dir": str(tmp_path / "events"), "purge_step": 4}
    assert recorder.calls == [
        ("add_scalar", "loss", 1.5, 4),
        ("add_scalar", "kd/kl", 0.25, 4),
        ("add_scalar", "tokens", 7, 4),
        ("close",),
    ]
    open_writers(run, last_iteration=0)
    assert opened["tensorboard"].options["purge_step"] is None


def test_wandb_gets_every_number_and_goes_on_with_the_same_run(tmp_path, opened):
    run = watched(tmp_path, wandb_project="distillation")
    (writer,) = open_writers(run, last_iteration=0)
    writer.write(ROW)
    writer.close()
    first = opened["wandb"]
    assert first.options["project"] == "distillation"
    assert first.options["name"] == "a-run"
    assert first.options["config"]["training"]["micro_batch_size"] == 2
    assert first.calls[1:] == [
        ("log", {"iteration": 4, "loss": 1.5, "kd/kl": 0.25, "tokens": 7}),
        ("finish",),
    ]
    open_writers(run, last_iteration=4)
    assert opened["wandb"].options["id"] == first.options["id"]


def test_the_log_passes_every_row_on_and_closes_what_it_was_given(tmp_path):
    recorder = Recorder()
    with MetricsLog(tmp_path, last_iteration=0, writers=[recorder]) as log:
        log.write(iteration=1, loss=2.0)
        assert recorder.calls == [("write", {"iteration": 1, "loss": 2.0})]
    assert recorder.calls[-1] == ("close",)


def test_a_package_that_is_missing_is_told_before_anything_starts(tmp_path, monkeypatch):
    monkeypatch.setattr(metrics, "find_spec", lambda name: None)
    check_writers(watched(tmp_path).training)
    with pytest.raises(MissingDependencyError, match=r"wandb_project needs the package wandb"):
        check_writers(watched(tmp_path, wandb_project="distillation").training)


def test_tensorboard_itself_reads_what_was_written(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run = watched(tmp_path, tensorboard_dir=str(tmp_path / "events"))
    (writer,) = open_writers(run, last_iteration=0)
    writer.write(ROW)
    writer.close()
    events = EventAccumulator(str(tmp_path / "events")).Reload()
    assert [(event.step, event.value) for event in events.Scalars("kd/kl")] == [(4, 0.25)]


def test_measurements_are_told_from_results():
    measured = {"seconds": 1, "seconds/data": 1, "tokens_per_second": 2, "memory_bytes": 3}
    assert without_measurements({**measured, **ROW}) == ROW
