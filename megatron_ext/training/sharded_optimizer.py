"""What checkpoints of megatron-core's distributed optimizer need when torch's AdamW is under it.

megatron-core 0.16 expects the update count where Apex and Transformer Engine keep it, in the
parameter groups. torch keeps one with each parameter, and none before the first update. Loading
then fails for want of a count, fails on finding one, and leaves one tensor to all parameters, each
of which advances it. The three are mended here, on the optimizer at hand.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

CHECKPOINT_FORMAT = {"distrib_optim_sharding_type": "fully_reshardable"}
"""The distributed optimizer's format that any layout can read."""


def prepare_to_load(optimizer: MegatronOptimizer) -> None:
    """Make an optimizer ready for ``sharded_state_dict(is_loading=True)`` and what follows."""
    for inner in getattr(optimizer, "chained_optimizers", [optimizer]):
        if isinstance(inner, DistributedOptimizer) and isinstance(
            inner.optimizer, torch.optim.AdamW
        ):
            if not inner.optimizer.state:
                inner._init_optimizer_states_with_dummy_values()
            inner._set_main_param_and_optimizer_states = _FillState(inner)


class _FillState:
    """Fills a parameter's state from a checkpoint, with an update count of its own."""

    def __init__(self, optimizer: DistributedOptimizer) -> None:
        self._optimizer = optimizer
        self._fill = type(optimizer)._set_main_param_and_optimizer_states

    def __call__(self, parameter: torch.nn.Parameter, tensors: Mapping[str, Any]) -> None:
        group, order = self._optimizer.model_param_group_index_map[parameter]
        inner = self._optimizer.optimizer
        state = inner.state[inner.param_groups[group]["params"][order]]
        state["step"] = state["step"].clone()
        self._fill(self._optimizer, parameter, {"step": state["step"], **tensors})
