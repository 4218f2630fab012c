"""How many processes a parallel layout needs; plain numbers, so that it is checked first."""

from __future__ import annotations

import math
import os

from megatron_ext.distributed import roles
from megatron_ext.errors import ConfigError


def launched_processes() -> int:
    """Number of processes that torchrun started, of this one's role; one without it."""
    role = roles.current()
    return role.size if role is not None else int(os.environ.get("WORLD_SIZE", "1"))


def data_parallel_size(
    *,
    world_size: int,
    tensor_model_parallel_size: int,
    pipeline_model_parallel_size: int,
    context_parallel_size: int = 1,
) -> int:
    """Number of whole model replicas that the processes make.

    Raises:
        ConfigError: The processes do not divide into whole replicas.
    """
    replica = tensor_model_parallel_size * context_parallel_size * pipeline_model_parallel_size
    if world_size % replica:
        raise ConfigError(
            "the processes do not divide into whole model replicas",
            got=f"{world_size} process{'es' if world_size > 1 else ''}",
            expected=(
                f"a multiple of {replica} (tensor_model_parallel_size {tensor_model_parallel_size}"
                + (
                    f" x context_parallel_size {context_parallel_size}"
                    * (context_parallel_size > 1)
                )
                + f" x pipeline_model_parallel_size {pipeline_model_parallel_size})"
            ),
            fix="start with torchrun --nproc-per-node set to such a number, or change the sizes",
        )
    return world_size // replica


def sequence_multiple(
    *, context_parallel_size: int, tensor_model_parallel_size: int, sequence_parallel: bool
) -> int:
    """What rows are filled up to a multiple of, so that every rank has an equal part of them.

    A context-parallel rank has two slices of a row, which sequence parallelism cuts together.
    Without context parallelism 1: rows are left as they are.
    """
    if context_parallel_size == 1:
        return 1
    parts = tensor_model_parallel_size if sequence_parallel else 1
    return context_parallel_size * math.lcm(2, parts)
