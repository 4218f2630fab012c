"""A program that nobody has read, run in a process of its own under limits.

See ``jail`` for what holds it, and docs/evaluation.md for what does not.
"""

from __future__ import annotations

import os
import secrets
import shutil
import tempfile
from dataclasses import dataclass
from functools import cache

from megatron_ext.errors import ConfigError
from megatron_ext.evaluation.jail_process import JailRecord, run_jail


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
            record = run_jail(
                folder,
                _settings(source + ending, limits),
                pipe=(descriptor, theirs),
                seconds=limits.seconds,
                memory_bytes=limits.memory_bytes,
                bubblewrap=bubblewrap,
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


def _check_held(record: JailRecord, limits: Limits) -> None:
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
