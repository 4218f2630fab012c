"""The kernels of the projected KL say on shards what they say of whole vocabularies."""

from __future__ import annotations

import pytest
import torch

from tests.distributed.projected_kl_cases import OPTIONS, Result, evaluated, on_shards
from tests.process_group import run_ranks

pytest.importorskip("triton")


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Result]]:
    return run_ranks(4, on_shards, timeout_s=300)


@pytest.mark.parametrize("name", OPTIONS)
def test_columns_that_cross_ranks_are_summed_over_them(
    name: str, ranks: list[dict[str, Result]]
) -> None:
    truth, true_grad = evaluated(0, 1, None, name)
    # A row is weighed against another by a difference of 120 nats, which fp32 holds to 4e-6.
    slack = 1e-5 if name.startswith("scaled up") else 1e-6
    group = [ranks[rank][name] for rank in range(2 if name == "forward" else 4)]
    for values, _ in group:
        for value, true_value in zip(values, truth, strict=True):
            torch.testing.assert_close(value, true_value, rtol=slack, atol=slack)
    for value, other in zip(group[0][0], group[1][0], strict=True):
        assert torch.equal(value, other)
    grad = torch.cat([columns for _, columns in group], dim=-1)
    assert not grad[:, 47:].any()
    scale = true_grad.abs().max().item()
    torch.testing.assert_close(grad[:, :47], true_grad[:, :47], rtol=0, atol=slack * scale)
