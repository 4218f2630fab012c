"""Saving and resuming of a run: weights, optimizer, data, counts and random-number generators.

A run that resumes under the layout that it was saved under draws the same random numbers as without
the interruption. Under another layout ranks do not correspond: the generators are then seeded from
the run's seed, the iteration, the stage and the replica, so that this start can be repeated too.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Protocol

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing import ShardedObject
from megatron.core.tensor_parallel import get_cuda_rng_tracker

from megatron_ext.data.global_batches import ReadAhead
from megatron_ext.distributed.process_groups import ProcessGroups
from megatron_ext.errors import CheckpointError, ProjectionError
from megatron_ext.huggingface.checkpoint_files import SIDE_FOLDER
from megatron_ext.training import watchdog
from megatron_ext.training.checkpoints.checkpoint import load_checkpoint, load_common
from megatron_ext.training.checkpoints.folder import latest_checkpoint
from megatron_ext.training.checkpoints.writer import CheckpointWriter
from megatron_ext.training.faults import FaultCounts
from megatron_ext.training.run_folder import (
    CHECKPOINTS,
    PROJECTION_FILE,
    QUARANTINE_FILE,
    ROLLOUTS_FILE,
    TOKENIZER_FOLDER,
    check_still_there,
    forget_later_lines,
    projection_file,
)
from megatron_ext.training.run_plan import RunPlan
from megatron_ext.training.student import Student

KEY: Final = "rng_state"
LAYOUT: Final = "rng_layout"


def sharded_random_state(groups: ProcessGroups) -> dict[str, Any]:
    """This rank's generators for ``dist_checkpointing``, with their layout."""
    axes = (groups.pp, groups.tp, groups.dp_cp)
    shape, place = tuple(map(dist.get_world_size, axes)), tuple(map(dist.get_rank, axes))
    state = ShardedObject(KEY, _random_state(), shape, place, replica_id=0)
    names = ("pp", "tp", "dp", "cp")
    layout = {name: dist.get_world_size(getattr(groups, name)) for name in names}
    return {KEY: state, LAYOUT: layout}


def load_random_state(state: Mapping[str, Any]) -> None:
    """Restore the generators from a loaded ``sharded_random_state``."""
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
    """State of all generators as tensors, numbers and lists, which torch loads without code."""
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


_FAILED_SAVES: Final = 3
"""Saves in a row that may fail before the run ends."""


class Part(Protocol):
    """A part of a run with a state in its checkpoints; the same on every rank."""

    def state_dict(self) -> dict[str, Any]:
        """The state as plain values."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a ``state_dict``."""


class SavedRun:
    """The checkpoints of a run: weights, optimizer, scheduler, data, random numbers, counts.

    Args:
        plan: The run.
        record: Description of the run, saved with every checkpoint.
        counts: Counts of faults, which are part of the state.
        parts: Other parts with a state, by their names in the checkpoint.
        write_learned: Writes the learned projections as files, on the main rank before each save.
    """

    def __init__(
        self,
        plan: RunPlan,
        *,
        groups: ProcessGroups,
        student: Student,
        batches: ReadAhead[Any],
        record: Mapping[str, Any],
        counts: FaultCounts,
        parts: Mapping[str, Part] | None = None,
        write_learned: Callable[[], None] | None = None,
    ) -> None:
        self._plan = plan
        self._groups = groups
        self._student = student
        self._batches = batches
        self._record = dict(record)
        self._counts = counts
        self._parts = {"faults": counts, **(parts or {})}
        self._write_learned = write_learned
        self._folder = plan.run_dir / CHECKPOINTS
        self._failed_in_a_row = 0
        self._writer = CheckpointWriter(
            self._folder,
            groups=groups,
            keep=plan.training.keep_checkpoints,
            is_async=plan.training.async_save,
            timeout_s=60.0 * plan.parallel.distributed_timeout_minutes,
            files=_files(plan),
        )

    def load(self) -> int:
        """Load the newest checkpoint of the run, if any.

        Returns:
            Iterations done.

        Raises:
            CheckpointError: The checkpoint is not whole, or of another model.
            ConfigError: It is of other data.
        """
        checkpoint = latest_checkpoint(self._folder)
        run_dir = self._plan.run_dir
        if checkpoint is None:
            self._groups.on_main(lambda: _forget(run_dir, last_iteration=0))
            return 0
        training = self._plan.training
        common = load_common(checkpoint, verify=training.verify_checkpoints)
        iteration = int(common["iteration"])
        state = self._student.sharded_state(is_loading=True)
        random_state = sharded_random_state(self._groups)
        # Older checkpoints, from before context parallelism, have no entry for it.
        if {"cp": 1, **common.get(LAYOUT, {})} == random_state[LAYOUT]:
            state |= random_state
        state = load_checkpoint(checkpoint, state, verify=training.verify_checkpoints)
        self._student.load_state(state)
        self._batches.load_state(common["data"])
        for name, part in self._parts.items():
            if name in common:
                part.load_state_dict(common[name])
        if KEY in state:
            load_random_state(state[KEY])
        else:
            # The checkpoint, of another layout, has no state for these ranks.
            seed_random_state(training.seed, iteration=iteration, groups=self._groups)
        self._groups.on_main(lambda: _forget(run_dir, last_iteration=iteration))
        return iteration

    def save(self, iteration: int, *, is_last: bool) -> None:
        """Save a checkpoint; a failure is a warning, unless it is the last save.

        Raises:
            CheckpointError: The last one, or the third in a row, could not be written.
            ConfigError: The run's folder is gone.
        """
        watchdog.enter("saving")
        self._groups.on_main(lambda: check_still_there(self._plan.run_dir))
        self._attempt(self._writer.finish)
        # Of each replica, for any layout.
        positions: list[Any] = [None] * self._groups.dp_size
        dist.all_gather_object(positions, self._batches.positions(), group=self._groups.dp)
        state = {
            **self._student.sharded_state(),
            **sharded_random_state(self._groups),
            "iteration": iteration,
            "data": self._batches.state(positions),
            "run": self._record,
            **{name: part.state_dict() for name, part in self._parts.items()},
        }
        self._attempt(lambda: self._write(iteration, state), is_last=is_last)
        if is_last:
            self._attempt(self._writer.finish, is_last=True)

    def _write(self, iteration: int, state: dict[str, Any]) -> bool:
        """Write the learned projections, which the checkpoint copies, and the checkpoint."""
        if self._write_learned is not None:
            try:
                self._groups.on_main(self._write_learned)
            except ProjectionError as error:
                raise CheckpointError(str(error)) from error
        return self._writer.save(iteration, state)

    def poll(self) -> None:
        """End a save in the background once all ranks have written it; raises as ``save``."""
        self._attempt(self._writer.poll)

    def finish(self) -> None:
        """Wait for a save in the background; raises as ``save``. Call it on every rank."""
        self._attempt(self._writer.finish)

    def abandon(self) -> None:
        """Give up a save in the background, on this rank alone."""
        self._writer.abandon()

    def _attempt(self, action: Callable[[], bool], *, is_last: bool = False) -> None:
        """Run an action that may end a save; a failure that a later save repairs is a warning."""
        try:
            if action():
                self._failed_in_a_row = 0
        except CheckpointError as error:
            self._counts.failed_saves += 1
            self._failed_in_a_row += 1
            if is_last or self._failed_in_a_row == _FAILED_SAVES:
                raise
            if self._groups.is_main:
                sys.stderr.write(f"\nwarning: {error}; the run goes on and saves again later\n")


def _files(plan: RunPlan) -> Sequence[Path]:
    """Files of every checkpoint besides its state: tokenizer, projections, HuggingFace's files."""
    run_dir = plan.run_dir
    built = sorted(run_dir.glob(f"{Path(PROJECTION_FILE).stem}*.safetensors"))
    learners = plan.teachers if plan.loss.learned_projection else ()
    learned = [run_dir / projection_file(name, is_learned=True) for name in learners]
    return (run_dir / TOKENIZER_FOLDER, run_dir / SIDE_FOLDER, *built, *plan.projections, *learned)


def _forget(run_dir: Path, *, last_iteration: int) -> None:
    """Drop what the logs beside the metrics hold of later iterations."""
    for name in (QUARANTINE_FILE, ROLLOUTS_FILE):
        forget_later_lines(run_dir / name, last_iteration=last_iteration)
