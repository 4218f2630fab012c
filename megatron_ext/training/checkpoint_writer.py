"""Writes a run's checkpoints, at once or in the background; what is not whole is never seen.

A save goes through four stages. The main rank makes a folder with a name of its own; every rank
plans and hands its tensors to a writer process (``megatron.core.dist_checkpointing``); when the
writers of all ranks have ended, rank 0 writes the index of what they wrote; then the main rank adds
what belongs to the checkpoint, renames the folder and moves ``latest``. An error in any stage, on
any rank, is an error on every rank, and the folder is removed. A process that dies leaves a folder
with a hidden name, which the next save removes.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies.async_utils import (
    AsyncRequest,
    TemporalAsyncCaller,
)
from torch.distributed.checkpoint.api import CheckpointException

from megatron_ext.distributed.process_groups import ProcessGroups
from megatron_ext.errors import CheckpointError
from megatron_ext.training import rank_phase
from megatron_ext.training.checkpoint_folder import (
    checkpoint_path,
    publish_checkpoint,
    remove_partial_checkpoints,
)
from megatron_ext.training.noted_errors import NotedErrors
from megatron_ext.training.write_results import WriteResults

_POLL_S = 0.02


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
    """Saves under ``folder``, one at a time.

    Args:
        folder: The run's checkpoints.
        keep: How many of the newest stay.
        is_async: Return from ``save`` when the tensors are copied; ``poll`` ends the save.
        timeout_s: How long writers may take in the background.
        files: Files and folders that a copy of goes into every checkpoint, where they exist.
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
            Whether it is done, and not only begun.

        Raises:
            CheckpointError: This save, or the one before, could not be written; on every rank.
        """
        self.finish()
        partial = self._make_partial(iteration)
        results = filesystem_async._results_queue = WriteResults()
        noted = NotedErrors()
        with noted:
            request = dist_checkpointing.save(state, str(partial), async_sharded_save=True)
        writer = TemporalAsyncCaller()
        with noted.catch():
            if self._is_async:
                writer.schedule_async_call(request._replace(finalize_fns=[]))
            else:
                _write(request)
        self._under_way = _Save(
            iteration, partial, request, writer, results, noted, time.monotonic()
        )
        return not self._is_async and self.finish()

    def poll(self) -> bool:
        """End a save whose writers have all ended; whether there was one.

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
        is_alive_somewhere, is_late_somewhere = flags.tolist()
        if is_alive_somewhere and not is_late_somewhere:
            return False
        # A writer that is late everywhere is killed everywhere: it has left no result, which is
        # what the end of the save reports.
        save.writer.close(abort=bool(is_alive_somewhere))
        self._under_way = None
        self._end(save)
        return True

    def finish(self) -> bool:
        """Wait for the save that is under way, if any, and end it; as ``poll``."""
        if self._under_way is None:
            return False
        while not self.poll():
            # Writers have a time-out of their own.
            rank_phase.tick()
            time.sleep(_POLL_S)
        return True

    def abandon(self) -> None:
        """Give up a save that is under way, on this rank alone: something else has failed."""
        if self._under_way is not None:
            self._under_way.writer.close(abort=True)
            self._under_way = None

    def _make_partial(self, iteration: int) -> Path:
        """A folder to write to, which no writer of an earlier start can know."""
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
        # Only one rank knows what it noted, and only the coordinator which writers failed.
        reasons: list[str | None] = [None] * dist.get_world_size()
        dist.all_gather_object(reasons, save.noted.first() or reason)
        known = sorted((found for found in reasons if found), key=_is_vague)
        if not known:
            final = checkpoint_path(self._folder, save.iteration)
            try:
                self._groups.on_main(
                    lambda: publish_checkpoint(
                        save.partial, final, keep=self._keep, files=self._files
                    )
                )
            except OSError as error:
                known = [str(error)]
            else:
                return
        # Before any rank goes on, or ends and has the others ended.
        self._groups.on_main(lambda: remove_partial_checkpoints(self._folder))
        raise self._error(save.iteration, known[0])

    def _error(self, iteration: int, reason: str) -> CheckpointError:
        return CheckpointError(
            f"the checkpoint of iteration {iteration} could not be written",
            where=self._folder,
            got=reason,
            fix="make room on the disk; the checkpoints before it are whole",
        )


def _write(request: AsyncRequest) -> None:
    """What a writer process does, in this one."""
    if request.async_fn is None:
        return
    rank, _, results = request.async_fn_args
    assert request.preload_fn is not None
    request.async_fn(rank, request.preload_fn(), results)


_NO_RESULT = "results_queue should not be empty"


def _is_vague(reason: str) -> bool:
    """Whether another rank may know more."""
    return "another rank" in reason or "without a result" in reason


def _reason(error: BaseException) -> str:
    """The first line of why writers failed; on all ranks but one that is not known."""
    failures = getattr(error, "failures", None)
    if not failures:
        return "a writer of another rank failed"
    rank, (cause, _) = next(iter(failures.items()))
    line = (str(cause).splitlines() or [type(cause).__name__])[0][:300]
    if _NO_RESULT in line:
        line = "its writer ended without a result, or took too long"
    return f"rank {rank}: {line.removeprefix('Worker failure: ')}"
