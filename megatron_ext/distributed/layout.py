"""How many processes a parallel layout needs; plain numbers, so that it is checked first."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass

from megatron_ext.distributed import roles
from megatron_ext.errors import ConfigError


def launched_processes() -> int:
    """Number of processes that torchrun started, of this one's role; one without it."""
    role = roles.current()
    return role.size if role is not None else int(os.environ.get("WORLD_SIZE", "1"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """How processes share one model; what is left over is data parallelism."""

    tensor_model_parallel_size: int = 1

    pipeline_model_parallel_size: int = 1

    virtual_pipeline_model_parallel_size: int = 1
    """Model chunks of a pipeline rank, which megatron-core's schedules interleave above 1."""

    context_parallel_size: int = 1

    sequence_parallel: bool = False
    """Whether tensor-parallel ranks share every sequence between the layers' matrices."""

    def replicas(self, world_size: int) -> int:
        """Number of whole model replicas that the processes make.

        Raises:
            ConfigError: The processes do not divide into whole replicas.
        """
        tp, pp = self.tensor_model_parallel_size, self.pipeline_model_parallel_size
        cp = self.context_parallel_size
        if world_size % (tp * cp * pp):
            raise ConfigError(
                "the processes do not divide into whole model replicas",
                got=f"{world_size} process{'es' if world_size > 1 else ''}",
                expected=(
                    f"a multiple of {tp * cp * pp} (tensor_model_parallel_size {tp}"
                    + f" x context_parallel_size {cp}" * (cp > 1)
                    + f" x pipeline_model_parallel_size {pp})"
                ),
                fix="start so many with torchrun --nproc-per-node, or change the sizes",
            )
        return world_size // (tp * cp * pp)

    @property
    def sequence_multiple(self) -> int:
        """What rows are filled up to a multiple of, so that every rank has an equal part of them.

        A context-parallel rank has two slices of a row, which sequence parallelism cuts together.
        Without context parallelism 1: rows are left as they are.
        """
        if self.context_parallel_size == 1:
            return 1
        parts = self.tensor_model_parallel_size if self.sequence_parallel else 1
        return self.context_parallel_size * math.lcm(2, parts)
