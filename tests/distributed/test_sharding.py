"""Every vocab-parallel value and gradient is the unsharded one, for four shards.

For one and two shards with MEGATRON_EXT_ALL_TEXT.
"""

import os

import pytest
import torch

from tests.distributed.sharded_cases import CASES, Result, cases, every_size
from tests.process_group import run_ranks

SIZES = (1, 2, 4) if os.environ.get("MEGATRON_EXT_ALL_TEXT") else (4,)


@pytest.fixture(scope="module")
def unsharded() -> Result:
    return cases(0, 1, None)


@pytest.fixture(scope="module")
def ranks(spawned: list[tuple[dict[int, Result], dict[str, list[str]]]]) -> list[dict[int, Result]]:
    return [results for results, _ in spawned]


@pytest.fixture(scope="module")
def spawned() -> list[tuple[dict[int, Result], dict[str, list[str]]]]:
    """One spawn for all sizes: of four ranks the last one, the last two and all."""
    return run_ranks(4, every_size, SIZES)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", CASES)
def test_shards_reproduce_the_unsharded_loss_and_gradient(
    name: str, size: int, unsharded: Result, ranks: list[dict[int, Result]]
) -> None:
    truth, true_grad = unsharded[name]
    group = [results[size][name] for results in ranks[-size:]]
    for replicated, _ in group:
        assert_near(replicated[0], truth[0])
        for value, true_value in zip(replicated[1:], truth[1:], strict=True):
            # Among these are shares of 1, which are small differences.
            assert_near(value, true_value, least=1.0)
    for replicated, _ in group[1:]:
        assert all(map(torch.equal, group[0][0], replicated)), "other bits on another rank"
    grad = torch.cat([columns for _, columns in group], dim=-1)
    assert (grad[..., true_grad.shape[-1] :] == 0).all()
    assert_near(grad[..., : true_grad.shape[-1]], true_grad)


def assert_near(value: torch.Tensor, truth: torch.Tensor, *, least: float = 1e-30) -> None:
    """Errors are at most 1e-6 of the largest true magnitude, or of ``least``."""
    scale = truth.abs().max().item() if truth.numel() else 0.0
    torch.testing.assert_close(value, truth, rtol=0, atol=1e-6 * max(scale, least))


def test_every_rank_makes_the_collectives_that_the_docstrings_state(
    spawned: list[tuple[dict[int, Result], dict[str, list[str]]]],
) -> None:
    # On the CPU a reduce-scatter is an all-reduce.
    stated = {
        "next_token forward": ["all_reduce"] * 3,
        "next_token backward": [],
        # The reduce-scatter is the third; the gather and what follows it are of the gradient.
        "projected_kl forward": ["all_reduce"] * 6 + ["all_gather", "all_reduce"],
        "projected_kl backward": [],
        "projected_kl without chunks forward": ["all_reduce"] * 2,
        "projected_kl without chunks backward": [],
        "projected_kl as nemo forward": ["all_gather"] * 2 + ["all_reduce"] * 6,
        "projected_kl as nemo backward": ["all_reduce"],
        # The reduce-scatter is the third.
        "projected_kl with repeats forward": ["all_reduce"] * 9 + ["all_gather", "all_reduce"],
        "projected_kl with repeats backward": [],
        "gold forward": ["all_reduce"] * 2 + ["all_gather"] + ["all_reduce"] * 5,
        "gold backward": [],
        "gold without chunks forward": ["all_reduce"] * 4,
        "gold without chunks backward": [],
        "gold as nemo forward": ["all_reduce"] * 6 + ["all_gather"] + ["all_reduce"] * 4,
        "gold as nemo backward": ["all_reduce"],
        "uld forward": ["all_reduce"] * 2 + ["all_gather"] + ["all_reduce"],
        "uld backward": [],
        "vocab_kl forward": ["all_reduce"] * 4,
        "vocab_kl backward": [],
        "vocab_kl over another cut forward": ["all_to_all_single"] + ["all_reduce"] * 4,
        "vocab_kl over another cut backward": [],
        "strict_topk forward": ["all_gather"] + ["all_reduce"] * 6,
        "strict_topk backward": [],
        "strict_topk without chunks forward": ["all_gather"] + ["all_reduce"] * 6,
        "strict_topk without chunks backward": [],
        "mined forward": ["all_reduce"] * 3 + ["all_gather"] + ["all_reduce"] * 4,
        "mined backward": [],
        "mined without chunks forward": ["all_reduce"] * 7,
        "mined without chunks backward": [],
        "partition_kl forward": ["all_reduce"] * 3 + ["all_to_all_single", "all_reduce"],
        "partition_kl backward": [],
        "partition_kl without chunks forward": ["all_reduce"] * 3,
        "partition_kl without chunks backward": [],
        "byte_prefix forward": ["all_reduce"] * 3 + ["all_to_all_single"] + ["all_reduce"] * 5,
        "byte_prefix backward": [],
        "byte_prefix without chunks forward": ["all_reduce"] * 3
        + ["all_to_all_single"]
        + ["all_reduce"] * 4,
        "byte_prefix without chunks backward": [],
    }
    for _, made in spawned:
        assert made == stated
