"""The tensors of a checkpoint, whole, read without any process group."""

import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict


def weights_of(checkpoint):
    """By name, those of the optimizer left out."""
    state = {}
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
