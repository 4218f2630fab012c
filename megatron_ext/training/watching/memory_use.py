"""How much memory this process uses."""

from __future__ import annotations

import resource
import sys

import torch


def peak_memory_bytes() -> int:
    """Most that torch has had allocated on the GPU since the last call; without one, most that the
    process has had in memory since it began.
    """
    if torch.cuda.is_available():
        peak = torch.cuda.max_memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        return peak
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # In KiB everywhere but on macOS.
    return peak if sys.platform == "darwin" else peak * 1024
