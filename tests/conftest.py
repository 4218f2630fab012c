"""What holds for every test."""

import argparse
import gc
import os
import sys
from contextlib import suppress
from importlib import import_module
from multiprocessing import forkserver
from pathlib import Path

import pytest

from tests.durations import DurationRecorder, in_order
from tests.fork_server import fork_server

# Nothing that is imported and collected is garbage, and to look for some takes a third of the time.
gc.disable()


def _hands_tests_out():
    """Whether this process only starts workers, which wait for what it imports."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("-n", "--numprocesses", default="0")
    given, _ = parser.parse_known_args(sys.argv[1:])
    return given.numprocesses != "0" and "PYTEST_XDIST_WORKER" not in os.environ


if not _hands_tests_out():
    import_module("tests.testing_process")

# A name on the hub that is not in a cache of the test's own is out of reach.
os.environ["HF_HUB_OFFLINE"] = "1"

# Before anyone starts the server, which is then the one for all: a test that starts it for data
# workers, say, would have every rank after it import megatron-core anew.
fork_server()

_LONG = ("training", "evaluation", "huggingface", "teachers", "examples", "cli", "ops")
"""Folders of files that take long, first of all those that start processes; what counts until
durations are recorded."""


def pytest_configure(config):
    """Record durations where that is asked for."""
    if os.environ.get("MEGATRON_EXT_RECORD_DURATIONS"):
        config.pluginmanager.register(DurationRecorder(config))


def pytest_collection(session):
    """Have workers of the whole suite share what each would do at the start of a fresh checkout."""
    worker, source = os.environ.get("PYTEST_XDIST_WORKER"), session.config.args_source
    if worker is None or source != pytest.Config.ArgsSource.TESTPATHS:
        return
    # Its imports go on while tests are read from the disk.
    forkserver.ensure_running()
    # Each begins with files of its own: what one has compiled, the others read.
    tests = Path(__file__).parent
    files = sorted(tests.rglob("test_*.py"))
    for file in files[int(worker[2:]) :: int(os.environ["PYTEST_XDIST_WORKER_COUNT"])]:
        # What fails here pytest imports again, and reports.
        with suppress(Exception, pytest.skip.Exception):
            import_module(".".join(file.relative_to(tests.parent).with_suffix("").parts))


def pytest_collection_modifyitems(items):
    """Begin with what takes long: no worker is left with a long file when the others are done."""
    recorded = in_order()
    if recorded is not None:
        items.sort(key=recorded)
        return
    ranks = {name: rank for rank, name in enumerate(_LONG)}
    tests = __file__.removesuffix("conftest.py")

    def rank(item):
        folder = str(item.path).removeprefix(tests).partition(os.sep)[0]
        return ranks.get(folder, len(ranks))

    items.sort(key=rank)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup():
    """Draw the same numbers whatever ran before."""
    import torch

    torch.manual_seed(0)


@pytest.fixture
def fill_disk(monkeypatch):
    """Call it, and no file that is written from there on reaches the disk."""

    def fails(_descriptor):
        raise OSError(28, "No space left on device")

    return lambda: monkeypatch.setattr(os, "fsync", fails)


def pytest_collection_finish():
    """Look for garbage from here on, among what the tests make, and seldom: a test that imports
    makes many objects and little garbage."""
    gc.freeze()
    gc.set_threshold(100_000, 20, 20)
    gc.enable()
