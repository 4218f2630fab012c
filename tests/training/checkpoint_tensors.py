"""The tensors of a checkpoint, whole, read without any process group."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict


def weights_of(checkpoint: Path) -> dict[str, torch.Tensor]:
    """By name, those of the optimizer left out."""
    state: dict[str, Any] = {}
    _load_state_dict(
        state,
        storage_reader=FileSystemReader(str(checkpoint)),
        planner=_EmptyStateDictLoadPlanner(),
        no_dist=True,
    )
    return {
        name: tensor
        for name, tensor in state.items()
        if isinstance(tensor, torch.Tensor) and not name.startswith("optimizer")
    }
