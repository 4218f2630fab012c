"""The linear form of a sharded head is that of a whole one, on every rank alike."""

from __future__ import annotations

import pytest
import torch

from tests.distributed.linear_cases import NAMES, Result, both_sizes
from tests.process_group import run_ranks


@pytest.fixture(scope="module")
def ranks() -> list[tuple[Result, Result]]:
    return run_ranks(2, both_sizes)


@pytest.mark.parametrize("name", NAMES)
def test_shards_reproduce_the_unsharded_loss_and_gradients(
    name: str, ranks: list[tuple[Result, Result]]
) -> None:
    truth, true_weight = ranks[0][0][name]
    for _, sharded in ranks:
        for value, true_value in zip(sharded[name][0], truth, strict=True):
            # Sums over shards are taken in another order: a few units of fp32 rounding.
            torch.testing.assert_close(value, true_value, rtol=1e-5, atol=1e-6)
    one, other = (sharded[name][0] for _, sharded in ranks)
    assert all(map(torch.equal, one, other)), "other bits on the other rank"
    weight = torch.cat([sharded[name][1] for _, sharded in ranks])
    scale = float(true_weight.abs().max())
    torch.testing.assert_close(weight[: len(true_weight)], true_weight, rtol=0, atol=2e-6 * scale)
    assert (weight[len(true_weight) :] == 0).all()
