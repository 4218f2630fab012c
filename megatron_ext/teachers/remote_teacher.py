"""A teacher in other processes, on the student's ranks.

B rows, T positions, S own, V vocabulary, Vp partition, D hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist

from megatron_ext.distributed.context_parallel import ContextRank
from megatron_ext.distributed.process_groups import ProcessGroups
from megatron_ext.distributed.vocab_parallel import VocabShard
from megatron_ext.losses.targets import TeacherTargets
from megatron_ext.teachers.base import Teacher, TokenInputs, TokenRows
from megatron_ext.teachers.formed_targets import Fields
from megatron_ext.teachers.messages import empty_fields
from megatron_ext.teachers.target_form import TargetForm

if TYPE_CHECKING:
    # A run without such a teacher loads no transport.
    from megatron_ext.teachers.connection import Connection


class _Asked(NamedTuple):
    """A request whose answer is not taken yet."""

    first: TokenRows
    """Of its first microbatch, wherever that has been moved; held, so that no other can be taken
    for it."""

    numbers: Sequence[int]
    """Of each replica's part of it."""


class RemoteTeacher:
    """Asks, ahead of use, and gives what comes to the ranks of the last stage; a ``Teacher``.

    Args:
        replicas: Those that the main rank of each of the student's replicas (``is_replica_main``)
            asks; none on the others.
        form: Of what they send.
        shard: This rank's columns of the teacher's vocabulary, as a model of it would be cut.
        groups: The student's.
        last_stage: The tensor- and context-parallel group of this rank
            (``parallel_state.get_tensor_and_context_parallel_group``).
        dtype: Of the head and the hidden states where they are read: the run's.
        prefetch: Global batches that it is asked for ahead.
        finish: Tells its processes that the student needs them no more.
        end: Ends its processes, where the student's rank has started any.

    Collectives of the constructor: for ``hidden`` one broadcast over ``last_stage`` for each of
    its tensor-parallel ranks, on the last stage.

    Raises:
        DistributedError: The teacher is gone.
    """

    def __init__(
        self,
        replicas: Sequence[Connection],
        *,
        form: TargetForm,
        shard: VocabShard,
        groups: ProcessGroups,
        last_stage: dist.ProcessGroup,
        dtype: torch.dtype,
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
        self._last_stage = last_stage
        self._dtype = dtype
        self._finish = finish
        self._end = end
        self._asked: list[_Asked] = []
        self._asked_iteration = 0
        is_hidden = form.kind == "hidden" and groups.is_last_stage
        self._head = self._own_head() if is_hidden else None

    @property
    def waited_s(self) -> float:
        """How long the main rank has waited for answers; 0 elsewhere."""
        return sum(replica.waited_s for replica in self._replicas)

    @property
    def received_bytes(self) -> int:
        """What the main rank has received; 0 elsewhere."""
        return sum(replica.received_bytes for replica in self._replicas)

    @property
    def received_tokens(self) -> int:
        """Positions whose targets the main rank has received; 0 elsewhere."""
        return sum(replica.received_tokens for replica in self._replicas)

    def ask_ahead(self, batches: Sequence[tuple[int, Sequence[TokenInputs]]]) -> None:
        """Ask for what was not asked for, at most ``prefetch`` global batches ahead.

        Only the main rank of a replica does something. No collectives.

        Args:
            batches: Iteration and microbatches of the global batch that is trained on next, and of
                those behind it.

        Raises:
            DistributedError: The teacher is gone.
        """
        for iteration, microbatches in batches[: 1 + self.prefetch] if self.prefetch else ():
            if iteration > self._asked_iteration:
                self.ask(microbatches)
                self._asked_iteration = iteration

    def ask(self, microbatches: Sequence[TokenInputs]) -> None:
        """Ask for the targets of microbatches that ``targets`` will be called with later.

        Contiguous parts of them go to the teacher's replicas, as equal as they can be.

        Raises:
            DistributedError: The teacher is gone.
        """
        if not self._replicas:
            return
        rows, count = [_whole(batch) for batch in microbatches], len(self._replicas)
        bounds = [len(rows) * index // count for index in range(count + 1)]
        numbers = [
            replica.ask(rows[start:stop])
            for replica, start, stop in zip(self._replicas, bounds, bounds[1:], strict=False)
        ]
        self._asked.append(_Asked(rows[0], numbers))

    def targets(self, microbatches: Sequence[TokenInputs]) -> list[TeacherTargets]:
        """Targets of each microbatch; see ``Teacher``. What was not asked for is asked for now.

        Collectives, on the last stage: for each microbatch one broadcast over its tensor- and
        context-parallel ranks a field of the form, where there are several.

        Raises:
            DistributedError: The teacher is gone, or does not answer.
        """
        if not self._groups.is_last_stage:
            return []
        found: list[Fields | None] = [None] * len(microbatches)
        if self._replicas:
            found[:] = self._answers(microbatches)
        return [
            self._targets(_whole(batch), fields)
            for batch, fields in zip(microbatches, found, strict=True)
        ]

    def close(self, *, is_finished: bool) -> None:
        """Leave the teacher.

        Args:
            is_finished: Whether the run has ended well.
        """
        with ExitStack() as stack:
            stack.callback(self._end)
            for replica in self._replicas:
                stack.callback(replica.close)
            if is_finished:
                self._finish()

    def _answers(self, microbatches: Sequence[TokenInputs]) -> list[Fields]:
        places = (at for at, its in enumerate(self._asked) if its.first is microbatches[0].rows)
        place = next(places, None)
        if place is None:
            self.ask(microbatches)
            place = len(self._asked) - 1
        numbers = self._asked.pop(place).numbers
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
        kept: dict[str, Any] = {}
        for name, values in fields.items():
            self._broadcast(values)
            kept[name] = values if context is None else context.cut(values)
        if self._head is not None:
            kept |= {"hidden": kept["hidden"].to(self._dtype), "head_weight": self._head}
        if "topk_logits" in kept:
            kept["topk_logits"] = kept["topk_logits"].float()
        return TeacherTargets(kind=self._form.kind, shard=self._shard, **kept)

    def _own_head(self) -> torch.Tensor:
        """[Vp, D] this rank's rows of the head, zeros for padding."""
        head = self._replicas[0].head() if self._replicas else None
        width, vocab_size = self._shard.width, self._form.vocab_size
        own = None
        for start in range(0, width * self._groups.tp.size(), width):
            part = torch.zeros(
                width, self._form.count, dtype=self._dtype, device=self._groups.device
            )
            if head is not None and start < vocab_size:
                rows = head[start : start + width]
                part[: len(rows)] = rows.to(part)
            self._broadcast(part)
            if start == self._shard.start:
                own = part
        assert own is not None
        return own

    def _broadcast(self, values: torch.Tensor) -> None:
        """From the main rank to those that share its stage; in place."""
        if self._last_stage.size() > 1:
            main = dist.get_process_group_ranks(self._last_stage)[0]
            dist.broadcast(values, src=main, group=self._last_stage)


def _whole(batch: TokenInputs) -> TokenRows:
    assert batch.rows is not None, "batches of a run have their rows"
    return batch.rows


def remote_teachers(teachers: Mapping[str, Teacher]) -> dict[str, RemoteTeacher]:
    """Those of a run that are remote, by name."""
    return {name: its for name, its in teachers.items() if isinstance(its, RemoteTeacher)}


def leave(teachers: Mapping[str, RemoteTeacher], *, is_finished: bool) -> None:
    """Close all of them.

    Collectives: one barrier where there are any and the run has ended well, so that no replica's
    leaving looks to a teacher as if all had left.
    """
    if teachers and is_finished:
        dist.barrier()
    for teacher in teachers.values():
        teacher.close(is_finished=is_finished)
