"""The process of a jail, watched from outside until it ends or its time is over."""

from __future__ import annotations

import contextlib
import json
import os
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
_START_S: Final = 60.0
"""What starting the jail and the Python in it may take, on a busy machine."""


class JailRecord(NamedTuple):
    """What was seen of a jail."""

    timed_out: bool

    report: Mapping[str, bool]
    """What took effect; empty where the jail failed before."""

    has_begun: bool
    """The Python in it came as far as the program."""

    said: bytes
    """What the program wrote to the descriptor."""

    printed: str
    """The last lines of standard error, in one line for a terminal."""


def run_jail(
    folder: str, settings: Mapping[str, object], *, pipe: tuple[int, int], seconds: float
) -> JailRecord:
    """Run a program in a jail.

    Args:
        folder: Empty, and everybody's.
        settings: Of the jail.
        pipe: Its second end goes to the jail.
        seconds: What the program may take, from its first line on.
    """
    process = subprocess.Popen(
        [sys.executable, "-I", str(_JAIL), folder, str(pipe[1])],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        cwd=folder,
        # Nothing of the caller's: an environment may hold credentials.
        env={"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "HOME": folder},
        pass_fds=(pipe[1],),
        start_new_session=True,
    )
    assert process.stdin is not None
    assert process.stderr is not None
    try:
        with contextlib.suppress(BrokenPipeError), process.stdin:
            # Not as an argument: those of all processes can be read, and are short.
            process.stdin.write(json.dumps(settings).encode())
        with process.stderr:
            return _watch(process, pipe[0], process.stderr.fileno(), seconds)
    finally:
        # What is left of the group, too; in a namespace nothing outlives its first process.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _watch(
    process: subprocess.Popen[bytes], descriptor: int, errors: int, seconds: float
) -> JailRecord:
    """Read until the end; what is printed is read to the last, so that no program waits for it."""
    said = printed = b""
    has_begun = timed_out = has_ended = False
    deadline = time.monotonic() + _START_S
    poll = select.poll()
    for readable in (descriptor, errors):
        poll.register(readable, select.POLLIN)
    while not (has_ended or timed_out):
        has_ended = process.poll() is not None
        timed_out = not has_ended and time.monotonic() > deadline
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
        timed_out=timed_out,
        report=json.loads(line) if line else {},
        has_begun=has_begun,
        said=rest,
        printed=_last_lines(printed),
    )


def _last_lines(printed: bytes) -> str:
    """As many as fit into an error's line, without what would steer a terminal."""
    text = ""
    for line in reversed(printed.decode(errors="replace").splitlines()):
        shown = "".join(c if c.isprintable() else "?" for c in line.strip())
        if len(text) + len(shown) > _SHOWN:
            return text or shown[:_SHOWN]
        text = f"{shown} | {text}" if text and shown else shown or text
    return text
