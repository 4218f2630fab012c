"""A student learns the same wherever its teachers are, and a teacher that dies ends the run."""

import os
import re
import signal
import time
from pathlib import Path

import pytest

from megatron_ext.training.configuration.config import LossConfig
from megatron_ext.training.metrics import read_metrics
from tests.certificates import OPENSSL, make_certificate
from tests.cli.run_files import write_config
from tests.engines.stand_in_server import log_probs_after, serving
from tests.huggingface.tiny_models import save_model
from tests.process_group import run_ranks
from tests.training.cached_teacher_runs import LibraryRun, library_values, read_values, write_texts
from tests.training.launched_ranks import Launch, free_port
from tests.training.run_results import LOSS_TOLERANCE as TOLERANCE
from tests.training.teacher_runs import elsewhere_run, train_beside, train_by_engines
from tests.training.tiny_run import CP2, ITERATIONS, PP2

ALL = bool(os.environ.get("MEGATRON_EXT_ALL_TEXT"))
TWO = {"near": {}, "far": {"weight": 0.5, "temperature": 2.0}}
ALM = LossConfig(objective="alm", options={"debias": True}, ce_weight=0.5)

HIDDEN_BYTES = 48 * 4


def own(ranks, **serving):
    return {"placement": "own_ranks", "serving": {"ranks": ranks, **serving}}


# Name: (run it is compared with, teachers, processes of the launch, the student's layout).
PLACES = {}
if ALL:
    PLACES = {
        "own-pp2": (
            "two",
            {"near": {}, "far": TWO["far"] | own(2, pipeline_model_parallel_size=2, prefetch=0)},
            4,
            PP2,
        ),
        # Two replicas of the student; each teacher has another number of them.
        "own-dp2": ("two", {"near": own(1), "far": TWO["far"] | own(2)}, 5, {}),
        "own-cp2": ("two", {"near": own(1), "far": TWO["far"] | own(1)}, 4, CP2),
        "label": ("alm", {"near": own(1, targets="label")}, 2, {}),
    }


@pytest.fixture(scope="module")
def folder(folder):
    """With the runs whose teachers are on the student's ranks."""
    runs = {"two": (TWO, None)}
    if ALL:
        runs |= {"alm": ({"near": {}}, ALM)}
    run_ranks(1, train_beside, folder, runs, timeout_s=240)
    return folder


def distil(folder, config, processes=None):
    """A launch of a run with the name of its folder."""
    argv = ["distill", "--config", str(write_config(folder, config))]
    return Launch(argv, world_size=processes, folder=folder, name=Path(config.run_dir).name)


def check_losses(folder, name, expected):
    rows, beside = read_metrics(folder / name)[:ITERATIONS], read_metrics(folder / expected)
    assert [row["iteration"] for row in rows] == list(range(1, ITERATIONS + 1))
    for quantity in ("loss", "ce", "kd"):
        measured = [row[quantity] for row in rows]
        assert measured == pytest.approx([row[quantity] for row in beside], rel=TOLERANCE)
    return rows


@pytest.mark.skipif(not ALL, reason="a launch each")
@pytest.mark.parametrize("name", PLACES)
def test_losses_with_teachers_on_ranks_of_their_own(name, folder):
    expected, teachers, processes, parallel = PLACES[name]
    loss = ALM if expected == "alm" else None
    config = elsewhere_run(folder, name, teachers, loss=loss, **parallel)
    ended = distil(folder, config, processes).wait(240)
    assert [process.exit_code for process in ended] == [0] * processes, ended
    check_losses(folder, name, expected)


def test_losses_with_a_teacher_in_a_process_and_one_on_a_server(folder):
    address, token = f"127.0.0.1:{free_port()}", folder / "token"
    token.write_text("a secret of this test\n")
    serving = {"address": (address,), "token_file": str(token)}
    flags = []
    if OPENSSL is not None:
        tls = make_certificate(folder / "tls")
        serving["root_certificate"] = str(tls.certificate)
        flags = ["--tls-cert", str(tls.certificate), "--tls-key", str(tls.key)]
    teachers = {
        "near": {"placement": "process"},
        "far": TWO["far"] | {"placement": "server", "serving": serving},
    }
    config = elsewhere_run(folder, "places", teachers)
    argv = ["serve-teacher", "--config", str(write_config(folder, config)), "--teacher", "far"]
    argv += [*flags, "--address", address]
    server = Launch(argv, world_size=None, folder=folder, name="server")
    try:
        (ended,) = distil(folder, config).wait(240)
        assert ended.exit_code == 0, ended.output + server.said()
        check_losses(folder, "places", "two")
        (log,) = (folder / "places" / "teachers").glob("near-0.log")
        # The server waits for the next student, and the process has ended with its own.
        assert server.processes[0].exitcode is None, server.said()
        secret = token.read_text().strip()
        left = [path for path in (folder / "places").rglob("*") if path.is_file()]
        assert not any(secret.encode() in path.read_bytes() for path in left)
        assert secret not in ended.output + server.said()
        assert re.fullmatch("device: .*, 1 rank\n", log.read_text())
    finally:
        server.kill()


def test_a_teacher_in_an_engine_predicts_what_its_server_answers(folder):
    topk = LossConfig(objective="vocab_kl", ce_weight=0.5), {"targets": "topk", "top_k": 5}
    label = LossConfig(objective="sampled_kl"), {"targets": "label"}
    with serving() as stand_in:
        runs = {"label": ("vllm", *label, {}), "topk": ("vllm", *topk, {})}
        run_ranks(1, train_by_engines, folder, stand_in.url, runs, timeout_s=240)
        texts = [body["prompt"] for _, body, _ in stand_in.requests]
        runs = {"topk-pp2": ("sglang", *topk, PP2)}
        run_ranks(2, train_by_engines, folder, stand_in.url, runs, timeout_s=240)
    rows = read_metrics(folder / "label")
    # The texts of both steps are asked for first; then come those that are held out.
    answered = [-log_probs_after(ids[:at])[ids[at]] for ids in texts for at in range(1, len(ids))][
        : sum(row["tokens"] for row in rows)
    ]
    found = sum(row["tokens"] * row["kd/own/teacher_nats"] for row in rows)
    assert found == pytest.approx(sum(answered), rel=TOLERANCE)
    check_losses(folder, "topk-pp2", "topk")
    measured = [read_metrics(folder / name)[-1] for name in ("label", "topk", "topk-pp2")]
    bits = [row["teacher_bits_per_byte/own"] for row in measured]
    assert bits == pytest.approx(3 * bits[:1], rel=TOLERANCE)


@pytest.fixture(scope="module")
def killed(folder):
    """A run over two ranks, whose teacher over two others was killed after some steps.

    Beside it is one on the student's ranks; it was asked two global batches ahead.
    """
    far = TWO["far"] | own(2, tensor_model_parallel_size=2, prefetch=2)
    config = elsewhere_run(
        folder, "killed", {"near": {}, "far": far}, iterations=1000, tensor_model_parallel_size=2
    )
    run = distil(folder, config, 4)
    try:
        _wait_for_steps(folder / "killed", run, steps=ITERATIONS)
        os.kill(run.processes[2].pid, signal.SIGKILL)
        # Well within the two minutes of the watchdog.
        return run.wait(60)
    finally:
        run.kill()


def test_losses_with_a_teacher_on_tensor_parallel_ranks_of_its_own(killed, folder):
    rows = check_losses(folder, "killed", "two")
    assert rows[0]["seconds/teacher_waiting"] > 0
    assert 0 <= rows[0]["teacher_waiting_share"] <= 1
    # Headers and heartbeats beside the numbers.
    assert HIDDEN_BYTES < rows[1]["teacher_bytes_per_token/far"] < 1.1 * HIDDEN_BYTES
    assert "teacher far (own_ranks): hidden 48 in fp32, 192 bytes a token" in killed[0].output


def test_a_teacher_that_is_killed_ends_the_run_on_every_rank(killed):
    asking, other, dead, its_peer = killed
    assert dead.exit_code == -signal.SIGKILL
    assert asking.exit_code == other.exit_code == 2
    assert its_peer.exit_code == 2, its_peer.output
    assert "the teacher far is gone; got connection closed without a word" in _error(asking)
    # The rank that does not ask sees its peer go, and what the peer said.
    assert "the teacher far is gone" in _error(other)


@pytest.mark.skipif(not ALL, reason="as above, for another role")
def test_a_student_that_is_killed_lets_no_rank_end_well(folder):
    config = elsewhere_run(folder, "left", {"far": own(1)}, iterations=1000)
    run = distil(folder, config, 2)
    try:
        _wait_for_steps(folder / "left", run)
        os.kill(run.processes[0].pid, signal.SIGKILL)
        _, teacher = run.wait(60)
    finally:
        run.kill()
    assert teacher.exit_code != 0


@pytest.mark.skipif(not ALL, reason="one more process that imports everything")
def test_a_teacher_process_that_is_killed_and_one_whose_student_is(folder):
    def started(name):
        teachers = {"near": {"placement": "process"}}
        run = distil(folder, elsewhere_run(folder, name, teachers, iterations=1000))
        _wait_for_steps(folder / name, run)
        (child,) = _teachers_of(run.processes[0].pid)
        return run, child

    run, child = started("killed-process")
    os.kill(child, signal.SIGKILL)
    (ended,) = run.wait(60)
    assert ended.exit_code == 2
    assert "the teacher near is gone" in ended.output
    assert "killed by SIGKILL" in ended.output
    run, child = started("killed-student")
    run.kill()
    deadline = time.monotonic() + 20
    while Path(f"/proc/{child}").exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not Path(f"/proc/{child}").exists()


@pytest.mark.skipif(not ALL, reason="whole runs, of two libraries")
def test_a_model_of_transformers_is_the_same_on_ranks_of_its_own(tmp_path):
    save_model("qwen2", tmp_path / "teacher")
    save_model("llama", tmp_path / "student")
    write_texts(tmp_path)
    elsewhere = own(1) | {"library": "huggingface"}
    for name, fields, processes in (("beside", {}, 1), ("own", elsewhere, 2)):
        path = tmp_path / f"{name}.yaml"
        read_values(path, library_values(tmp_path, LibraryRun(name, fields, {})))
        argv = ["distill", "--config", str(path)]
        ended = Launch(argv, world_size=processes, folder=tmp_path, name=name).wait(240)
        assert [process.exit_code for process in ended] == [0] * processes, ended
    beside, own_rows = read_metrics(tmp_path / "beside"), read_metrics(tmp_path / "own")
    for quantity in ("loss", "kd"):
        expected = [row[quantity] for row in beside]
        assert [row[quantity] for row in own_rows] == pytest.approx(expected, rel=TOLERANCE)
    measured = [rows[-1]["teacher_bits_per_byte"] for rows in (own_rows, beside)]
    assert measured[0] == pytest.approx(measured[1], rel=TOLERANCE)


def _teachers_of(pid):
    """Processes that serve a teacher to a process, which has started them."""
    tasks = Path(f"/proc/{pid}/task").glob("*/children")
    children = [child for task in tasks for child in task.read_text().split()]
    return [
        int(child)
        for child in children
        if b"serve-teacher" in Path(f"/proc/{child}/cmdline").read_bytes().split(b"\0")
    ]


def _wait_for_steps(run_dir, run, *, steps=1):
    deadline = time.monotonic() + 120
    log = run_dir / "metrics.jsonl"
    while not log.exists() or log.read_text().count("\n") < steps:
        assert time.monotonic() < deadline, run.said()
        assert run.processes[0].exitcode is None, run.said()
        time.sleep(0.05)


def _error(process):
    (line,) = (x for x in process.output.splitlines() if x.startswith("megatron-ext: error"))
    return line.split(": ", 2)[2]
