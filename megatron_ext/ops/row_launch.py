"""Launching a program for each row whose output may lie over what it reads. T rows, Vp columns."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Final

import torch

from megatron_ext.ops.launch import SWEEP_CONFIGS, LaunchConfig, chosen_config, small_block

_TIMED_ROWS: Final = 512
_COLUMNS_A_WARP: Final = 256


def launch_rows(
    key: Hashable, launch: Callable[[LaunchConfig, torch.Tensor], None], output: torch.Tensor
) -> None:
    """Run ``launch(config, output)`` with the fastest configuration, timed on a scratch output.

    Args:
        key: What the choice depends on, besides the width.
        launch: Runs a program for each row of the output that it is given.
        output: [T, Vp], where the kernel writes; maybe where it reads.
    """
    rows, width = output.shape
    if not rows or not width:
        return

    def time(config: LaunchConfig) -> None:
        launch(_fitting(config, width), torch.empty_like(output[:_TIMED_ROWS]))

    launch(_fitting(chosen_config((key, width), SWEEP_CONFIGS, time), width), output)


def _fitting(config: LaunchConfig, width: int) -> LaunchConfig:
    """So few warps that no two of them hold one element: one could store what another has to load.

    ``width`` has to be the widest that the kernel walks.
    """
    block = small_block(width, config.block)
    return LaunchConfig(block, max(1, min(config.num_warps, block // _COLUMNS_A_WARP)))
