"""State of megatron-core's optimizers in checkpoints that any layout can read.

Checkpoints of megatron-core's distributed optimizer around torch's AdamW need three repairs.
megatron-core expects the update count in the parameter groups, where Apex and Transformer
Engine keep it; torch keeps one with each parameter, and none before the first update. Loading then
fails for want of a count, fails on finding one, and leaves one tensor to all parameters, each of
which advances it. ``_prepare_to_load`` mends all three on the optimizer at hand.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, Final

import torch
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from megatron_ext.training.megatron_models.megatron_parts import needed

CHECKPOINT_FORMAT = {
    "distrib_optim_sharding_type": "fully_reshardable",
    "chained_optim_avoid_prefix": True,
}
"""The distributed optimizer's format that any layout can read."""

EXPERTS: Final = "experts"
"""Entry of an optimizer's state for the optimizer of experts, where it is another one."""


def sharded_optimizer(
    optimizer: MegatronOptimizer, weights: Mapping[str, Any], *, is_loading: bool
) -> dict[str, Any]:
    """State of an optimizer for ``dist_checkpointing``, which any layout can read.

    megatron-core has an optimizer for experts beside the other one where ranks share them, and one
    for all parameters elsewhere: the files of both differ in ``EXPERTS`` alone.
    """
    if is_loading:
        _prepare_to_load(optimizer)
    state: dict[Any, Any] = optimizer.sharded_state_dict(
        weights, is_loading=is_loading, metadata=CHECKPOINT_FORMAT
    )
    return {**state[0], EXPERTS: state[1]} if _has_experts(optimizer) else state


def load_optimizer(optimizer: MegatronOptimizer, state: Mapping[str, Any]) -> None:
    """Take over a loaded ``sharded_optimizer``, of any layout."""
    others = {name: part for name, part in state.items() if name != EXPERTS}
    if not _has_experts(optimizer):
        optimizer.load_state_dict(others)
        return
    experts = _with_settings(state[EXPERTS], others, optimizer.chained_optimizers[1])
    optimizer.load_state_dict({0: others, 1: experts})


def _prepare_to_load(optimizer: MegatronOptimizer) -> None:
    """Make an optimizer ready for ``sharded_state_dict(is_loading=True)`` and for loading it."""
    for inner in getattr(optimizer, "chained_optimizers", [optimizer]):
        if isinstance(inner, DistributedOptimizer) and isinstance(
            inner.optimizer, torch.optim.AdamW
        ):
            if not inner.optimizer.state:
                needed("make_optimizer_state").value(inner)
            setattr(inner, needed("fill_optimizer_state").name, partial(_fill_state, inner))


def _fill_state(
    optimizer: DistributedOptimizer, parameter: torch.nn.Parameter, tensors: Mapping[str, Any]
) -> None:
    """Fill a parameter's state from a checkpoint, with an update count of its own."""
    group, order = optimizer.model_param_group_index_map[parameter]
    inner = optimizer.optimizer
    state = inner.state[inner.param_groups[group]["params"][order]]
    state["step"] = state["step"].clone()
    fill = needed("fill_optimizer_state").value
    fill(optimizer, parameter, {"step": state["step"], **tensors})


def _has_experts(optimizer: MegatronOptimizer) -> bool:
    parts = getattr(optimizer, "chained_optimizers", [optimizer])
    assert len(parts) <= 2, "one of experts, one of all others"
    return len(parts) == 2


def _with_settings(
    experts: Mapping[str, Any], others: Mapping[str, Any], optimizer: MegatronOptimizer
) -> dict[str, Any]:
    """Tensors of the experts' optimizer with the settings of this run and the others' update
    count, which files of a layout with one optimizer do not hold apart."""
    is_nested = "optimizer" in others
    loaded = dict(experts.get("optimizer", {}) if is_nested else experts)
    inner = others["optimizer"] if is_nested else others
    groups = [
        {name: value for name, value in group.items() if name != "params"}
        for group in optimizer.param_groups
    ]
    if isinstance(optimizer, DistributedOptimizer):
        # Which numbers parameters itself.
        step = inner["param_groups"][0]["step"]
        loaded["param_groups"] = [{**group, "step": step} for group in groups]
    else:
        loaded["param_groups"] = [
            {**group, "params": numbers["params"]}
            for group, numbers in zip(groups, loaded["param_groups"], strict=True)
        ]
        count = {name: inner["state"][name] for name in ("common_step",) if name in inner["state"]}
        loaded["state"] = {**loaded["state"], **count}
    return {**others, **experts, "optimizer": loaded} if is_nested else loaded
