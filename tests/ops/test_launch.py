"""Which blocks a kernel is launched with."""

from __future__ import annotations

import pytest
import torch

from megatron_ext.ops import launch
from megatron_ext.ops.launch import ROW_CONFIGS, LaunchConfig, chosen_config, fitting_config


@pytest.mark.parametrize("width", [1, 17, 255, 256, 300, 1000, 4097, 200_000])
@pytest.mark.parametrize("config", ROW_CONFIGS)
def test_no_two_warps_hold_one_element(config: LaunchConfig, width: int) -> None:
    fitting = fitting_config(config, width)
    assert fitting.block & (fitting.block - 1) == 0
    assert fitting.block >= min(width, config.block)
    assert fitting.num_warps in (1, 2, 4, 8, 16, 32)
    # 8 elements of 2 bytes a thread.
    assert fitting.num_warps == 1 or fitting.block >= fitting.num_warps * 32 * 8


def test_nothing_is_timed_where_torch_is_to_be_deterministic(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(launch, "interpreted", lambda: False)
    monkeypatch.setattr(launch, "_CHOSEN", {"kernel": ROW_CONFIGS[3]})

    def run(config: LaunchConfig) -> None:
        raise AssertionError

    assert chosen_config("kernel", ROW_CONFIGS, run) == ROW_CONFIGS[3]
    torch.use_deterministic_algorithms(True)
    try:
        assert chosen_config("kernel", ROW_CONFIGS, run) == ROW_CONFIGS[0]
        assert chosen_config("another", ROW_CONFIGS, run) == ROW_CONFIGS[0]
    finally:
        torch.use_deterministic_algorithms(False)
