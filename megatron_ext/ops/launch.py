"""How kernels are launched: a program for each row, and blocks that are timed once."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Final, NamedTuple

import torch

from megatron_ext.ops.implementation import interpreted


class LaunchConfig(NamedTuple):
    """How much of a row a program reads at once, and with how many threads."""

    block: int
    """Columns, a power of two."""

    num_warps: int


ROW_CONFIGS: Final = (
    LaunchConfig(4096, 8),
    LaunchConfig(4096, 16),
    LaunchConfig(8192, 8),
    LaunchConfig(8192, 16),
    LaunchConfig(16384, 16),
    LaunchConfig(16384, 32),
)
"""For kernels that stream rows of a vocabulary."""

_COLUMNS_A_WARP: Final = 256
"""What the threads of a warp load at once: 16 bytes each."""

_CHOSEN: dict[Hashable, LaunchConfig] = {}


def chosen_config(
    key: Hashable,
    candidates: Sequence[LaunchConfig],
    run: Callable[[LaunchConfig], object],
) -> LaunchConfig:
    """The fastest candidate for ``key``: kernel, dtypes, widths and flags, never a number of rows.

    Each is timed once a process, by ``run`` with tensors of its own or with outputs that may be
    written many times. An interpreter has no use for it and takes the first; so does a run that
    asks torch for deterministic algorithms, since another block adds in another order.
    """
    if interpreted() or torch.are_deterministic_algorithms_enabled():
        return candidates[0]
    if key not in _CHOSEN:
        from triton.testing import do_bench

        times = [do_bench(lambda c=c: run(c), warmup=5, rep=20) for c in candidates]
        _CHOSEN[key] = candidates[times.index(min(times))]
    return _CHOSEN[key]


def small_block(width: int, block: int) -> int:
    """``block``, or the power of two that holds ``width`` where that is smaller; at least 16."""
    return max(16, min(block, 1 << max(width - 1, 0).bit_length()))


def fitting_config(config: LaunchConfig, width: int) -> LaunchConfig:
    """``config`` for rows of ``width`` columns, the widest that the kernel walks.

    Of a narrow row it takes so few warps that no two of them hold one element: where a kernel
    writes over what it reads, one could store what the other has yet to load.
    """
    block = small_block(width, config.block)
    return LaunchConfig(block, max(1, min(config.num_warps, block // _COLUMNS_A_WARP)))
