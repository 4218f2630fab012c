"""Writing of a run's checkpoints, at once or in the background; an incomplete one is never visible.

A save goes through four stages. The main rank makes a folder with a name of its own; every rank
plans and passes its tensors to two threads that write them (``megatron.core.dist_checkpointing``),
in a process of their own when saves go on in the background; when the writers of all ranks have
ended, rank 0 writes the index of what they wrote; then the main rank adds the other files, renames
the folder and moves ``latest``. An error in any stage, on any rank, is an error on every rank, and
the folder is removed. A process that dies leaves a folder with a hidden name, which the next save
removes.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies.async_utils import (
    AsyncRequest,
    TemporalAsyncCaller,
)
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy
from torch.distributed.checkpoint.api import CheckpointException

from megatron_ext.distributed.process_groups import ProcessGroups
from megatron_ext.errors import CheckpointError
from megatron_ext.training import watchdog
from megatron_ext.training.checkpoints.folder import (
    checkpoint_path,
    publish_checkpoint,
    remove_partial_checkpoints,
)
from megatron_ext.training.checkpoints.manifest import summed_writes
from megatron_ext.training.checkpoints.rank_writers import (
    WriteResults,
    start_in_background,
    write_at_once,
    write_buckets,
)
from megatron_ext.training.checkpoints.reader import COMMON_FILE
from megatron_ext.training.megatron_models.megatron_parts import (
    SAVE_OPTIONS,
    needed,
    of_release,
    place,
)

_FORMAT: Final = ("torch_dist", 1)
_WRITERS: Final = 2
"""Writers on each rank; from 0.17 on, megatron-core has one unless asked for more."""

_RANK_0_WRITES: Final = ("finish_index", "save_format")
"""Parts of megatron-core in which rank 0 alone writes while the others go on to the next
collective."""


class NotedErrors:
    """Errors of rank 0's own writes in a save: kept while entered, instead of raised.

    megatron-core raises such an error (a full disk, for example) on rank 0 alone, and leaves
    the others waiting for that rank in their next collective.
    """

    def __init__(self) -> None:
        self._errors: list[Exception] = []
        self._replaced = ExitStack()

    def __enter__(self) -> NotedErrors:
        for part in _RANK_0_WRITES:
            self._replaced.enter_context(needed(part).replaced(self.catch()))
        return self

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        self._replaced.close()

    def first(self) -> str | None:
        """First line of the first error, if any."""
        if not self._errors:
            return None
        error = self._errors[0]
        return (str(error).splitlines() or [type(error).__name__])[0][:300]

    @contextmanager
    def catch(self) -> Iterator[None]:
        """Keep an error of a block, or of each call of a function that it decorates."""
        try:
            yield
        except (OSError, RuntimeError) as error:
            self._errors.append(error)


class _WithoutCommonState(dict[str, Any]):
    """A sharded state to which the common state is not added, as 0.19 does: an object that nobody
    reads would be one more place for a stranger's pickle."""

    def __setitem__(self, key: str, value: Any) -> None:
        if key != "common_state":
            super().__setitem__(key, value)


@contextmanager
def common_state_in(folder: Path, noted: NotedErrors) -> Iterator[None]:
    """Let a save write its common state into ``COMMON_FILE``, under every megatron-core.

    So a checkpoint is read by any release of it, and read before torch.distributed has started:
    0.19 would have the state among the tensors of rank 0.
    """

    def make(split: Callable[..., Any]) -> Callable[..., Any]:
        def split_and_write(*arguments: Any, **named: Any) -> tuple[Any, dict[str, Any]]:
            sharded, common = split(*arguments, **named)
            if dist.get_rank() == 0:
                # Opened here, a full disk is named as such.
                with noted.catch(), (folder / COMMON_FILE).open("wb", buffering=0) as file:
                    torch.save(common, file)
            return _WithoutCommonState(sharded), {}

        return split_and_write

    own = place("save_common")
    with needed("split_state").replaced(make):
        if own is None:
            yield
        else:
            with own.replaced(lambda _: lambda *_, **__: None):
                yield


_POLL_S: Final = 0.02


@dataclass(slots=True)
class _Save:
    """A save under way on this rank."""

    iteration: int
    partial: Path
    request: AsyncRequest
    writer: TemporalAsyncCaller
    results: WriteResults
    noted: NotedErrors
    started: float


class CheckpointWriter:
    """Writer of checkpoints under ``folder``, one at a time.

    Args:
        folder: The run's checkpoints.
        keep: Number of newest checkpoints that are kept.
        is_async: Return from ``save`` when the tensors are copied; ``poll`` ends the save.
        timeout_s: Longest time that writers may take in the background.
        files: Files and folders that are copied into every checkpoint, where they exist.
    """

    def __init__(
        self,
        folder: Path,
        *,
        groups: ProcessGroups,
        keep: int,
        is_async: bool = False,
        timeout_s: float = 1800.0,
        files: Sequence[Path] = (),
    ) -> None:
        self._folder = folder
        self._groups = groups
        self._keep = keep
        self._is_async = is_async
        self._timeout_s = timeout_s
        self._files = tuple(files)
        self._under_way: _Save | None = None

    def save(self, iteration: int, state: dict[str, Any]) -> bool:
        """Save a sharded state from all ranks; a save that is under way is ended first.

        Collectives: those of ``dist_checkpointing.save``, two object broadcasts, and without
        ``is_async`` those of ``finish``; the same on every rank, also when one of them fails.

        Returns:
            True when the save is complete, False when it goes on in the background.

        Raises:
            CheckpointError: This save, or the one before, could not be written; on every rank.
        """
        self.finish()
        partial = self._make_partial(iteration)
        results = WriteResults()
        needed("results_queue").put(results)
        noted = NotedErrors()
        # A method of megatron-core, which takes it from the class while it makes the request.
        buckets = needed("write_buckets").replaced(lambda _: staticmethod(write_buckets))
        with noted, buckets, common_state_in(partial, noted):
            request = dist_checkpointing.save(
                state,
                str(partial),
                sharded_strategy=TorchDistSaveShardedStrategy(*_FORMAT, thread_count=_WRITERS),
                async_sharded_save=True,
                **of_release(SAVE_OPTIONS),
            )
        writer = TemporalAsyncCaller()
        with noted.catch(), _summed_once():
            if self._is_async:
                writer = start_in_background(request, results)
            else:
                write_at_once(request)
        self._under_way = _Save(
            iteration, partial, request, writer, results, noted, time.monotonic()
        )
        return not self._is_async and self.finish()

    def poll(self) -> bool:
        """End a save whose writers have all ended; True if there was one.

        Collectives: one all-reduce of two flags while a save is under way, and those of its end.

        Raises:
            CheckpointError: It could not be written; on every rank.
        """
        save = self._under_way
        if save is None:
            return False
        process = save.writer.process
        is_alive = process is not None and process.is_alive()
        is_late = time.monotonic() - save.started > self._timeout_s
        flags = torch.tensor([is_alive, is_late], dtype=torch.int32, device=self._groups.device)
        dist.all_reduce(flags, op=dist.ReduceOp.MAX)
        any_alive, any_late = flags.tolist()
        if any_alive and not any_late:
            return False
        # Late writers are killed on every rank; the end of the save reports that a result is
        # missing.
        save.writer.close(abort=bool(any_alive))
        self._under_way = None
        self._end(save)
        return True

    def finish(self) -> bool:
        """Wait for the save that is under way, if any, and end it; as ``poll``."""
        if self._under_way is None:
            return False
        while not self.poll():
            # Not for the watchdog to judge: writers have a time-out of their own.
            watchdog.tick()
            time.sleep(_POLL_S)
        return True

    def abandon(self) -> None:
        """Give up a save that is under way, on this rank alone, after another failure."""
        if self._under_way is not None:
            self._under_way.writer.close(abort=True)
            self._under_way = None

    def _make_partial(self, iteration: int) -> Path:
        """Make a folder to write to, with a name that no writer of an earlier start has."""
        name = [f".{checkpoint_path(self._folder, iteration).name}.{secrets.token_hex(4)}.partial"]
        dist.broadcast_object_list(name, src=0)
        partial = self._folder / name[0]

        def make() -> None:
            remove_partial_checkpoints(self._folder)
            partial.mkdir(parents=True)

        try:
            self._groups.on_main(make)
        except OSError as error:
            raise self._error(iteration, str(error)) from error
        return partial

    def _end(self, save: _Save) -> None:
        """Index, check, publish; an error removes what was written."""
        reason = None
        try:
            with save.noted:
                for finalize in save.request.finalize_fns:
                    finalize()
        except (CheckpointException, CheckpointingException) as error:
            reason = _reason(error)
        save.results.close()
        # Noted errors are on one rank alone, and failures of writers on the coordinator alone.
        of_ranks: list[str | None] = [None] * dist.get_world_size()
        dist.all_gather_object(of_ranks, save.noted.first() or reason)
        # Last those of ranks that know only that another has failed.
        vague = ("another rank", "without a result")
        reasons = sorted(
            (text for text in of_ranks if text),
            key=lambda text: any(word in text for word in vague),
        )
        if not reasons:
            final = checkpoint_path(self._folder, save.iteration)
            try:
                self._groups.on_main(
                    lambda: publish_checkpoint(
                        save.partial, final, keep=self._keep, files=self._files
                    )
                )
            except OSError as error:
                reasons = [str(error)]
            else:
                return
        # Before any rank goes on, or ends and makes the launcher end the others.
        self._groups.on_main(lambda: remove_partial_checkpoints(self._folder))
        raise self._error(save.iteration, reasons[0])

    def _error(self, iteration: int, reason: str) -> CheckpointError:
        return CheckpointError(
            f"the checkpoint of iteration {iteration} could not be written",
            where=self._folder,
            got=reason,
            fix="make room on the disk; the checkpoints before it are whole",
        )


@contextmanager
def _summed_once() -> Iterator[None]:
    """Let writers sum whole files for the manifest, and no tensor in them.

    Archives of torch have a sum for each tensor, which torch does not look at and which costs more.
    """
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        with summed_writes(filesystem_async):
            yield
    finally:
        torch.serialization.set_crc32_options(before)


_NO_RESULT = "results_queue should not be empty"


def _reason(error: BaseException) -> str:
    """First line of a writers' failure, which only the coordinator has."""
    failures = getattr(error, "failures", None)
    if not failures:
        return "a writer of another rank failed"
    rank, (cause, _) = next(iter(failures.items()))
    line = (str(cause).splitlines() or [type(cause).__name__])[0][:300]
    if _NO_RESULT in line:
        line = "its writer ended without a result, or took too long"
    return f"rank {rank}: {line.removeprefix('Worker failure: ')}"
