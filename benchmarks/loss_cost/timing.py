"""Time and peak memory of a forward and backward on a GPU."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import torch

FLUSHED_BYTES: Final = 256 << 20
"""Written before each run, several times the cache, so that no input of the run is in it."""

COPIED_BYTES: Final = 4 << 30

AHEAD_CYCLES: Final = 40_000_000
"""For which the GPU waits before a timed run, some 20 ms: so its launches are queued, as those of a
training step are, whose models keep the GPU busy meanwhile."""


@dataclass(frozen=True, kw_only=True)
class Timing:
    """Of one forward and backward."""

    ms_median: float
    ms_min: float
    ms_max: float
    host_ms: float
    """Median time in which the host queues its launches."""

    repeats: int
    peak_bytes: int
    """Most memory beyond what was there before, the gradient included."""


def timed(run: Callable[[], object], *, clear: Callable[[], None], budget_ms: float) -> Timing:
    """Run twice to warm up, once for its memory, and then for the time that is given.

    Args:
        run: Forward and backward.
        clear: Drops the gradients; not timed.
        budget_ms: For the timed runs: at least 3 and at most 30.
    """
    for _ in range(2):
        run()
        clear()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    first = _event_ms(run)[0]
    peak = torch.cuda.max_memory_allocated() - before
    clear()
    repeats = int(min(30, max(3, budget_ms / max(first, 1e-3))))
    flushed = torch.empty(FLUSHED_BYTES, dtype=torch.int8, device="cuda")
    times = []
    for _ in range(repeats):
        flushed.zero_()
        times.append(_event_ms(run, ahead=True))
        clear()
    on_gpu, on_host = zip(*times, strict=True)
    return Timing(
        ms_median=statistics.median(on_gpu),
        ms_min=min(on_gpu),
        ms_max=max(on_gpu),
        host_ms=statistics.median(on_host),
        repeats=repeats,
        peak_bytes=peak,
    )


def copy_bandwidth() -> float:
    """Bytes a second of a device-to-device copy, read and written both counted."""
    source = torch.empty(COPIED_BYTES, dtype=torch.int8, device="cuda")
    target = torch.empty_like(source)
    times = [_event_ms(lambda: target.copy_(source))[0] for _ in range(12)]
    return 2 * COPIED_BYTES / statistics.median(times[2:]) * 1e3


def _event_ms(run: Callable[[], object], *, ahead: bool = False) -> tuple[float, float]:
    """Time between events around a run, and the host's until all is queued."""
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    if ahead:
        torch.cuda._sleep(AHEAD_CYCLES)
    begun = time.perf_counter()
    start.record()
    run()
    stop.record()
    queued = time.perf_counter() - begun
    stop.synchronize()
    return float(start.elapsed_time(stop)), 1e3 * queued
