"""Objectives over tokens and over hidden states: sequences cut over ranks are whole sequences."""

from __future__ import annotations

import pytest
import torch

from megatron_ext.distributed.context_parallel import SequenceLayout
from tests.distributed.context_cases import GROUPS, LENGTHS, held
from tests.distributed.context_row_cases import (
    ROW_CASES,
    RowCase,
    Rows,
    rows_of,
    rows_of_every_layout,
)
from tests.process_group import run_ranks


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, dict[RowCase, Rows]]]:
    """One spawn for all layouts."""
    return run_ranks(4, rows_of_every_layout)


@pytest.mark.parametrize("name", GROUPS)
@pytest.mark.parametrize("case", ROW_CASES, ids=" ".join)
def test_sums_and_every_gradient_over_the_ranks_are_those_of_whole_sequences(
    case: RowCase, name: str, ranks: list[dict[str, dict[RowCase, Rows]]]
) -> None:
    _, order, _ = case
    truth = rows_of(*case)
    assert truth.count > 0
    assert truth.logits.any()
    cp_size, tp_size = GROUPS[name]
    layout = SequenceLayout(size=cp_size, order=order)
    for first in range(0, 4, cp_size * tp_size):
        parts = [
            [ranks[first + part * tp_size + i][name][case] for i in range(tp_size)]
            for part in range(cp_size)
        ]
        assert sum(shards[0].count for shards in parts) == truth.count
        total = torch.stack([shards[0].loss_sum for shards in parts]).sum()
        torch.testing.assert_close(total, truth.loss_sum, rtol=1e-6, atol=0)
        for part, shards in enumerate(parts):
            rows = held(layout, LENGTHS[0], part)
            logits = torch.cat([shard.logits for shard in shards], dim=-1)
            assert_near(logits[..., : truth.logits.shape[-1]], truth.logits[:, rows], truth.logits)
            for shard in shards:
                assert_near(shard.hidden, truth.hidden[:, rows], truth.hidden)
        for place, gradient in enumerate(truth.projectors):
            summed = torch.stack([shards[0].projectors[place] for shards in parts]).sum(dim=0)
            assert_near(summed, gradient, gradient)


def assert_near(value: torch.Tensor, truth: torch.Tensor, whole: torch.Tensor) -> None:
    """Errors are at most 1e-6 of the largest of ``whole``."""
    scale = whole.abs().max().item() if whole.numel() else 0.0
    torch.testing.assert_close(value, truth, rtol=0, atol=1e-6 * scale)
