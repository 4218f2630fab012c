"""The process of a jail, observed from outside until it ends or its time is over."""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Final, NamedTuple

_JAIL: Final = Path(__file__).with_name("jail.py")
_BEGUN: Final = b"begun\n"
_SAID_BYTES: Final = 1 << 16
_PRINTED_BYTES: Final = 4096
_SHOWN: Final = 300
_PROPORTIONAL: Final = re.compile(r"^(?:Swap)?Pss: +(\d+) kB", re.MULTILINE)
_START_S: Final = 60.0
"""Longest time for the start of the jail and the Python in it, on a busy machine."""


class JailRecord(NamedTuple):
    """Observations of a jail until its end."""

    ended_by: str | None
    """The limit that ended it from outside: ``timed out`` or ``out of memory``."""

    report: Mapping[str, bool]
    """Protections that took effect; empty where the jail failed before."""

    has_begun: bool
    """Whether the Python in it reached the program."""

    said: bytes
    """Bytes that the program wrote to the descriptor."""

    printed: str
    """The last lines of standard error, in one line for a terminal."""


def run_jail(
    folder: str,
    settings: Mapping[str, object],
    *,
    pipe: tuple[int, int],
    seconds: float,
    memory_bytes: int,
    bubblewrap: str | None = None,
) -> JailRecord:
    """Run a program in a jail.

    Args:
        folder: Empty folder with access for everybody.
        settings: Settings of the jail.
        pipe: Pipe whose second end is passed to the jail.
        seconds: Time limit of the program, from its first line on.
        memory_bytes: Limit of the memory of all its processes.
        bubblewrap: Path of a bubblewrap to make namespaces and root; otherwise the jail does.
    """
    way = (
        ["bubblewrap", bubblewrap, str(settings["disk_bytes"])] if bubblewrap else ["hold", folder]
    )
    process = subprocess.Popen(
        [sys.executable, "-I", str(_JAIL), *way, str(pipe[1])],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        cwd=folder,
        # Not the caller's environment, which may hold credentials.
        env={"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "HOME": folder},
        pass_fds=(pipe[1],),
        start_new_session=True,
    )
    assert process.stdin is not None
    assert process.stderr is not None
    try:
        with contextlib.suppress(BrokenPipeError), process.stdin:
            # Not as an argument: arguments are readable by all users, and limited in length.
            process.stdin.write(json.dumps(settings).encode())
        with process.stderr:
            descriptors = (pipe[0], process.stderr.fileno())
            return _watch(process, descriptors, seconds, memory_bytes)
    finally:
        # The rest of the group too; in a namespace nothing outlives its first process.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _watch(
    process: subprocess.Popen[bytes],
    descriptors: tuple[int, int],
    seconds: float,
    memory_bytes: int,
) -> JailRecord:
    """Read both streams until the end, so that the program never blocks on writing."""
    said = printed = b""
    has_begun = has_ended = False
    ended_by = None
    descriptor, errors = descriptors
    deadline = time.monotonic() + _START_S
    poll = select.poll()
    for readable in (descriptor, errors):
        poll.register(readable, select.POLLIN)
    while not (has_ended or ended_by):
        has_ended = process.poll() is not None
        if not has_ended and time.monotonic() > deadline:
            ended_by = "timed out"
        elif not has_ended and has_begun and _memory_of(process.pid) > memory_bytes:
            ended_by = "out of memory"
        for readable, _ in poll.poll(0 if has_ended else 20):
            read = os.read(readable, _SAID_BYTES)
            if readable == errors:
                printed = (printed + read)[-_PRINTED_BYTES:]
            else:
                said += read
            if not read or len(said) > _SAID_BYTES:
                poll.unregister(readable)
        if not has_begun and _BEGUN in said:
            has_begun, deadline = True, time.monotonic() + seconds
    line, _, rest = said.partition(b"\n")
    return JailRecord(
        ended_by=ended_by,
        report=json.loads(line) if line else {},
        has_begun=has_begun,
        said=rest,
        printed=_last_lines(printed),
    )


def _memory_of(process: int) -> int:
    """Bytes of a process and all that it started, where shared pages count once among them."""
    total = 0
    waiting = [process]
    while waiting:
        place = Path(f"/proc/{waiting.pop()}")
        with contextlib.suppress(OSError):
            for task in (place / "task").iterdir():
                waiting += map(int, (task / "children").read_text().split())
        with contextlib.suppress(OSError, IndexError):
            total += _bytes_of(place)
    return total


def _bytes_of(place: Path) -> int:
    try:
        sizes = _PROPORTIONAL.findall((place / "smaps_rollup").read_text())
    except OSError:  # A process may hide its maps, and an old kernel does not sum them.
        return int((place / "statm").read_text().split()[1]) * mmap.PAGESIZE
    return sum(map(int, sizes)) << 10


def _last_lines(printed: bytes) -> str:
    """The last lines that fit into an error, without control characters."""
    text = ""
    for line in reversed(printed.decode(errors="replace").splitlines()):
        shown = "".join(c if c.isprintable() else "?" for c in line.strip())
        if len(text) + len(shown) > _SHOWN:
            return text or shown[:_SHOWN]
        text = f"{shown} | {text}" if text and shown else shown or text
    return text
