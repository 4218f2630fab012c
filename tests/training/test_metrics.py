"""Rows of the log come back as they were, and reach TensorBoard and Weights & Biases."""

import errno
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from megatron_ext.errors import DataError, MissingDependencyError
from megatron_ext.training import metrics
from megatron_ext.training.metrics import (
    PLOT_FILE,
    MetricsLog,
    check_writers,
    open_writers,
    progress_bar,
    read_metrics,
    result_lines,
    without_measurements,
)
from megatron_ext.training.run_folder import METRICS_FILE
from megatron_ext.training.run_plan import RunPlan
from tests.training.dry_run.planned_runs import planned_run
from tests.training.tiny_run import changed


def write_rows(run, *iterations, last_iteration=0, loss=1.5):
    with MetricsLog(run, last_iteration=last_iteration) as log:
        for iteration in iterations:
            log.write(iteration=iteration, loss=loss / iteration)


def test_rows_come_back_bitwise(tmp_path):
    with MetricsLog(tmp_path, last_iteration=0) as log:
        log.write(iteration=1, loss=0.1 + 0.2, chunks=7, student_bits_per_byte=None)
    assert read_metrics(tmp_path) == [
        {"iteration": 1, "loss": 0.1 + 0.2, "chunks": 7, "student_bits_per_byte": None}
    ]


def test_a_resumed_run_drops_the_rows_that_it_computes_again(tmp_path):
    write_rows(tmp_path, 1, 2, 3, 4, 5)
    write_rows(tmp_path, 4, 5, 6, last_iteration=3, loss=9.0)
    rows = read_metrics(tmp_path)
    assert [row["iteration"] for row in rows] == [1, 2, 3, 4, 5, 6]
    assert [row["loss"] for row in rows] == [1.5, 0.75, 0.5, 9 / 4, 9 / 5, 9 / 6]


def test_a_run_that_starts_anew_drops_every_row(tmp_path):
    write_rows(tmp_path, 1, 2)
    write_rows(tmp_path, last_iteration=0)
    assert (tmp_path / METRICS_FILE).read_bytes() == b""


@pytest.mark.parametrize(
    "line", [b"\xff\xfe", b"[]", b"3", b"{}", b'{"iteration": null}', b"[" * 100_000], ids=str
)
def test_a_line_that_is_no_row_is_named(tmp_path, line):
    write_rows(tmp_path, 1)
    with (tmp_path / METRICS_FILE).open("ab") as file:
        file.write(line + b"\n")
    with pytest.raises(DataError, match=r"metrics\.jsonl:2: the line is not a row of a run"):
        write_rows(tmp_path, 2, last_iteration=1)


def test_rows_that_a_full_disk_does_not_take_are_written_when_there_is_room(tmp_path, capsys):
    with MetricsLog(tmp_path, last_iteration=0) as log:
        log.write(iteration=1, loss=1.0)
        path, log._path = log._path, Path("/dev/full")
        log.write(iteration=2, loss=0.5)
        log.write(iteration=3, loss=0.4)
        log._path = path
        assert len(read_metrics(tmp_path)) == 1
        log.write(iteration=4, loss=0.3)
        assert [row["iteration"] for row in read_metrics(tmp_path)] == [1, 2, 3, 4]
    assert capsys.readouterr().err.count("No space left on device; the run goes on") == 1


def test_a_log_draws_all_rows_without_reading_them_and_goes_on_without_room_for_it(
    tmp_path, capsys, monkeypatch
):
    write_rows(tmp_path, 1, 2)
    pictures = []

    def plot(_, curves):
        pictures.append({name: [*zip(*curve, strict=True)] for name, curve in curves.items()})
        if len(pictures) > 1:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(metrics, "plot_loss_curve", plot)
    with MetricsLog(tmp_path, last_iteration=1) as log:
        monkeypatch.setattr(metrics, "whole_lines", None)
        log.write(iteration=2, loss=0.5, seconds=1.0)
        for _ in range(3):
            log.draw()
    others = {key: [] for key in ("kd", "ce", "student_bits_per_byte", "teacher_bits_per_byte")}
    assert pictures == 3 * [{"loss": [(1, 1.5), (2, 0.5)], **others}]
    assert capsys.readouterr().err.count(f"{PLOT_FILE} cannot be written: No space left") == 1


def test_rows_that_no_disk_takes_are_an_error_at_the_end(tmp_path):
    log = MetricsLog(tmp_path, last_iteration=0)
    log._path = Path("/dev/full")
    log.write(iteration=1, loss=1.0)
    with pytest.raises(OSError, match="No space left"), log:
        pass


def test_rows_are_written_at_the_end_of_a_run_that_fails(tmp_path):
    def fail():
        with MetricsLog(tmp_path, last_iteration=0) as log:
            path, log._path = log._path, Path("/dev/full")
            log.write(iteration=1, loss=1.0)
            log._path = path
            raise KeyError("the run's own error")

    with pytest.raises(KeyError, match="the run's own error"):
        fail()
    assert [row["iteration"] for row in read_metrics(tmp_path)] == [1]


def test_a_line_that_a_crash_cut_short_is_left_out_and_written_over(tmp_path):
    write_rows(tmp_path, 1, 2)
    with (tmp_path / METRICS_FILE).open("a") as file:
        file.write('{"iteration": 3, "lo')
    assert [row["iteration"] for row in read_metrics(tmp_path)] == [1, 2]
    write_rows(tmp_path, 3, last_iteration=2)
    assert [row["iteration"] for row in read_metrics(tmp_path)] == [1, 2, 3]


@pytest.mark.parametrize(
    ("row", "line"),
    [
        ({"student_bits_per_byte": 2.6409, "teacher_bits_per_byte": 2.1}, "2.641, teacher 2.100"),
        ({"student_bits_per_byte": 2.5, "teacher_bits_per_byte/phi": 2.1}, "2.500, teacher phi"),
        ({"student_bits_per_byte": 2.5, "teacher_bits_per_byte": None}, "2.500"),
        ({"loss": 1.0}, None),
    ],
    ids=["one teacher", "of several teachers", "no teacher", "nothing held out"],
)
def test_a_finished_run_says_what_it_came_to(tmp_path, row, line):
    run = tmp_path / "my run"
    run.mkdir()
    with MetricsLog(run, last_iteration=0) as log:
        log.write(iteration=1, student_bits_per_byte=9.0) if line else None
        log.write(iteration=2, **row)
    first, *measured, last = result_lines(run, done=2)
    assert first == f"the run in {run} is finished: 2 iterations are done"
    assert last == f"next: megatron-ext report '{run}'"
    assert len(measured) == (line is not None)
    if line is not None:
        assert measured[0].startswith(f"held-out bits per byte: student {line}")


def test_a_finished_run_says_how_much_was_left_out(tmp_path):
    with MetricsLog(tmp_path, last_iteration=0) as log:
        log.write(iteration=1, refused_documents=1)
        log.write(iteration=2, refused_documents=1200)
    assert "left out, as often as read: 1,200 documents, see quarantine.jsonl" in (
        result_lines(tmp_path, done=2)
    )


def test_a_folder_without_metrics_has_no_rows(tmp_path):
    assert read_metrics(tmp_path) == []


def test_the_plot_is_a_png_that_shows_every_row_and_held_out_text_where_there_is(tmp_path):
    def image():
        with MetricsLog(tmp_path, last_iteration=3) as log:
            log.draw()
        content = (tmp_path / PLOT_FILE).read_bytes()
        assert content.startswith(b"\x89PNG\r\n\x1a\n")
        assert content.endswith(b"IEND\xaeB`\x82")
        return content

    write_rows(tmp_path, 1, 2)
    before = image()
    assert image() == before
    with MetricsLog(tmp_path, last_iteration=2) as log:
        log.write(iteration=3, loss=0.5, student_bits_per_byte=2.5)
        assert image() != before


def test_the_progress_line_starts_where_the_run_stands(capsys):
    with progress_bar("distill", total=10, done=4) as bar:
        bar.update()
    shown = capsys.readouterr().err
    assert "distill" in shown
    assert "5/10" in shown


def test_a_log_has_a_line_of_progress_every_few_seconds_and_a_silent_one_none(capsys):
    for is_shown, delay, lines in ((True, 0.0, 2), (True, 60.0, 0), (False, 0.0, 0)):
        with progress_bar("score", total=100, is_shown=is_shown, delay=delay) as bar:
            for _ in range(100):
                bar.update()
        shown = capsys.readouterr().err
        assert shown.count("score") == lines
        assert ("100/100" in shown) == bool(lines)


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
    return RunPlan.of(changed(planned_run(), run_dir=str(tmp_path / "a-run"), training=keys))


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
