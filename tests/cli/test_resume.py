"""A run that is killed and started again is the run that was never killed."""

import signal
import time
from pathlib import Path
from socket import gethostname

import pytest

from megatron_ext.tokenizers import MegatronTokenizer
from megatron_ext.training.metrics import PLOT_FILE, read_metrics
from megatron_ext.training.run_folder import (
    CONFIG_FILE,
    DATA_FILE,
    LOCK_FILE,
    METRICS_FILE,
    PROJECTION_FILE,
    TOKENIZER_FOLDER,
)
from tests.cli.run_files import PreloadedRun, contents, write_config
from tests.training.tiny_run import changed, student_run

ITERATIONS = 6
SAVE_INTERVAL = 2
QUANTITIES = ("iteration", "loss", "kd", "ce", "grad_norm", "learning_rate", "tokens", "chunks")


@pytest.fixture(scope="module")
def runs(folder):
    """A run that nothing interrupts, and beside it the same run, which is killed twice."""
    config = _student(folder, "uninterrupted")
    beside = _start(write_config(folder, config))
    try:
        killed = _killed_run(folder)
        beside.finish()
    finally:
        beside.kill()
    return Path(config.run_dir), killed


@pytest.fixture(scope="module")
def uninterrupted(runs):
    return runs[0]


@pytest.fixture(scope="module")
def killed(runs):
    return runs[1]


def test_every_number_is_bitwise_that_of_the_uninterrupted_run(uninterrupted, killed):
    expected, resumed = read_metrics(uninterrupted), read_metrics(killed)
    assert len(expected) == ITERATIONS
    for name in (*QUANTITIES, "kd/top1_agreement"):
        assert [row[name] for row in resumed] == [row[name] for row in expected]


def test_what_is_measured_on_held_out_text_is_bitwise_the_same(uninterrupted, killed):
    expected, resumed = read_metrics(uninterrupted), read_metrics(killed)
    measured = [row for row in expected if "student_bits_per_byte" in row]
    assert len(measured) == 2
    for row in measured:
        again = resumed[row["iteration"] - 1]
        for name in ("student_bits_per_byte", "teacher_bits_per_byte"):
            assert again[name] == row[name]


def test_no_unfinished_file_stays_behind(killed):
    in_run = {path.name for path in killed.iterdir()}
    assert in_run == {
        "checkpoints",
        CONFIG_FILE,
        DATA_FILE,
        METRICS_FILE,
        PLOT_FILE,
        PROJECTION_FILE,
        TOKENIZER_FOLDER,
    }
    in_checkpoints = {path.name for path in (killed / "checkpoints").iterdir()}
    # The one before the last was saved at the end by SIGTERM, or after it.
    assert in_checkpoints > {"latest", "iter_0000006"}
    assert len(in_checkpoints) == 3


def test_every_checkpoint_carries_the_tokenizer(killed):
    ours = MegatronTokenizer.from_pretrained(killed / TOKENIZER_FOLDER)
    for checkpoint in (killed / "checkpoints").glob("iter_*"):
        theirs = MegatronTokenizer.from_pretrained(checkpoint / TOKENIZER_FOLDER)
        assert theirs.fingerprint() == ours.fingerprint()
        assert theirs.tokenize("the parser") == ours.tokenize("the parser")


def test_a_finished_run_started_again_says_so_and_changes_nothing(folder, killed):
    before = contents(killed)
    output = _start(folder / "killed.yaml", "--async-save").finish().splitlines()
    assert output[0].startswith("device: cpu (")
    assert output[-3] == f"the run in {killed} is finished: {ITERATIONS} iterations are done"
    measured = [read_metrics(killed)[-1][f"{who}_bits_per_byte"] for who in ("student", "teacher")]
    student, teacher = (f"{value:.3f}" for value in measured)
    assert output[-2] == f"held-out bits per byte: student {student}, teacher {teacher}"
    assert output[-1] == f"next: megatron-ext report {killed}"
    assert contents(killed) == before


def _student(folder, name):
    # Steps long enough for a moment between two of them to be met.
    config = student_run(folder, name, global_batch_size=8)
    training = {"train_iters": ITERATIONS, "save_interval": SAVE_INTERVAL, "eval_interval": 4}
    return changed(config, training=training)


def _killed_run(folder):
    """Killed between two checkpoints, killed again while it writes one in the background, ended by
    SIGTERM, then left to finish."""
    config = _student(folder, "killed")
    run = Path(config.run_dir)
    checkpoints = run / "checkpoints"
    file = write_config(folder, config)
    _kill_when(_start(file), lambda: _row_count(run) > SAVE_INTERVAL)
    assert SAVE_INTERVAL < _row_count(run) < ITERATIONS
    before = set(checkpoints.glob(".iter_*.partial"))
    _kill_when(
        _start(file, "--async-save"),
        lambda: bool(set(checkpoints.glob(".iter_*.partial")) - before),
    )
    assert any(checkpoints.glob(".iter_*.partial"))
    assert (checkpoints / "latest").read_text() == f"iter_{SAVE_INTERVAL:07d}"
    ended = _start(file, "--save-interval", str(ITERATIONS))
    owner = f"process {ended.pid} on {gethostname()}"
    _when(ended, lambda: owner in (run / LOCK_FILE).read_text())
    ended.send(signal.SIGSTOP)
    refused = _start(file, output=run.with_suffix(".second.log"))
    assert refused.exit_code() == 2
    assert f"the run folder belongs to a run that has not ended; got {owner};" in refused.text()
    ended.send(signal.SIGCONT)
    _when(ended, lambda: "distill: " in ended.text() and _row_count(run) > SAVE_INTERVAL)
    ended.send(signal.SIGTERM)
    assert ended.exit_code() == 128 + signal.SIGTERM
    (last,) = [line for line in ended.text().splitlines() if "was ended by SIGTERM" in line]
    done = int((checkpoints / "latest").read_text().removeprefix("iter_"))
    assert f"got {done} iterations done, and saved; start it again" in last
    assert SAVE_INTERVAL < done < ITERATIONS
    assert _row_count(run) == done
    _start(file, "--async-save").finish()
    return run


def _start(config, *flags, output=None):
    output = output or config.with_suffix(".log")
    return PreloadedRun("distill", "--config", str(config), *flags, output=output)


def _kill_when(process, condition):
    """End a run with SIGKILL as soon as ``condition`` holds."""
    _when(process, condition)
    process.kill()


def _when(process, condition):
    """Wait until ``condition`` holds in a run."""
    deadline = time.monotonic() + 120
    while not condition():
        if not process.is_alive() or time.monotonic() > deadline:
            process.kill()
            pytest.fail(f"the moment to kill did not come:\n{process.output.read_text()}")
        time.sleep(0.002)


def _row_count(run):
    path = run / METRICS_FILE
    return path.read_bytes().count(b"\n") if path.exists() else 0
