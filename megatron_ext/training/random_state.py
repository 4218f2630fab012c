"""The state of every random-number generator of a rank, as an object of a checkpoint.

A run that goes on under the layout it was saved under draws the numbers that it would have drawn.
Under another layout no rank of it has a predecessor: the generators are then seeded from the run's
seed, the iteration, the stage and the replica, so that this start, too, can be repeated.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any, Final

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing import ShardedObject
from megatron.core.tensor_parallel import get_cuda_rng_tracker

from megatron_ext.distributed.process_groups import ProcessGroups

KEY: Final = "rng_state"
LAYOUT: Final = "rng_layout"


def layout_of(groups: ProcessGroups) -> dict[str, int]:
    """Sizes on which it depends whose generators are whose."""
    names = ("pp", "tp", "dp", "cp")
    return {name: dist.get_world_size(getattr(groups, name)) for name in names}


def sharded_random_state(groups: ProcessGroups) -> dict[str, Any]:
    """This rank's generators for ``dist_checkpointing``, with the layout that they belong to."""
    axes = (groups.pp, groups.tp, groups.dp_cp)
    shape, place = tuple(map(dist.get_world_size, axes)), tuple(map(dist.get_rank, axes))
    state = ShardedObject(KEY, _random_state(), shape, place, replica_id=0)
    return {KEY: state, LAYOUT: layout_of(groups)}


def can_load(common: Mapping[str, Any], groups: ProcessGroups) -> bool:
    """Whether a checkpoint with this common state has the generators of these ranks."""
    # Before there was context parallelism nothing was said of it.
    return {"cp": 1, **common.get(LAYOUT, {})} == layout_of(groups)


def load_random_state(state: Mapping[str, Any]) -> None:
    """Take over what ``sharded_random_state`` saved."""
    version, words, position = state["python"]
    random.setstate((version, tuple(words), position))
    numpy_state = dict(state["numpy"])
    words = np.array(numpy_state["state"]["key"], np.uint32)
    np.random.set_state(numpy_state | {"state": {**numpy_state["state"], "key": words}})
    torch.set_rng_state(state["torch"])
    if state["cuda"] is not None:
        torch.cuda.set_rng_state(state["cuda"])
    if state["model_parallel"]:
        get_cuda_rng_tracker().set_states(dict(state["model_parallel"]))


def seed_random_state(seed: int, *, iteration: int, groups: ProcessGroups) -> None:
    """Seed all but the model-parallel tracker, which building a model has seeded for its layout.

    Tensor-parallel ranks get the same seeds, as where models are built.
    """
    entropy = np.random.SeedSequence((seed, iteration, groups.pp_rank, groups.dp_rank))
    words = [int(word) for word in entropy.generate_state(3)]
    random.seed(words[0])
    np.random.seed(words[1])
    torch.manual_seed(words[2])


def _random_state() -> dict[str, Any]:
    """Tensors, numbers and lists alone, which torch loads without running code."""
    numpy_state = dict(np.random.get_state(legacy=False))
    generator = numpy_state["state"]
    version, words, position = random.getstate()
    return {
        "python": [version, list(words), position],
        "numpy": numpy_state | {"state": {**generator, "key": generator["key"].tolist()}},
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
        "model_parallel": dict(get_cuda_rng_tracker().get_states()),
    }
