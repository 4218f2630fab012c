"""What each file of tests takes, and the order of files that follows.

Run the whole suite with MEGATRON_EXT_RECORD_DURATIONS=1 to write ``durations.json``.
"""

import json
import time
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest

RECORDED = Path(__file__).with_name("durations.json")


class Seconds(NamedTuple):
    """What something took."""

    cpu: float
    """Of this process and of all that it started."""

    wall: float

    @classmethod
    def now(cls):
        """On both clocks."""
        cpu = 0.0
        this = psutil.Process()
        for process in (this, *this.children(recursive=True)):
            with suppress(psutil.NoSuchProcess):
                # Children that have ended are in the times of whoever waited for them.
                cpu += sum(process.cpu_times()[:4])
        return cls(cpu, time.monotonic())


class DurationRecorder:
    """A plugin that adds up the tests of each file; workers of xdist report to their controller."""

    def __init__(self, config, path=RECORDED):
        self._config, self._path = config, path
        self._began = None
        self._files = {}

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item, nextitem):
        """Look at the clocks where a file begins and where another one follows."""
        began = self._began = self._began or Seconds.now()
        result = yield
        if nextitem is None or nextitem.path != item.path:
            now, self._began = Seconds.now(), None
            self._add(
                item.path.relative_to(self._path.parent).as_posix(),
                Seconds(now.cpu - began.cpu, now.wall - began.wall),
            )
        return result

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node):
        """Take over what a worker has measured."""
        for file, seconds in getattr(node, "workeroutput", {}).get("durations", {}).items():
            self._add(file, Seconds(*seconds))

    def pytest_sessionfinish(self):
        """Report or write."""
        workeroutput = getattr(self._config, "workeroutput", None)
        if workeroutput is not None:
            workeroutput["durations"] = {file: [*its] for file, its in self._files.items()}
        elif self._files:
            write_durations(self._files, self._path)

    def _add(self, file, seconds):
        before = self._files.get(file, Seconds(0.0, 0.0))
        self._files[file] = Seconds(before.cpu + seconds.cpu, before.wall + seconds.wall)


def write_durations(measured, path):
    """Write the measured files into the table, a file a line; those that are gone leave it."""
    table = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    table |= {
        file: {"cpu": round(seconds.cpu, 1), "wall": round(seconds.wall, 1)}
        for file, seconds in measured.items()
    }
    lines = [
        f"{json.dumps(file)}: {json.dumps(seconds)}"
        for file, seconds in sorted(table.items())
        if (path.parent / file).exists()
    ]
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


def longest_first(path=RECORDED):
    """A key to sort tests by, files of unknown length first; None: nothing was recorded."""
    if not path.exists():
        return None
    table = json.loads(path.read_text(encoding="utf-8"))
    wall = {path.parent / file: seconds["wall"] for file, seconds in table.items()}
    return lambda item: -wall.get(item.path, float("inf"))
