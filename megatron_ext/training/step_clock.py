"""Time and memory of a step, for the rows of the log: phases, peak memory, waiting for teachers.

Phases are timed on the device that does the work, without waiting for it.
"""

from __future__ import annotations

import resource
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from megatron_ext.data.global_batches import GlobalBatches
from megatron_ext.teachers.remote_teacher import RemoteTeacher


class Mark(Protocol):
    """A moment on a device."""

    def query(self) -> bool:
        """Whether the device has reached it."""

    def elapsed_time(self, later: Any) -> float:
        """Milliseconds to a later mark."""


class HostMark:
    """A moment on the CPU, reached when it is made."""

    def __init__(self) -> None:
        self.seconds = time.perf_counter()

    def query(self) -> bool:
        return True

    def elapsed_time(self, later: HostMark) -> float:
        return (later.seconds - self.seconds) * 1e3


@dataclass(slots=True)
class _Span:
    name: str
    start: Mark
    end: Mark | None = None
    inner: list[_Span] = field(default_factory=list)

    def add_to(self, seconds: dict[str, float]) -> float:
        """Add the seconds of this phase without inner ones; return those with inner ones."""
        assert self.end is not None
        whole = self.start.elapsed_time(self.end) / 1e3
        alone = whole - sum(span.add_to(seconds) for span in self.inner)
        seconds[self.name] = seconds.get(self.name, 0.0) + alone
        return whole


class StepClock:
    """Sums of seconds by phase; time in an inner phase counts for the inner one alone.

    On a GPU a phase lies between two events of its stream. A phase whose second event has not been
    reached when the clock is read counts in the next reading, so that nothing ever waits.

    Args:
        mark: Makes a mark of the present; the default is an event of the current stream, or the
            host's time without a GPU.
    """

    def __init__(self, mark: Callable[[], Mark] | None = None) -> None:
        self._mark = mark or (_device_mark if torch.cuda.is_available() else HostMark)
        self._open: list[_Span] = []
        self._closed: deque[_Span] = deque()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count what runs inside as ``name``."""
        span = _Span(name, self._mark())
        self._open.append(span)
        try:
            yield
        finally:
            self._open.pop()
            span.end = self._mark()
            if self._open:
                self._open[-1].inner.append(span)
            else:
                self._closed.append(span)

    def with_timed_loss(self, step: Callable[..., Any]) -> Callable[..., Any]:
        """A ``forward_step_func`` of megatron-core whose loss function is counted as ``loss``."""

        def forward_step(*arguments: Any) -> Any:
            output, loss = step(*arguments)
            return output, self.phase("loss")(loss)

        return forward_step

    def read(self) -> dict[str, float]:
        """Seconds of each phase that has ended since the last reading."""
        seconds: dict[str, float] = {}
        # In order: an outermost phase has not ended before those inside it.
        while self._closed and self._closed[0].end is not None and self._closed[0].end.query():
            self._closed.popleft().add_to(seconds)
        return seconds


def _device_mark() -> Mark:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def peak_memory_bytes() -> int:
    """Peak of torch's allocations on the GPU since the last call; without a GPU, the process's peak
    resident memory since it began.
    """
    if torch.cuda.is_available():
        peak = torch.cuda.max_memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        return peak
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # In KiB everywhere except on macOS.
    return peak if sys.platform == "darwin" else peak * 1024


class StepWatch:
    """Speed, memory and phases of a step, read once a step.

    Args:
        clock: The clock of the trainer's phases.
        batches: The batches that the trainer waits for.
    """

    def __init__(self, clock: StepClock, batches: GlobalBatches) -> None:
        self._clock = clock
        self._batches = batches
        self._waited = batches.waited

    def row(self, metrics: Mapping[str, Any], *, seconds: float) -> dict[str, Any]:
        """``seconds/PHASE`` since the row before, trained tokens a second, and peak memory.

        ``seconds/waiting`` is the part of ``seconds/data`` in which no sample was at hand.

        Args:
            metrics: The row's other metrics, with the ``tokens`` of the step over all replicas.
            seconds: Duration of the step.
        """
        # A stream that was opened again counts from 0.
        waited = self._batches.waited
        waiting = waited - self._waited if waited >= self._waited else waited
        self._waited = waited
        phases = {"waiting": waiting, **self._clock.read()}
        return {
            "tokens_per_second": metrics["tokens"] / seconds,
            "memory_bytes": peak_memory_bytes(),
            **{f"seconds/{name}": value for name, value in phases.items()},
        }


SHARE = "teacher_waiting_share"


class TeacherWatch:
    """Waiting time for remote teachers in a step, and bytes received from them.

    Waiting between steps, for an evaluation, is not counted.

    Args:
        teachers: Remote teachers by name; may be empty.
    """

    def __init__(self, teachers: Mapping[str, RemoteTeacher]) -> None:
        self._teachers = dict(teachers)
        self._waited_s = 0.0
        # The head, which is sent once at the start, is not counted.
        self._at_start = {name: teacher.received_bytes for name, teacher in teachers.items()}

    def begin(self) -> None:
        """Note the begin of a step."""
        self._waited_s = self._all_waited_s()

    def row(self, *, seconds: float) -> dict[str, Any]:
        """``seconds/teacher_waiting``, its share of the step, and ``teacher_bytes_per_token/NAME``.

        The latter is over all bytes received so far and all positions that were asked for, padding
        included.

        Args:
            seconds: Duration of the step.
        """
        if not self._teachers:
            return {}
        waited = self._all_waited_s() - self._waited_s
        values = {
            f"teacher_bytes_per_token/{name}": (
                (teacher.received_bytes - self._at_start[name]) / teacher.received_tokens
            )
            for name, teacher in self._teachers.items()
            if teacher.received_tokens
        }
        return {"seconds/teacher_waiting": waited, SHARE: waited / seconds, **values}

    def shown(self, row: Mapping[str, Any]) -> dict[str, str]:
        """The part of a row that the progress line shows."""
        return {"waiting": f"{row[SHARE]:.0%}"} if SHARE in row else {}

    def _all_waited_s(self) -> float:
        return sum(teacher.waited_s for teacher in self._teachers.values())
