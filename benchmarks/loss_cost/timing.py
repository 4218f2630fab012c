"""Time and peak memory of a forward and backward on a GPU."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import torch

FLUSHED_BYTES: Final = 256 << 20
"""Written before each run, several times the cache, so that no input of the run is in it."""

COPIED_BYTES: Final = 4 << 30


@dataclass(frozen=True, kw_only=True)
class Timing:
    """Of one forward and backward."""

    ms_median: float
    ms_min: float
    ms_max: float
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
    first = _event_ms(run)
    peak = torch.cuda.max_memory_allocated() - before
    clear()
    repeats = int(min(30, max(3, budget_ms / max(first, 1e-3))))
    flushed = torch.empty(FLUSHED_BYTES, dtype=torch.int8, device="cuda")
    times = []
    for _ in range(repeats):
        flushed.zero_()
        times.append(_event_ms(run))
        clear()
    return Timing(
        ms_median=statistics.median(times),
        ms_min=min(times),
        ms_max=max(times),
        repeats=repeats,
        peak_bytes=peak,
    )


def copy_bandwidth() -> float:
    """Bytes a second of a device-to-device copy, read and written both counted."""
    source = torch.empty(COPIED_BYTES, dtype=torch.int8, device="cuda")
    target = torch.empty_like(source)
    times = [_event_ms(lambda: target.copy_(source)) for _ in range(12)]
    return 2 * COPIED_BYTES / statistics.median(times[2:]) * 1e3


def _event_ms(run: Callable[[], object]) -> float:
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    run()
    stop.record()
    stop.synchronize()
    return float(start.elapsed_time(stop))
