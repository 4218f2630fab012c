"""megatron-core's checkpoints in one process on the CPU, whether there is a GPU or not."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from megatron_ext.distributed import process_groups
from megatron_ext.distributed.layout import Layout, launched_processes
from megatron_ext.distributed.process_groups import ProcessGroups
from megatron_ext.errors import DistributedError
from megatron_ext.training import cpu_megatron


@contextmanager
def lone_process() -> Iterator[ProcessGroups]:
    """Process groups of this process alone, over gloo, left again at the end.

    A group of one process that is there already is used.

    Raises:
        DistributedError: The process is one of several.
        RuntimeError: It uses CUDA.
    """
    if launched_processes() > 1:
        raise DistributedError(
            "one process does this alone", got=launched_processes(), fix="start it without torchrun"
        )
    cpu_megatron.install()
    is_new = not dist.is_initialized()
    if is_new:
        store = torch._C._distributed_c10d.HashStore()
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        groups = process_groups.initialize(Layout())
        yield replace(groups, device=torch.device("cpu"))
    finally:
        parallel_state.destroy_model_parallel()
        if is_new:
            dist.destroy_process_group()
