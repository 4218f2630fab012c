"""A watchdog that ends a rank without progress, and reports where every rank waits.

A collective that one rank never reaches keeps all others waiting, in C++, where Python can do
nothing, and the time-out errors of NCCL and gloo name only an operation. So each rank has a thread
that observes the main thread. When the main thread has been at the same line of the same phase for
the whole time-out, the rank ends with one line on where every rank is. While the main thread moves,
however slowly, nothing is ended; loops that wait at one line call ``tick``.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Final, NamedTuple

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from megatron_ext.distributed import process_groups
from megatron_ext.errors import DistributedError, MegatronExtError
from megatron_ext.training.megatron_models import cpu_megatron

HEARTBEAT_S: Final = 2.0
_SHOWN: Final = 12
"""Most groups of ranks in one report."""


class RankPhase(NamedTuple):
    """A stretch of work."""

    name: str
    iteration: int
    """Current iteration; 0 before the first."""

    number: int
    """Number of phases entered before this one."""


_current = RankPhase("starting", 0, 0)


def enter(name: str, *, iteration: int | None = None) -> None:
    """Begin a phase, of the previous phase's iteration where none is given."""
    global _current
    before = _current
    _current = RankPhase(
        name, before.iteration if iteration is None else iteration, before.number + 1
    )


def tick() -> None:
    """Note progress within a phase, where a loop may stay at one line for long."""
    enter(_current.name)


def current() -> RankPhase:
    """The phase that was entered last."""
    return _current


@dataclass(frozen=True, slots=True)
class RankState:
    """State of one rank, as it reports it."""

    beat: int
    """Heartbeat, which grows while the rank lives."""

    phase: str
    iteration: int
    place: str
    """Innermost line of Python that its main thread is at."""

    error: str | None = None
    """Reason of its end, if it has ended."""


class RankBoard:
    """States of all ranks, in the launch's store.

    Args:
        store: A connection of its own, since a connection that another thread waits on is blocked.
    """

    def __init__(self, store: Store, *, rank: int, world_size: int) -> None:
        self._store = PrefixStore("megatron_ext/ranks", store)
        self.rank = rank
        self.world_size = world_size

    def write(self, state: RankState) -> None:
        """Publish the state of this rank."""
        self._store.set(str(self.rank), json.dumps(asdict(state)))

    def report(self) -> str:
        """One line on all ranks; takes 2.5 heartbeats, in which a living rank shows that it lives.

        ``ranks 0-6: updating, iteration 12, at ...; rank 7: no sign of life since ...``
        """
        before = self._read()
        time.sleep(2.5 * HEARTBEAT_S)
        after = self._read()
        lines: dict[str, list[int]] = {}
        for rank, (old, new) in enumerate(zip(before, after, strict=True)):
            lines.setdefault(_line(old, new), []).append(rank)
        # The smallest groups first: they are the likeliest cause.
        grouped = sorted(lines.items(), key=lambda item: (len(item[1]), item[1]))
        shown = [f"{_ranks(ranks)}: {line}" for line, ranks in grouped[:_SHOWN]]
        left_out = len(grouped) - len(shown)
        return "; ".join([*shown, *([f"{left_out} more"] if left_out else [])])

    def _read(self) -> list[RankState | None]:
        keys = [str(rank) for rank in range(self.world_size)]
        # A ``get`` of a missing key would wait for it.
        return [
            RankState(**json.loads(self._store.get(key))) if self._store.check([key]) else None
            for key in keys
        ]


def first_line(error: BaseException) -> str:
    """Type of an error, and the first line of its message."""
    text = (str(error).splitlines() or [""])[0][:300]
    return f"{type(error).__name__}: {text}"


def _line(old: RankState | None, new: RankState | None) -> str:
    if new is None:
        return "has not started"
    where = f"{new.phase}, iteration {new.iteration}, at {new.place}"
    if new.error is not None:
        return f"ended in {new.phase}, iteration {new.iteration}: {new.error}"
    if old is not None and old.beat == new.beat:
        return f"no sign of life since {where}"
    return where


def _ranks(ranks: Sequence[int]) -> str:
    """``rank 3`` or ``ranks 0-2, 5``."""
    spans: list[list[int]] = []
    for rank in ranks:
        if spans and rank == spans[-1][1] + 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    text = ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in spans)
    return f"rank{'s' if len(ranks) > 1 else ''} {text}"


GRACE: Final = timedelta(minutes=1)
"""Time by which collectives outwait the watchdog, so that it reports first."""

_POLL_S: Final = 0.5
_COMMUNICATION = ("gloo", "nccl", "connection closed by peer", "connection reset", "timed out")

_STORE_ERRORS = (dist.DistError, RuntimeError, OSError, ValueError)


class Watchdog:
    """Watches the main thread while entered; call it on every rank, in the default group.

    Args:
        timeout: Longest time without progress.
        end: Ends the process, given the error; the default writes it and exits at once.
    """

    def __init__(
        self, timeout: timedelta, *, end: Callable[[DistributedError], None] | None = None
    ) -> None:
        self._timeout_s = timeout.total_seconds()
        self._end = end or _end_process
        # All ranks of the launch, a teacher's own included, since a student may wait for them.
        place = process_groups.launch_place()
        self._board = RankBoard(place.store, rank=place.rank, world_size=place.world_size)
        self._main = threading.main_thread().ident
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._beat = 0

    def __enter__(self) -> Watchdog:
        self._thread.start()
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        """Stop; an error of the communication library is raised as one with a report on all ranks.

        Raises:
            DistributedError: In place of the communication library's error.
        """
        if error is None:
            self._stop()
            return
        if not is_communication(error):
            self._stop()
            with suppress(*_STORE_ERRORS):
                self._board.write(self._state(error=first_line(error)))
            return
        # The thread goes on during the report, so that this rank too is seen to live.
        report = self._report()
        self._stop()
        raise DistributedError(
            "another rank is gone or does not answer", got=report, fix=_FIX
        ) from error

    def _stop(self) -> None:
        self._stopped.set()
        self._thread.join(5)

    def _watch(self) -> None:
        seen: object = None
        since = last_beat = time.monotonic()
        while not self._stopped.wait(_POLL_S):
            now = time.monotonic()
            where = (current().number, _stack(self._main))
            if where != seen:
                seen, since = where, now
            if now - last_beat >= HEARTBEAT_S or not self._beat:
                last_beat = now
                self._show_life()
            if now - since >= self._timeout_s:
                self._end(self._stuck(now - since))
                return

    def _stuck(self, seconds: float) -> DistributedError:
        phase = self._state().phase
        threading.Thread(target=self._beat_on, daemon=True).start()
        report = self._report()
        return DistributedError(
            f"rank {self._board.rank} has waited for {seconds:.0f} s in {phase}",
            got=report,
            expected="progress within parallel.distributed_timeout_minutes",
            fix=_FIX,
        )

    def _beat_on(self) -> None:
        """Go on with heartbeats, for the reports of other ranks."""
        while not self._stopped.wait(HEARTBEAT_S):
            self._show_life()

    def _show_life(self) -> None:
        self._beat += 1
        with suppress(*_STORE_ERRORS):
            self._board.write(self._state())

    def _report(self) -> str:
        try:
            return self._board.report()
        except _STORE_ERRORS:
            return "no answer from the store of the ranks: rank 0, or what launched it, is gone"

    def _state(self, error: str | None = None) -> RankState:
        phase = current()
        return RankState(self._beat, phase.name, phase.iteration, _place(self._main), error)


@contextmanager
def watched_launch(timeout_minutes: int) -> Iterator[timedelta]:
    """Join the processes of a launch, on the CPU where there is no GPU; leave them at the end.

    Args:
        timeout_minutes: Longest time without progress.

    Returns:
        Longest wait in a collective, which outlasts the watchdog.
    """
    if not torch.cuda.is_available():
        cpu_megatron.install()
    timeout = timedelta(minutes=timeout_minutes)
    process_groups.join(timeout + GRACE)
    with Watchdog(timeout):
        yield timeout + GRACE
    # Only now: a rank that failed must not wait in the teardown for peers that wait for it.
    process_groups.finalize()


_FIX = "look first at the ranks that are not where the others are, and at the end of their logs"


def is_communication(error: BaseException) -> bool:
    """Whether a communication library raised it."""
    if isinstance(error, MegatronExtError) or not isinstance(error, RuntimeError):
        return False
    if isinstance(error, dist.DistError):
        return True
    return any(word in str(error).lower() for word in _COMMUNICATION)


def _stack(thread: int | None) -> tuple[tuple[int, int], ...]:
    """Position of a thread: code and line of every frame."""
    frame = sys._current_frames().get(thread or 0)
    places = []
    while frame is not None:
        places.append((id(frame.f_code), frame.f_lineno))
        frame = frame.f_back
    return tuple(places)


def _place(thread: int | None) -> str:
    """A thread's innermost frame, ``file.py:12 function``, and the innermost of this package."""
    frame = sys._current_frames().get(thread or 0)
    if frame is None:
        return "no Python"
    ours: FrameType | None = frame
    while ours is not None and "megatron_ext" not in ours.f_code.co_filename:
        ours = ours.f_back
    if ours is None or ours is frame:
        return _name(frame)
    return f"{_name(frame)} from {_name(ours)}"


def _name(frame: FrameType) -> str:
    code = frame.f_code
    return f"{Path(code.co_filename).name}:{frame.f_lineno} {code.co_name}"


def _end_process(error: DistributedError) -> None:
    """Exit at once: the main thread cannot be woken, and an orderly exit would wait for it."""
    sys.stderr.write(f"error: {error}\n")
    sys.stderr.flush()
    os._exit(1)
