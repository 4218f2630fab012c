"""The partition KL by kernels on vocabulary shards, whose shared tokens lie on different ranks."""

from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.ops.partition_kl_case import Case
from tests.process_group import run_ranks

RANKS = 2
OPTIONS: dict[str, dict[str, Any]] = {
    "forward": {"temperature": 1.4},
    "jensen-shannon": {"direction": "jensen_shannon"},
    "by loops": {"implementation": "cpu"},
    "reverse by loops": {"implementation": "cpu", "direction": "reverse", "temperature": 1.4},
    "one of padding alone": {"padding": (40, 30)},
    "one of padding alone, by loops": {"padding": (40, 30), "implementation": "cpu"},
}

Result = dict[str, tuple[torch.Tensor, torch.Tensor, torch.Tensor]]


def comparisons(rank: int, ranks: int) -> Result:
    """Divergences, agreement and gradient by name, on this rank's columns."""
    group = dist.new_group(list(range(ranks))) if ranks > 1 else None
    case = Case.random(sizes=((1, 1), (1, 2), (1, 1), (2, 1)))
    found = {}
    for name, options in OPTIONS.items():
        out, grad = case.run(
            dtype=torch.float32,
            shards=(rank, ranks, group),
            **({"implementation": "triton", "padding": (3, 1)} | options),
        )
        divergence, agreement = (
            torch.cat([getattr(side, field) for side in out[:2]])
            for field in ("divergence", "agreement")
        )
        found[name] = divergence, agreement, grad
    return found


def test_shards_give_what_one_rank_gives() -> None:
    pytest.importorskip("triton")
    pytest.importorskip("numba")
    whole, parts = comparisons(0, 1), run_ranks(RANKS, comparisons, RANKS)
    for name, (divergence, agreement, grad) in whole.items():
        assert all(torch.equal(part[name][0], parts[0][name][0]) for part in parts)
        torch.testing.assert_close(parts[0][name][0], divergence, rtol=1e-6, atol=1e-6)
        assert torch.equal(parts[0][name][1], agreement)
        joined = torch.cat([part[name][2] for part in parts], dim=1)
        torch.testing.assert_close(joined[:, : grad.shape[1]], grad, rtol=0, atol=1e-6)
