"""A teacher elsewhere, on the student's ranks.

B rows, T positions, S own, V vocabulary, Vp partition, D hidden.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from megatron_ext.distributed.context_parallel import ContextRank
from megatron_ext.distributed.process_groups import ProcessGroups
from megatron_ext.distributed.vocab_parallel import VocabShard
from megatron_ext.losses.targets import TeacherTargets
from megatron_ext.teachers.base import TokenInputs
from megatron_ext.teachers.serving.payload import Fields, empty_fields
from megatron_ext.teachers.serving.teacher_client import TeacherClient
from megatron_ext.teachers.targets.form import TargetForm
from megatron_ext.teachers.token_rows import TokenRows


class _Asked(NamedTuple):
    """A request whose answer is not taken yet."""

    first: TokenRows
    """Of its first microbatch, wherever that has been moved; held, so that no other can be taken
    for it."""

    number: int


class RemoteTeacher:
    """Asks, ahead where it is told to, and gives what comes to the ranks of the last stage.

    Args:
        client: On the main rank of each replica (``is_replica_main``), None on the others.
        form: Of what the client receives.
        shard: This rank's columns of the teacher's vocabulary, as a model of it would be cut.
        groups: The student's.
        last_stage: The tensor- and context-parallel group of this rank
            (``parallel_state.get_tensor_and_context_parallel_group``).
        dtype: Of the head and the hidden states where they are read: the run's.

    Collectives of the constructor: for ``hidden`` one broadcast over ``last_stage`` for each of
    its tensor-parallel ranks, on the last stage.

    Raises:
        DistributedError: The teacher is gone.
    """

    def __init__(
        self,
        client: TeacherClient | None,
        *,
        form: TargetForm,
        shard: VocabShard,
        groups: ProcessGroups,
        last_stage: dist.ProcessGroup,
        dtype: torch.dtype,
    ) -> None:
        assert (client is not None) == groups.is_replica_main
        self._client = client
        self._form = form
        self._shard = shard
        self._groups = groups
        self._last_stage = last_stage
        self._dtype = dtype
        self._asked: list[_Asked] = []
        is_hidden = form.kind == "hidden" and groups.is_last_stage
        self._head = self._own_head() if is_hidden else None

    @property
    def waited_s(self) -> float:
        """How long the main rank has waited for answers; 0 elsewhere."""
        return self._client.waited_s if self._client else 0.0

    @property
    def received_bytes(self) -> int:
        """What the main rank has received; 0 elsewhere."""
        return self._client.received_bytes if self._client else 0

    @property
    def received_tokens(self) -> int:
        """Positions whose targets the main rank has received; 0 elsewhere."""
        return self._client.received_tokens if self._client else 0

    def ask(self, microbatches: Sequence[TokenInputs]) -> None:
        """Ask for the targets of microbatches that ``targets`` will be called with later.

        Only the main rank of a replica does something. No collectives.

        Raises:
            DistributedError: The teacher is gone.
        """
        if self._client is not None:
            number = self._client.ask([_whole(batch) for batch in microbatches])
            self._asked.append(_Asked(_whole(microbatches[0]), number))

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
        if self._client is not None:
            found[:] = self._client.answer(self._number_of(microbatches))
        return [
            self._targets(_whole(batch), fields)
            for batch, fields in zip(microbatches, found, strict=True)
        ]

    def close(self) -> None:
        """Leave the teacher."""
        if self._client is not None:
            self._client.close()

    def _number_of(self, microbatches: Sequence[TokenInputs]) -> int:
        for place, asked in enumerate(self._asked):
            if asked.first is microbatches[0].rows:
                del self._asked[place]
                return asked.number
        self.ask(microbatches)
        return self._asked.pop().number

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
        head = self._client.head() if self._client else None
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
