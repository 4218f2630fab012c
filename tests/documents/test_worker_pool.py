"""Workers: all shards are made, and what one of them dies of is said."""

import errno
import os
import signal
import time
from functools import partial
from itertools import product

import psutil
import pytest

from megatron_ext.documents.worker_pool import WorkerPool
from megatron_ext.errors import DataError, MegatronExtError


def work_of(kind):
    """What a worker calls; ``kind`` says what becomes of it."""

    def work(task, on_progress):
        on_progress((task, os.getpid()))
        if task == 2 and kind == "refuses":
            raise DataError("the text is bad", where="/file-2")
        if task == 2 and kind == "finds-the-disk-full":
            raise OSError(errno.ENOSPC, "No space left on device", "/part")
        if task == 2 and kind == "fails":
            raise ZeroDivisionError("a fault of ours")
        if task == 2 and kind == "is-killed":
            os.kill(os.getpid(), signal.SIGKILL)
        # The first takes longer than the others.
        time.sleep(0.3 if task == 0 else 0.0)
        return task * task

    if kind == "cannot-start":
        raise DataError("no tokenizer")
    return work


def pool_of(kind, method, workers=2):
    return WorkerPool(make_work=partial(work_of, kind), worker_count=workers, method=method)


def offspring():
    """Processes of a pool that still run."""
    return [
        child
        for child in psutil.Process().children(recursive=True)
        if "resource_tracker" not in " ".join(child.cmdline())
    ]


@pytest.mark.parametrize("method", ["spawn", "fork"])
def test_every_task_is_done_once_in_order_and_all_processes_take_part(method):
    before = offspring()
    seen = []
    results = pool_of("works", method).results(range(6), on_progress=seen.append)
    assert list(results) == [task * task for task in range(6)]
    assert sorted(task for task, _ in seen) == list(range(6))
    pids = {pid for _, pid in seen}
    assert len(pids) == 2
    assert os.getpid() not in pids
    assert offspring() == before


def test_one_worker_is_this_process():
    seen = []
    assert [*pool_of("works", "spawn", 1).results([1, 2], on_progress=seen.append)] == [1, 4]
    assert seen == [(1, os.getpid()), (2, os.getpid())]
    assert [*pool_of("cannot-start", "spawn").results([])] == []


DEATHS = {
    "refuses": (DataError, "^/file-2: the text is bad$"),
    "finds-the-disk-full": (OSError, "No space left on device: '/part'$"),
    "fails": (RuntimeError, "(?s)a worker process failed:.*ZeroDivisionError: a fault of ours"),
    "is-killed": (MegatronExtError, "a worker process was killed; got exit code -9"),
    "cannot-start": (DataError, "^no tokenizer$"),
}
PAIRS = list(product(DEATHS, ("spawn", "fork")))
# Spawned processes take long: in the quick suite one death is theirs.
SOME = PAIRS if os.environ.get("MEGATRON_EXT_ALL_TEXT") else [PAIRS[0], *PAIRS[3::2]]


@pytest.mark.parametrize(("kind", "method"), SOME)
def test_what_a_worker_dies_of_is_raised_and_no_other_stays(kind, method):
    error, words = DEATHS[kind]
    before = offspring()
    with pytest.raises(error, match=words):
        list(pool_of(kind, method).results(range(6)))
    assert offspring() == before
