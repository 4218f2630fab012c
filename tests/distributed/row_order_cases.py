"""What the ranks of ``test_row_order.py`` run."""

from __future__ import annotations

import numpy as np
import torch
import torch.distributed as dist

from megatron_ext.distributed.vocab_parallel import reordered_rows


def reorder(
    rank: int, whole: torch.Tensor, sources: np.ndarray
) -> tuple[torch.Tensor, torch.Tensor]:
    """This rank's rows in another order, and in the one before again."""
    width = len(whole) // dist.get_world_size()
    rows = whole[rank * width : (rank + 1) * width]
    group = dist.group.WORLD
    there = reordered_rows(rows, sources, group)
    return there, reordered_rows(there, np.argsort(sources), group)
