"""The state of a run besides what it learns: when it is saved, and going on from it.

The state of every random-number generator of a rank, as an object of a checkpoint.

A run that goes on under the layout it was saved under draws the numbers that it would have drawn.
Under another layout no rank of it has a predecessor: the generators are then seeded from the run's
seed, the iteration, the stage and the replica, so that this start, too, can be repeated.
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
from megatron_ext.training import rank_phase
from megatron_ext.training.checkpoint import load_checkpoint, load_common
from megatron_ext.training.checkpoint_folder import latest_checkpoint
from megatron_ext.training.checkpoint_writer import CheckpointWriter
from megatron_ext.training.faults import FaultCounts, forget_refused
from megatron_ext.training.learning_step import LearnedProjections, learned_projection_file
from megatron_ext.training.run_folder import CHECKPOINTS, PROJECTION_FILE, TOKENIZER_FOLDER
from megatron_ext.training.run_plan import CheckpointPlan
from megatron_ext.training.student import Student

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


_FAILED_SAVES: Final = 3
"""Saves in a row that may fail before the run ends."""


class Part(Protocol):
    """Something of a run that a checkpoint keeps; the same on every rank."""

    def state_dict(self) -> dict[str, Any]:
        """Plain values."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from them."""


class SavedRun:
    """The checkpoints of a run: weights, optimizer, scheduler, data, random numbers, counts.

    Args:
        plan: What is saved, and how.
        record: Saved with every checkpoint: what one needs to know to use it.
        counts: Of faults; they are part of the state.
        parts: What else has a state, by its name in the checkpoint.
        learned: Projections that are trained, which each save writes as files too.
    """

    def __init__(
        self,
        plan: CheckpointPlan,
        *,
        groups: ProcessGroups,
        student: Student,
        batches: ReadAhead[Any],
        record: Mapping[str, Any],
        counts: FaultCounts,
        parts: Mapping[str, Part] | None = None,
        learned: LearnedProjections | None = None,
    ) -> None:
        self._plan = plan
        self._groups = groups
        self._student = student
        self._batches = batches
        self._record = dict(record)
        self._counts = counts
        self._parts = {"faults": counts, **(parts or {})}
        self._learned = learned
        self._folder = plan.run_dir / CHECKPOINTS
        self._failed_in_a_row = 0
        self._writer = CheckpointWriter(
            self._folder,
            groups=groups,
            keep=plan.keep,
            is_async=plan.is_async,
            timeout_s=plan.timeout_s,
            files=_files(plan),
        )

    def load(self) -> int:
        """Load the newest checkpoint of the run, if any; iterations done.

        Raises:
            CheckpointError: It is not whole, or of another model.
            ConfigError: It is of other data.
        """
        checkpoint = latest_checkpoint(self._folder)
        run_dir = self._plan.run_dir
        if checkpoint is None:
            self._groups.on_main(lambda: forget_refused(run_dir, last_iteration=0))
            return 0
        common = load_common(checkpoint)
        iteration = int(common["iteration"])
        wanted = self._student.sharded_state(is_loading=True)
        if can_load(common, self._groups):
            wanted |= sharded_random_state(self._groups)
        state = load_checkpoint(checkpoint, wanted)
        self._student.load_state(state)
        self._batches.load_state(common["data"])
        for name, part in self._parts.items():
            if name in common:
                part.load_state_dict(common[name])
        if KEY in state:
            load_random_state(state[KEY])
        else:
            seed_random_state(self._plan.seed, iteration=iteration, groups=self._groups)
        self._groups.on_main(lambda: forget_refused(run_dir, last_iteration=iteration))
        return iteration

    def save(self, iteration: int, *, is_last: bool) -> None:
        """Save; a save that fails is tried again when the next one is due, unless it is the last.

        Raises:
            CheckpointError: The last one, or the third in a row, could not be written.
        """
        rank_phase.enter("saving")
        self._attempt(self._writer.finish)
        state = {
            **self._student.sharded_state(),
            **sharded_random_state(self._groups),
            "iteration": iteration,
            "data": self._data_state(),
            "run": self._record,
            **{name: part.state_dict() for name, part in self._parts.items()},
        }
        self._attempt(lambda: self._write(iteration, state), is_last=is_last)
        if is_last:
            self._attempt(self._writer.finish, is_last=True)

    def _write(self, iteration: int, state: dict[str, Any]) -> bool:
        """The learned projections, of which the checkpoint gets a copy, and the checkpoint."""
        if self._learned is not None:
            try:
                self._groups.on_main(self._learned.write)
            except ProjectionError as error:
                raise CheckpointError(str(error)) from error
        return self._writer.save(iteration, state)

    def poll(self) -> None:
        """End a save in the background once all ranks have written it; as ``save``."""
        self._attempt(self._writer.poll)

    def finish(self) -> None:
        """Wait for a save in the background; as ``save``.

        For errors that all ranks have alike: what was saved before is good.
        """
        self._attempt(self._writer.finish)

    def abandon(self) -> None:
        """Give up a save in the background, on this rank alone."""
        self._writer.abandon()

    def _attempt(self, action: Callable[[], bool], *, is_last: bool = False) -> None:
        """Do something that ends a save, or none; a failure that may be made good is a warning."""
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

    def _data_state(self) -> dict[str, Any]:
        """Where the data goes on, under any layout; one all-gather of objects over ``dp``."""
        everywhere: list[Any] = [None] * self._groups.dp_size
        dist.all_gather_object(everywhere, self._batches.positions(), group=self._groups.dp)
        return self._batches.state(everywhere)


def _files(plan: CheckpointPlan) -> Sequence[Path]:
    """What belongs to every checkpoint besides its state: tokenizer, projections, HuggingFace's."""
    run_dir = plan.run_dir
    own = sorted(run_dir.glob(f"{Path(PROJECTION_FILE).stem}*.safetensors"))
    learned = [run_dir / learned_projection_file(name) for name in plan.learners]
    return (run_dir / TOKENIZER_FOLDER, run_dir / SIDE_FOLDER, *own, *plan.projections, *learned)
