"""Process groups of one rank: joined, cut by megatron-core, and passed on explicitly."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed.distributed_c10d import _get_default_store
from torch.distributed.rendezvous import rendezvous

from megatron_ext.distributed import layout
from megatron_ext.distributed.layout import Layout, launched_processes
from megatron_ext.distributed.vocab_parallel import VocabShard
from megatron_ext.errors import ConfigError, MegatronExtError

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessGroups:
    """Process groups of this rank in the parallel layout."""

    tp: dist.ProcessGroup
    """Tensor-parallel: ranks that share one stage's layers and vocabulary."""

    pp: dist.ProcessGroup
    """Pipeline-parallel: the stages of one model replica."""

    dp: dist.ProcessGroup
    """Data-parallel: the replicas."""

    cp: dist.ProcessGroup
    """Context-parallel: ranks that share every sequence of a replica."""

    dp_cp: dist.ProcessGroup
    """Data- and context-parallel ranks together, over which gradients are summed."""

    tp_cp: dist.ProcessGroup
    """Tensor- and context-parallel ranks of one stage, which read the same sequences."""

    device: torch.device

    @classmethod
    def from_megatron(cls, device: torch.device) -> ProcessGroups:
        """Groups of this rank, after megatron-core has made them."""
        from megatron.core import parallel_state

        return cls(
            tp=parallel_state.get_tensor_model_parallel_group(),
            pp=parallel_state.get_pipeline_model_parallel_group(),
            dp=parallel_state.get_data_parallel_group(),
            cp=parallel_state.get_context_parallel_group(),
            dp_cp=parallel_state.get_data_parallel_group(with_context_parallel=True),
            tp_cp=parallel_state.get_tensor_and_context_parallel_group(),
            device=device,
        )

    @property
    def is_first_stage(self) -> bool:
        """Whether this rank embeds tokens."""
        return self.pp_rank == 0

    @property
    def is_last_stage(self) -> bool:
        """Whether this rank holds the head and computes the loss."""
        return self.pp_rank == dist.get_world_size(self.pp) - 1

    @property
    def pp_rank(self) -> int:
        """Index of this rank's pipeline stage."""
        return dist.get_rank(self.pp)

    @property
    def dp_rank(self) -> int:
        """Index of this rank's replica."""
        return dist.get_rank(self.dp)

    @property
    def dp_size(self) -> int:
        """Number of replicas."""
        return dist.get_world_size(self.dp)

    @property
    def cp_rank(self) -> int:
        """Index of this rank's part of every sequence."""
        return dist.get_rank(self.cp)

    @property
    def cp_size(self) -> int:
        """Ranks that share a sequence."""
        return dist.get_world_size(self.cp)

    @property
    def is_main(self) -> bool:
        """Whether this is the one rank that writes files and progress; it knows the losses."""
        return dist.get_rank() == self._main_rank()

    @property
    def is_replica_main(self) -> bool:
        """Whether this rank is to its replica what the main rank is to the first."""
        return self.is_last_stage and dist.get_rank(self.tp) == 0 and self.cp_rank == 0

    def on_main(self, work: Callable[[], object]) -> None:
        """Run ``work`` on the main rank while the others wait; raise its error on every rank.

        Collectives: one object broadcast over all ranks.
        """
        outcome: list[Exception | None] = [None]
        if self.is_main:
            try:
                work()
            except Exception as error:
                outcome = [error]
        dist.broadcast_object_list(outcome, src=self._main_rank())
        if outcome[0] is not None:
            raise outcome[0]

    def from_main(self, work: Callable[[], Result]) -> Result:
        """Result of ``work`` on the main rank, on every rank.

        Collectives: that of ``on_main``, and one all-gather of objects.
        """
        results: list[Result] = []
        self.on_main(lambda: results.append(work()))
        of_ranks: list[list[Result]] = [[] for _ in range(dist.get_world_size())]
        dist.all_gather_object(of_ranks, results)
        return next(result for of_rank in of_ranks for result in of_rank)

    def _main_rank(self) -> int:
        """Global rank for which ``is_main`` holds: the first of the last stage.

        megatron-core lays ranks out with tensor parallelism innermost, then context parallelism,
        and stages outermost.
        """
        stages = dist.get_world_size(self.pp)
        return dist.get_world_size() // stages * (stages - 1)

    def vocab_shard(self, *, vocab_size: int, padded_vocab_size: int) -> VocabShard:
        """This rank's columns of a head of ``padded_vocab_size`` rows."""
        ranks = dist.get_world_size(self.tp)
        width = padded_vocab_size // ranks
        start = dist.get_rank(self.tp) * width
        # A rank alone has nobody to ask: without a group no collective is launched.
        group = self.tp if ranks > 1 else None
        return VocabShard(start=start, stop=start + width, vocab_size=vocab_size, group=group)

    def broadcast_from_last_stage(self, values: torch.Tensor) -> torch.Tensor:
        """``values`` of the last stage, on every stage; one broadcast over ``pp``."""
        last = dist.get_process_group_ranks(self.pp)[-1]
        dist.broadcast(values, src=last, group=self.pp)
        return values


def join(timeout: timedelta) -> None:
    """Join the process group that torchrun describes, or one of this process alone; idempotent."""
    if dist.is_initialized():
        return
    device = _local_device()
    if device.type == "cuda":
        torch.cuda.set_device(device)
    backend = "nccl" if device.type == "cuda" else "gloo"
    if (role := layout.current()) is not None:
        # A world of its own: rank 0 to size - 1, whichever ranks of the launch these are.
        place: dict[str, Any] = {
            "store": PrefixStore(role.prefix, _launch_store()),
            "rank": role.rank,
            "world_size": role.size,
        }
    elif "RANK" in os.environ:
        place = {}
    else:
        place = {"store": torch._C._distributed_c10d.HashStore(), "rank": 0, "world_size": 1}
    if device.type == "cuda":
        # NCCL makes its communicators at once, and knows the device of a barrier.
        place["device_id"] = device
    dist.init_process_group(backend, timeout=timeout, **place)


def initialize(layout: Layout, *, timeout: timedelta = timedelta(minutes=30)) -> ProcessGroups:
    """Join the process group that torchrun describes and cut it into a TP x CP x DP x PP layout.

    One process works too, without torchrun. NCCL with a GPU per local rank, otherwise gloo on CPU
    (the caller installs ``training.megatron_models.cpu_megatron`` first).

    Args:
        timeout: How long a collective may wait.

    Raises:
        ConfigError: The processes do not divide into whole replicas.
    """
    layout.replicas(launched_processes())
    device = _local_device()
    join(timeout)
    from megatron.core import parallel_state

    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tensor_model_parallel_size,
        pipeline_model_parallel_size=layout.pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=(
            layout.virtual_pipeline_model_parallel_size
            if layout.virtual_pipeline_model_parallel_size > 1
            else None
        ),
        context_parallel_size=layout.context_parallel_size,
        expert_model_parallel_size=layout.expert_model_parallel_size,
        expert_tensor_parallel_size=layout.expert_tensor_ranks,
        create_gloo_process_groups=False,
        distributed_timeout_minutes=max(1, int(timeout.total_seconds() // 60)),
    )
    return ProcessGroups.from_megatron(device)


class LaunchPlace(NamedTuple):
    """Rank and store of this process among all processes of its launch, whatever their roles."""

    store: Store
    """Store of the launch on a connection of its own, so that no other thread blocks it."""

    rank: int
    world_size: int


def launch_place() -> LaunchPlace:
    """Place of a process that has joined its default group."""
    role = layout.current()
    if role is None:
        store = _get_default_store()
        return LaunchPlace(_connection(store), dist.get_rank(), dist.get_world_size())
    store = _launch_store()
    return LaunchPlace(_connection(store), role.launch_rank, role.launched)


def raise_on_all(error: Exception | None) -> None:
    """Raise the error of the first rank that has one on every rank. One all-gather of objects."""
    of_ranks: list[Exception | None] = [None] * dist.get_world_size()
    dist.all_gather_object(of_ranks, error)
    # With its cause, which is not sent.
    of_ranks[dist.get_rank()] = error
    for of_rank in of_ranks:
        if of_rank is not None:
            raise of_rank


@contextmanager
def raising_on_all() -> Iterator[None]:
    """Raise an error of any rank's block that a user can mend by ``raise_on_all``."""
    failed: Exception | None = None
    try:
        yield
    except MegatronExtError as error:
        failed = error
    raise_on_all(failed)


def finalize() -> None:
    """Leave the process group; safe to call when none was joined."""
    if not dist.is_initialized():
        return
    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


def _local_device() -> torch.device:
    if not torch.cuda.is_available():
        return torch.device("cpu")
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    if local_rank >= torch.cuda.device_count():
        raise ConfigError(
            "more local processes than GPUs",
            got=f"local rank {local_rank} and {torch.cuda.device_count()} GPUs",
            fix="start one process per GPU, or set CUDA_VISIBLE_DEVICES= to run on the CPU",
        )
    return torch.device("cuda", local_rank)


@cache
def _launch_store() -> Store:
    """The store that torchrun, or the environment, describes."""
    store: Store = next(rendezvous("env://"))[0]
    return store


def _connection(store: Store) -> Store:
    """Another connection to the same store."""
    clone: Store = store.clone()  # type: ignore[attr-defined]
    return clone
