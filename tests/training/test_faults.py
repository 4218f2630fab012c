"""What a run survives, and how it ends where it cannot: alike on every rank, nothing lost."""

import pickle
import time
import traceback

import pytest

from megatron_ext.training.checkpoints.rank_writers import reduced_frame
from tests.fork_server import fork_server
from tests.process_group import run_ranks
from tests.training.fault_runs import lose_peer, survive_faults


@pytest.fixture(scope="module")
def ranks(folder):
    return run_ranks(2, survive_faults, folder, timeout_s=300)


@pytest.mark.parametrize("kind", ["gradient", "loss"])
def test_an_iteration_that_is_not_finite_is_skipped_on_every_rank(ranks, kind):
    whole = ranks[0]["whole"]["metrics"]
    for rank in ranks:
        assert rank["whole"]["counts"] == dict.fromkeys(rank["whole"]["counts"], 0)
        assert all(weight.isfinite().all() for weight in rank["whole"]["weights"])
        run = rank[kind]
        assert run["error"] is None
        assert run["counts"]["skipped_iterations"] == 1
        assert run["counts"]["skips_in_a_row"] == 0
        assert all(weight.isfinite().all() for weight in run["weights"])
        first, skipped, after, last = run["metrics"]
        assert first["loss"] == whole[0]["loss"]
        assert [row["skipped_iterations"] for row in run["metrics"]] == [0, 1, 1, 1]
        # Neither weights nor learning rate moved, and the data went on.
        assert "grad_norm" not in skipped
        assert after["learning_rate"] == whole[1]["learning_rate"]
        assert [row["tokens"] for row in run["metrics"]] == [row["tokens"] for row in whole]
        assert last["loss"] != whole[3]["loss"]
        assert run["latest"] == "iter_0000004"


def test_a_run_stops_before_anything_of_the_bad_iteration_is_saved(ranks):
    for rank in ranks:
        run = rank["stop"]
        assert "DivergedError: the gradient norm is not finite at iteration 3" in run["error"]
        assert run["latest"] == "iter_0000002"
        assert len(run["metrics"]) == 2
        assert all(weight.isfinite().all() for weight in run["weights"])


def test_skips_in_a_row_have_a_limit(ranks):
    for rank in ranks:
        run = rank["too-many"]
        assert "iteration 3" in run["error"]
        assert run["counts"]["skips_in_a_row"] == 2
        assert run["latest"] == "iter_0000002"


def test_the_traceback_of_a_writers_error_can_be_sent_to_rank_0():
    try:
        raise OSError("no space")
    except OSError as error:
        lines = traceback.extract_tb(error.__traceback__)
    # Python 3.13 keeps code in them, which torch 2.8 would send, too.
    assert pickle.loads(pickle.dumps(lines)).format() == lines.format()
    make, values = pickle.loads(pickle.dumps(reduced_frame(lines[0])))
    assert make(*values) == lines[0]
    assert make(*values).line == 'raise OSError("no space")'


@pytest.mark.parametrize("name", ["full-disk", "full-disk-async"])
def test_a_full_disk_costs_no_checkpoint_and_the_run_goes_on(ranks, name):
    for rank in ranks:
        run = rank[name]
        assert len(run["metrics"]) == 4
        # The second save failed, and so did the fourth.
        assert run["counts"]["failed_saves"] == 2
        assert run["metrics"][-1]["failed_saves"] == 1
    latest = [latest for latest, _ in ranks[0]["full-disk"]["seen"]]
    assert latest == ["iter_0000001", "iter_0000001", "iter_0000003"]
    assert all(hidden == [] for _, hidden in ranks[0]["full-disk"]["seen"])


@pytest.mark.parametrize("name", ["full-disk", "full-disk-async"])
def test_a_full_disk_at_the_last_save_is_an_error_on_every_rank(ranks, name):
    for rank in ranks:
        run = rank[name]
        assert "the checkpoint of iteration 4 could not be written" in run["error"]
        assert "rank 1: " in run["error"]
        assert "No space left on device" in run["error"]
        assert "make room" in run["error"]
        assert run["latest"] == "iter_0000003"
        assert run["hidden"] == []


def test_a_writer_that_hangs_where_it_was_forked_is_started_anew(ranks):
    for rank in ranks:
        assert rank["hung-writer"]["error"] is None
        assert rank["hung-writer"]["latest"] == "iter_0000001"
    assert ranks[1]["hung-writer"]["hung"]


def test_what_rank_0_cannot_write_alone_is_an_error_on_every_rank(ranks):
    for rank in ranks:
        run = rank["full-disk-common"]
        assert "No space left on device" in run["error"]
        assert run["latest"] is None
        assert run["hidden"] == []


def test_a_writer_that_is_killed_is_a_failed_save_that_the_run_survives(ranks):
    for rank in ranks:
        run = rank["killed-writer"]
        assert run["error"] is None
        assert run["counts"]["failed_saves"] == 1
        assert run["latest"] == "iter_0000002"
        assert run["hidden"] == []
    assert "rank 1: its writer ended without a result" in "".join(
        rank["killed-writer"]["warnings"] for rank in ranks
    )


def test_ranks_that_were_started_otherwise_are_told_the_key(ranks):
    for rank in ranks:
        alike, other = rank["agreement"]
        assert alike is None
        assert "rank 1 was started otherwise than rank 0: optimizer.lr;" in other
        assert "got 0.5 on rank 1; expected 0.001" in other


def test_a_stuck_rank_is_named_with_where_it_is(ranks):
    for number, where in enumerate(("updating", "reading data")):
        (said,) = ranks[number]["stuck"]
        assert f"rank {number} has waited for 2 s in {where}" in said
        assert "rank 0: updating, iteration 7, at " in said
        assert "rank 1: reading data, iteration 7, at fault_runs.py:" in said
        assert "_sleep_through" in said


def test_a_rank_that_dies_is_named_by_the_others(tmp_path):
    context = fork_server()
    processes = [context.Process(target=lose_peer, args=(rank, tmp_path)) for rank in range(2)]
    started = time.monotonic()
    for process in processes:
        process.start()
    for process in processes:
        process.join(90)
        process.kill()
    text = (tmp_path / "error").read_text()
    assert "another rank is gone or does not answer" in text
    assert "rank 1: no sign of life since training, iteration 3" in text
    assert "rank 0: training, iteration 3" in text
    assert time.monotonic() - started < 60
