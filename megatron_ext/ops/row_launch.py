"""Launching a program for each row whose output may lie over what it reads. T rows, Vp columns."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Final

import torch

from megatron_ext.ops.launch import ROW_CONFIGS, LaunchConfig, chosen_config, fitting_config

_TIMED_ROWS: Final = 512


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
        launch(fitting_config(config, width), torch.empty_like(output[:_TIMED_ROWS]))

    launch(fitting_config(chosen_config((key, width), ROW_CONFIGS, time), width), output)
