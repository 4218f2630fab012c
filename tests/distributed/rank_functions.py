"""What the ranks of ``test_process_group.py`` run."""

import time

import torch
import torch.distributed as dist


def sum_of_ranks(rank: int, extra: int) -> torch.Tensor:
    total = torch.tensor(rank + extra)
    dist.all_reduce(total)
    return total


def fail_on_rank_one(rank: int) -> None:
    if rank == 1:
        raise ValueError("the deliberate failure")
    dist.barrier()


def sleep_on_rank_one(rank: int) -> None:
    if rank == 1:
        time.sleep(60)
