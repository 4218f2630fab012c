"""The kernels and loops of the projected KL say on shards what they say of whole vocabularies."""

import os
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.ops.projected_kl_case import Case, paired_projection
from tests.process_group import run_ranks

OPTIONS: dict[str, dict[str, Any]] = {
    "forward": {},
    "reverse": {"direction": "reverse", "temperature": 1.4},
    "scaled up": {"direction": "reverse"},
    "by loops": {"implementation": "cpu"},
    "scaled up by loops": {"direction": "reverse", "implementation": "cpu", "temperature": 1.4},
    "the top columns": {"vocab_topk": 7},
    "the top columns by loops": {"vocab_topk": 7, "implementation": "cpu"},
}
if os.environ.get("MEGATRON_EXT_ALL_TEXT"):
    OPTIONS |= {
        "by torch": {"direction": "jensen_shannon", "implementation": "torch"},
        "scaled up by torch": {"implementation": "torch"},
    }

OF_PAIRS = {"forward": 0, "reverse": 2}
"""Cases that two ranks share, from this one on; four share the others."""

Result = tuple[list[torch.Tensor], torch.Tensor]
"""Everything that is said of chunks, and the gradient of this rank's columns."""


def evaluated(rank: int, ranks: int, group: Any, name: str) -> Result:
    case = Case.random(vocabs=(47, 41), lengths=(5, 4), chunk_count=2)
    case = replace(case, projection=paired_projection(47, 41))
    if name.startswith("scaled up"):
        case = case.dominated(120.0)
    options = {"implementation": "triton"} | OPTIONS[name]
    out, grad = case.run(
        dtype=torch.float32,
        padding=(15, 5),
        pad_value=1e4,
        rank=rank,
        ranks=ranks,
        group=group,
        planned=True,
        **options,
    )
    return [x.detach() for x in out if x is not None], grad


def on_shards(rank: int) -> dict[str, Result]:
    """Of the first cases one by each group of two, and the others by all four."""
    pairs = [dist.new_group([first, first + 1]) for first in OF_PAIRS.values()]
    everyone = dist.new_group(list(range(4)))
    pair, place = divmod(rank, 2)
    name = list(OF_PAIRS)[pair]
    found = {name: evaluated(place, 2, pairs[pair], name)}
    for name in OPTIONS:
        if name not in OF_PAIRS:
            found[name] = evaluated(rank, 4, everyone, name)
    return found


pytest.importorskip("triton")
pytest.importorskip("numba")


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Result]]:
    # Compiles what the ranks would compile at the same time.
    evaluated(0, 1, None, "by loops")
    return run_ranks(4, on_shards, timeout_s=300)


@pytest.mark.parametrize("name", OPTIONS)
def test_columns_that_cross_ranks_are_summed_over_them(
    name: str, ranks: list[dict[str, Result]]
) -> None:
    truth, true_grad = evaluated(0, 1, None, name)
    # A row is weighed against another by a difference of 120 nats, which fp32 holds to 4e-6.
    slack = 1e-5 if name.startswith("scaled up") else 1e-6
    first = OF_PAIRS.get(name)
    sharing = range(4) if first is None else range(first, first + 2)
    group = [ranks[rank][name] for rank in sharing]
    for values, _ in group:
        for value, true_value in zip(values, truth, strict=True):
            torch.testing.assert_close(value, true_value, rtol=slack, atol=slack)
    for value, other in zip(group[0][0], group[1][0], strict=True):
        assert torch.equal(value, other)
    grad = torch.cat([columns for _, columns in group], dim=-1)
    assert not grad[:, 47:].any()
    scale = true_grad.abs().max().item()
    torch.testing.assert_close(grad[:, :47], true_grad[:, :47], rtol=0, atol=slack * scale)
