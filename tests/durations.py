"""What each file of tests takes, and the order of files that follows.

Run the whole suite with MEGATRON_EXT_RECORD_DURATIONS=1 to write ``durations.json``.
"""

import heapq
import json
import time
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest

RECORDED = Path(__file__).with_name("durations.json")

_WAITING_S = 2.0
"""A file that is idle for longer waits."""


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


def in_order(path=RECORDED, *, workers=2):
    """A key to sort tests by, files of unknown length first; None: nothing was recorded.

    Long files come first, so that no worker is left with one. Beside one that waits, for a server
    to be given up, say, comes one of several processes, which use its core.
    """
    if not path.exists():
        return None
    table = json.loads(path.read_text(encoding="utf-8"))
    files = {path.parent / file: Seconds(**seconds) for file, seconds in table.items()}
    place = {file: number for number, file in enumerate(_dealt_out(files, workers))}
    return lambda item: place.get(item.path, -1)


def _dealt_out(files, workers):
    """The files in the order in which workers begin them."""
    left = dict.fromkeys(sorted(files, key=lambda file: -files[file].wall))
    waiting = [file for file in left if files[file].wall - files[file].cpu > _WAITING_S]
    several = [file for file in left if file not in waiting and _has_ranks(file)]
    ends = [(0.0, None)] * workers
    while left:
        now, _ = heapq.heappop(ends)
        is_beside = any(end > now and file in waiting for end, file in ends)
        wanted = several if is_beside else waiting
        chosen = next((file for file in wanted if file in left), next(iter(left)))
        del left[chosen]
        heapq.heappush(ends, (now + files[chosen].wall, chosen))
        yield chosen


def _has_ranks(file):
    return file.exists() and "ranks" in file.read_text(encoding="utf-8")
