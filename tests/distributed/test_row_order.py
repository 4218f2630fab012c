"""Rows of ranks in another order."""

import numpy as np
import pytest
import torch
import torch.distributed as dist

from megatron_ext.distributed.vocab_parallel import reordered_rows
from tests.process_group import run_ranks


def reorder(
    rank: int, whole: torch.Tensor, sources: np.ndarray
) -> tuple[torch.Tensor, torch.Tensor]:
    """This rank's rows in another order, and in the one before again."""
    width = len(whole) // dist.get_world_size()
    rows = whole[rank * width : (rank + 1) * width]
    group = dist.group.WORLD
    there = reordered_rows(rows, sources, group)
    return there, reordered_rows(there, np.argsort(sources), group)


def whole(dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(24, 5, generator=torch.Generator().manual_seed(0)).to(dtype)


SOURCES = np.random.default_rng(3).permutation(24)


@pytest.mark.parametrize("shape", [(24, 5), (24,), (24, 2, 3)], ids=str)
def test_one_rank_picks_its_rows(shape: tuple[int, ...]) -> None:
    rows = torch.randn(shape, requires_grad=True)
    out = reordered_rows(rows, SOURCES, None)
    assert torch.equal(out, rows.detach()[torch.from_numpy(SOURCES)])
    assert not out.requires_grad


@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_exchange_what_they_lack_bit_for_bit(ranks: int) -> None:
    for dtype in (torch.bfloat16, torch.float32):
        results = run_ranks(ranks, reorder, whole(dtype), SOURCES)
        there = torch.cat([result[0] for result in results])
        assert torch.equal(there, whole(dtype)[torch.from_numpy(SOURCES)])
        assert torch.equal(torch.cat([result[1] for result in results]), whole(dtype))


def test_rows_that_all_stay_or_all_leave_are_no_special_case() -> None:
    for sources in (np.arange(24), np.roll(np.arange(24), 12)):
        results = run_ranks(2, reorder, whole(torch.float32), sources)
        there = torch.cat([result[0] for result in results])
        assert torch.equal(there, whole(torch.float32)[torch.from_numpy(sources)])
