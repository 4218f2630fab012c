"""A program that nobody has read, run in a process of its own under limits.

See ``jail`` for what holds it, and docs/evaluation.md for what does not.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import select
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from megatron_ext.errors import ConfigError

_JAIL: Final = Path(__file__).with_name("jail.py")
_REPORT_BYTES: Final = 1 << 16
_START_S: Final = 60.0
"""What starting the jail may take, on a busy machine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Of one program with all processes that it starts, but where said otherwise."""

    seconds: float = 10.0
    """By the clock; of processor time a process has as much."""

    memory_bytes: int = 1 << 30
    """Address space of a process."""

    disk_bytes: int = 64 << 20
    """All files together, which are in memory; without namespaces, of a file."""

    processes: int = 8
    """Processes and threads."""

    needs_namespaces: bool = True
    """Refuse to run anything where the kernel gives no namespaces: there the network and files of
    the user are open to the program."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a program ended."""

    passed: bool
    """It ran to its end."""

    reason: str
    """``passed``, ``failed``, or ``timed out``."""

    namespaces: bool
    read_only: bool


def run_program(source: str, limits: Limits | None = None) -> Outcome:
    """Run Python source to its end, or until it hits a limit; nothing of it is left.

    It passes when its last line is reached: leaving early, with whatever exit code, does not.

    Raises:
        ConfigError: The machine cannot hold it as ``limits`` want.
    """
    limits = limits or Limits()
    nonce = secrets.token_hex(16)
    descriptor, theirs = os.pipe()
    try:
        ending = f"\n__import__('os').write({theirs}, b'{nonce}')\n"
        with tempfile.TemporaryDirectory(prefix="program-", ignore_cleanup_errors=True) as folder:
            # Nobody owns what a program of root's has, who becomes nobody.
            os.chmod(folder, 0o777)
            timed_out = _run(folder, source + ending, (descriptor, theirs), limits)
        os.close(theirs)
        theirs = -1
        os.set_blocking(descriptor, False)
        report, found = _said(descriptor)
    finally:
        os.close(descriptor)
        if theirs >= 0:
            os.close(theirs)
    if limits.needs_namespaces and not (report.get("namespaces") and report.get("read_only")):
        _refuse(report, timed_out=timed_out)
    passed = not timed_out and nonce.encode() in found
    reason = "passed" if passed else "timed out" if timed_out else "failed"
    return Outcome(
        passed=passed,
        reason=reason,
        namespaces=bool(report.get("namespaces")),
        read_only=bool(report.get("read_only")),
    )


def _run(folder: str, source: str, pipe: tuple[int, int], limits: Limits) -> bool:
    """Whether the time ran out."""
    settings = {
        "source": source,
        "memory_bytes": limits.memory_bytes,
        "disk_bytes": limits.disk_bytes,
        "processes": limits.processes,
        "cpu_seconds": max(1, round(limits.seconds)),
        "needs_namespaces": limits.needs_namespaces,
    }
    process = subprocess.Popen(
        [sys.executable, "-I", str(_JAIL), folder, str(pipe[1])],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        cwd=folder,
        # Nothing of the caller's: an environment may hold credentials.
        env={"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "HOME": folder},
        pass_fds=(pipe[1],),
        start_new_session=True,
    )
    assert process.stdin is not None
    try:
        with contextlib.suppress(BrokenPipeError), process.stdin:
            # Not as an argument: those of all processes can be read, and are short.
            process.stdin.write(json.dumps(settings).encode())
        # The jail says when it is about to begin.
        poll = select.poll()
        poll.register(pipe[0], select.POLLIN)
        deadline = time.monotonic() + _START_S
        while not poll.poll(20) and process.poll() is None and time.monotonic() < deadline:
            pass
        process.wait(limits.seconds)
    except subprocess.TimeoutExpired:
        return True
    finally:
        # What is left of the group, too; in a namespace nothing outlives its first process.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    return False


def _said(descriptor: int) -> tuple[dict[str, bool], bytes]:
    """What the jail reported, and all that was written behind it."""
    try:
        said = os.read(descriptor, _REPORT_BYTES)
    except BlockingIOError:
        said = b""
    line, _, rest = said.partition(b"\n")
    try:
        report = json.loads(line)
    except ValueError:
        return {}, rest
    return report, rest


def _refuse(report: dict[str, bool], *, timed_out: bool) -> None:
    raise ConfigError(
        "this machine cannot hold code that a model wrote",
        got=f"{report or 'no report'}{', timed out' * timed_out}",
        expected="namespaces of users, mounts and networks for ordinary users, and a Python that "
        "every user may read",
        fix="use a machine that has them, or one that has nothing to lose and --without-namespaces",
    )
