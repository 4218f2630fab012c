"""Kills a run before each change that it makes on the disk, and runs it again."""

import os
import shutil
import signal
import sys
import traceback

from megatron.core.datasets import indexed_dataset  # noqa: F401 - loaded once, before any fork

from tests.preprocessing.runs import contents, run
from tests.unsynced_disk import do_not_wait_for_the_disk

CHANGES = ("os.mkdir", "os.remove", "os.rename", "os.rmdir")
WRITING = os.O_WRONLY | os.O_RDWR


def kill_everywhere(folder):
    """Print how many changes a run over ``folder / "data"`` makes.

    Each run is a fork of this process, so that hundreds of them take seconds.
    """
    # A process that dies leaves the kernel's buffers behind; waiting for the disk proves nothing.
    do_not_wait_for_the_disk()
    out = folder / "out"
    changes, status = _in_fork(lambda: _tokenize(folder), kill_at=None, folder=out)
    assert status == 0, "the uninterrupted run failed"
    expected = contents(out)
    assert expected
    for kill_at in range(changes):
        shutil.rmtree(out)
        _, status = _in_fork(lambda: _tokenize(folder), kill_at=kill_at, folder=out)
        assert status == -signal.SIGKILL, f"not killed at change {kill_at}"
        _, status = _in_fork(lambda: _tokenize(folder), kill_at=None, folder=out)
        assert status == 0, f"not taken up after change {kill_at}"
        assert contents(out) == expected, f"another output after change {kill_at}"
    print(changes)


def _tokenize(folder):
    run(folder / "data", output=folder / "out" / "a", shard_count=2)


def _in_fork(call, *, kill_at, folder):
    """Changes below ``folder`` that ``call`` made, and how its process ended."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            count = _count_changes(folder, kill_at)
            call()
            os.write(writing, str(count()).encode())
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    os.close(writing)
    with os.fdopen(reading) as stream:
        count_text = stream.read()
    _, status = os.waitpid(child, 0)
    return int(count_text or 0), os.waitstatus_to_exitcode(status)


def _count_changes(folder, kill_at):
    """Count the changes that this process makes from now on, and kill it before one of them."""
    count = 0

    def hook(event, arguments):
        nonlocal count
        if event == "open":
            is_change = isinstance(arguments[2], int) and bool(arguments[2] & WRITING)
        else:
            is_change = event in CHANGES
        if not is_change or not str(arguments[0]).startswith(str(folder)):
            return
        if count == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
        count += 1

    sys.addaudithook(hook)
    return lambda: count
