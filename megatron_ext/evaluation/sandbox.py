"""A program that nobody has read, run in a process of its own under limits.

See ``jail`` for what holds it, and docs/evaluation.md for what does not. The process is observed
from outside until it ends or its time is over.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import re
import secrets
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final, NamedTuple

from megatron_ext.errors import ConfigError

_JAIL: Final = Path(__file__).with_name("jail.py")
_BEGUN: Final = b"begun\n"
_SAID_BYTES: Final = 1 << 16
_PRINTED_BYTES: Final = 4096
_SHOWN: Final = 300
_PROPORTIONAL: Final = re.compile(r"^(?:Swap)?Pss: +(\d+) kB", re.MULTILINE)
_START_S: Final = 60.0
"""Longest time for the start of the jail and the Python in it, on a busy machine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits of a program, for all processes that it starts together unless noted."""

    seconds: float = 10.0
    """Wall time from the program's first line on, and processor time of each process."""

    memory_bytes: int = 1 << 30
    """Memory of all processes, which is looked at every few hundredths of a second; and address
    space of each."""

    disk_bytes: int = 64 << 20
    """Size of all files, which are in memory; without namespaces, size of each file."""

    processes: int = 8
    """Number of processes and threads."""

    needs_namespaces: bool = True
    """Refuse to run a program without kernel namespaces, where it could reach the network and the
    user's files."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Outcome of a program."""

    passed: bool
    """Whether it reached its last line."""

    reason: str
    """``passed``, ``failed``, ``timed out``, or ``out of memory``."""

    printed: str
    """End of its standard error, in one line."""

    namespaces: bool
    own_root: bool
    bubblewrap: bool
    """Whether bubblewrap made the namespaces and the root."""


def run_program(source: str, limits: Limits | None = None) -> Outcome:
    """Run Python source to its end or until it hits a limit; no process or file of it remains.

    It passes when its last line is reached; an early exit fails, with any exit code.

    Raises:
        ConfigError: The machine cannot enforce ``limits``, or the sandbox did not reach the
            program's first line.
    """
    limits = limits or Limits()
    return _run(source, limits, usable_bubblewrap() if limits.needs_namespaces else None)


@cache
def usable_bubblewrap() -> str | None:
    """Path of the distribution's bubblewrap, where it holds an empty program as the jail does."""
    path = shutil.which("bwrap", path="/usr/bin:/bin")
    try:
        return path if path and _run("", Limits(), path).passed else None
    except ConfigError:
        return None


def _run(source: str, limits: Limits, bubblewrap: str | None) -> Outcome:
    nonce = secrets.token_hex(16)
    descriptor, theirs = os.pipe()
    try:
        ending = f"\n__import__('os').write({theirs}, b'{nonce}')\n"
        with tempfile.TemporaryDirectory(prefix="program-", ignore_cleanup_errors=True) as folder:
            # Open to all, because a program started by root runs as the user nobody.
            os.chmod(folder, 0o777)
            record = _run_jail(
                folder, source + ending, limits, pipe=(descriptor, theirs), bubblewrap=bubblewrap
            )
    finally:
        os.close(descriptor)
        os.close(theirs)
    _check_held(record, limits)
    passed = record.ended_by is None and nonce.encode() in record.said
    return Outcome(
        passed=passed,
        reason="passed" if passed else record.ended_by or "failed",
        printed=record.printed,
        namespaces=record.report["namespaces"],
        own_root=record.report["own_root"],
        bubblewrap=bubblewrap is not None,
    )


def _settings(source: str, limits: Limits) -> dict[str, object]:
    return {
        "source": source,
        "memory_bytes": limits.memory_bytes,
        "disk_bytes": limits.disk_bytes,
        "processes": limits.processes,
        "cpu_seconds": max(1, round(limits.seconds)),
        "needs_namespaces": limits.needs_namespaces,
    }


def _check_held(record: _JailRecord, limits: Limits) -> None:
    if limits.needs_namespaces and record.report and not all(record.report.values()):
        raise ConfigError(
            "this machine cannot hold code that a model wrote",
            got=dict(record.report),
            expected="namespaces of users, mounts and networks for ordinary users, and Linux on "
            "x86-64 or AArch64",
            fix="use a machine that has them, or one that has nothing to lose and "
            "--without-namespaces",
        )
    if not record.has_begun:
        raise ConfigError(
            "the sandbox cannot start Python, whatever the program",
            got=record.printed or ("no end of the start" if record.ended_by else "no word of it"),
            fix="fix what it names; where root runs this, nobody (user 65534) has to exist and to "
            "be able to read the interpreter and its environment",
        )


class _JailRecord(NamedTuple):
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


def _run_jail(
    folder: str,
    source: str,
    limits: Limits,
    *,
    pipe: tuple[int, int],
    bubblewrap: str | None,
) -> _JailRecord:
    """Run a program in a jail.

    Args:
        folder: Empty folder with access for everybody.
        pipe: Pipe whose second end is passed to the jail.
        bubblewrap: Path of a bubblewrap to make namespaces and root; otherwise the jail does.
    """
    way = ["bubblewrap", bubblewrap, str(limits.disk_bytes)] if bubblewrap else ["hold", folder]
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
            process.stdin.write(json.dumps(_settings(source, limits)).encode())
        with process.stderr:
            descriptors = (pipe[0], process.stderr.fileno())
            return _watch(process, descriptors, limits)
    finally:
        # The rest of the group too; in a namespace nothing outlives its first process.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _watch(
    process: subprocess.Popen[bytes],
    descriptors: tuple[int, int],
    limits: Limits,
) -> _JailRecord:
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
        elif not has_ended and has_begun and _memory_of(process.pid) > limits.memory_bytes:
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
            has_begun, deadline = True, time.monotonic() + limits.seconds
    line, _, rest = said.partition(b"\n")
    return _JailRecord(
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
