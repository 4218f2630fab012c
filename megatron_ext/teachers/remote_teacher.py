"""``RemoteTeacher``: a ``Teacher`` that runs in other processes.

B rows, T positions, S those of this rank, V vocabulary, Vp partition, D hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Protocol

import torch
import torch.distributed as dist

from megatron_ext.distributed.context_parallel import ContextRank
from megatron_ext.distributed.process_groups import ProcessGroups
from megatron_ext.distributed.vocab_parallel import VocabShard
from megatron_ext.losses.targets import TeacherTargets
from megatron_ext.teachers.base import Teacher, TokenInputs, TokenRows, whole_rows
from megatron_ext.teachers.formed_targets import Fields, as_targets
from megatron_ext.teachers.messages import empty_fields
from megatron_ext.teachers.target_form import TargetForm


class Replica(Protocol):
    """A connection to one replica of a remote teacher; see ``Connection``."""

    waited_s: float
    received_bytes: int
    received_tokens: int

    def ask(self, rows: Sequence[TokenRows]) -> int: ...
    def answer(self, number: int) -> list[Fields]: ...
    def head(self) -> torch.Tensor: ...
    def close(self) -> None: ...


class RemoteTeacher:
    """A ``Teacher`` that requests targets ahead of use and broadcasts them on the last stage.

    Args:
        replicas: Connections of this student replica's main rank (``is_replica_main``); none on
            other ranks.
        form: Form of the targets.
        shard: This rank's columns of the teacher's vocabulary, sharded like a local teacher's.
        groups: The student's process groups.
        dtype: dtype of head and hidden states in the student: the run's.
        prefetch: Global batches requested ahead.
        finish: Callback that tells the teacher's processes that the run has ended well.
        end: Callback that ends the teacher's processes that this rank has started.

    Collectives of the constructor: on the last stage, for ``hidden``, one broadcast over ``tp_cp``
    for each tensor-parallel rank.

    Raises:
        DistributedError: The teacher is gone.
    """

    def __init__(
        self,
        replicas: Sequence[Replica],
        *,
        form: TargetForm,
        shard: VocabShard,
        groups: ProcessGroups,
        dtype: torch.dtype,
        logit_cap: float | None = None,
        prefetch: int = 0,
        finish: Callable[[], None] = lambda: None,
        end: Callable[[], None] = lambda: None,
    ) -> None:
        assert bool(replicas) == groups.is_replica_main
        self.prefetch = prefetch
        self._replicas = list(replicas)
        self._form = form
        self._shard = shard
        self._groups = groups
        self._dtype = dtype
        self._logit_cap = logit_cap
        self._finish = finish
        self._end = end
        # Requests whose answers were not taken yet: rows of the first microbatch, which identify
        # one, and the number of each replica's part.
        self._pending: list[tuple[TokenRows, list[int]]] = []
        self._asked_iteration = 0
        is_hidden = form.kind == "hidden" and groups.is_last_stage
        self._head = self._local_head() if is_hidden else None

    @property
    def waited_s(self) -> float:
        """Seconds that the main rank has waited for answers; 0 on other ranks."""
        return sum(replica.waited_s for replica in self._replicas)

    @property
    def received_bytes(self) -> int:
        """Bytes that the main rank has received; 0 on other ranks."""
        return sum(replica.received_bytes for replica in self._replicas)

    @property
    def received_tokens(self) -> int:
        """Positions whose targets the main rank has received; 0 on other ranks."""
        return sum(replica.received_tokens for replica in self._replicas)

    def ask_ahead(self, batches: Sequence[tuple[int, Sequence[TokenInputs]]]) -> None:
        """Request targets not yet requested, at most ``prefetch`` global batches ahead.

        Does nothing except on the main rank of a replica. No collectives.

        Args:
            batches: Iteration and microbatches of the next global batches.

        Raises:
            DistributedError: The teacher is gone.
        """
        for iteration, microbatches in batches[: 1 + self.prefetch] if self.prefetch else ():
            if iteration > self._asked_iteration:
                self.ask(microbatches)
                self._asked_iteration = iteration

    def ask(self, microbatches: Sequence[TokenInputs]) -> None:
        """Request the targets of microbatches that ``targets`` will be called with later.

        Contiguous, about equal parts of them go to the teacher's replicas.

        Raises:
            DistributedError: The teacher is gone.
        """
        if not self._replicas:
            return
        rows, count = [whole_rows(batch) for batch in microbatches], len(self._replicas)
        bounds = [len(rows) * index // count for index in range(count + 1)]
        numbers = [
            replica.ask(rows[start:stop])
            for replica, start, stop in zip(self._replicas, bounds, bounds[1:], strict=False)
        ]
        self._pending.append((rows[0], numbers))

    def targets(self, microbatches: Sequence[TokenInputs]) -> list[TeacherTargets]:
        """Targets of each microbatch; see ``Teacher``. Requests them if that is still to be done.

        Collectives, on the last stage: for each microbatch and each field of the form one broadcast
        over the tensor- and context-parallel ranks, if there are several.

        Raises:
            DistributedError: The teacher is gone, or does not answer.
        """
        if not self._groups.is_last_stage:
            return []
        answers: list[Fields | None] = [None] * len(microbatches)
        if self._replicas:
            answers[:] = self._answers(microbatches)
        return [
            self._targets(whole_rows(batch), fields)
            for batch, fields in zip(microbatches, answers, strict=True)
        ]

    def close(self, *, is_finished: bool) -> None:
        """Disconnect from the teacher; ``is_finished`` if the run has ended well."""
        with ExitStack() as stack:
            stack.callback(self._end)
            for replica in self._replicas:
                stack.callback(replica.close)
            if is_finished:
                self._finish()

    def _answers(self, microbatches: Sequence[TokenInputs]) -> list[Fields]:
        first = microbatches[0].rows
        places = (at for at, (rows, _) in enumerate(self._pending) if rows is first)
        place = next(places, None)
        if place is None:
            self.ask(microbatches)
            place = len(self._pending) - 1
        _, numbers = self._pending.pop(place)
        return [
            fields
            for replica, number in zip(self._replicas, numbers, strict=True)
            for fields in replica.answer(number)
        ]

    def _targets(self, rows: TokenRows, received: Fields | None) -> TeacherTargets:
        device = self._groups.device
        if received is None:
            fields = empty_fields(self._form, rows.tokens.shape, device)
        else:
            fields = {k: v.to(device, non_blocking=True) for k, v in received.items()}
        context = ContextRank.of(self._groups.cp)
        local: dict[str, torch.Tensor] = {}
        for name, values in fields.items():
            self._broadcast(values)
            local[name] = values if context is None else context.cut(values)
        head, cap = self._head, self._logit_cap
        return as_targets(local, self._form, self._shard, head_weight=head, logit_cap=cap)

    def _local_head(self) -> torch.Tensor:
        """[Vp, D] this rank's rows of the head, zero-padded."""
        head = self._replicas[0].head() if self._replicas else None
        width, vocab_size = self._shard.width, self._form.vocab_size
        for start in range(0, width * self._groups.tp.size(), width):
            shape, device = (width, self._form.count), self._groups.device
            part = torch.zeros(shape, dtype=self._dtype, device=device)
            if head is not None and start < vocab_size:
                rows = head[start : start + width]
                part[: len(rows)] = rows.to(part)
            self._broadcast(part)
            if start == self._shard.start:
                local = part
        return local

    def _broadcast(self, values: torch.Tensor) -> None:
        """Broadcast from the main rank over the last stage, in place."""
        group = self._groups.tp_cp
        if group.size() > 1:
            dist.broadcast(values, src=dist.get_process_group_ranks(group)[0], group=group)


def remote_teachers(teachers: Mapping[str, Teacher]) -> dict[str, RemoteTeacher]:
    """The remote ones of a run's teachers, by name."""
    return {name: its for name, its in teachers.items() if isinstance(its, RemoteTeacher)}


def leave(teachers: Mapping[str, RemoteTeacher], *, is_finished: bool) -> None:
    """Disconnect from all remote teachers.

    Collectives: one barrier if there are any and the run has ended well, so that a teacher does not
    take the leaving of one replica for the leaving of all.
    """
    if teachers and is_finished:
        dist.barrier()
    for teacher in teachers.values():
        teacher.close(is_finished=is_finished)
