"""Objectives over chunks of sequences that are cut over context-parallel ranks.

Student and teacher are cut by their own tokens, so a chunk's rows can lie on several ranks, and the
teacher's on others than the student's. Each chunk gets one owner, the rank of its first student
row. Rows that an owner lacks are sent to it; all others stay where they are. Every rank then calls
the objective on its own chunks, and sums and counts are added over the context-parallel group as
they are over data-parallel replicas.

This is right for objectives that are a sum over chunks, each of which depends on its rows and the
row after them. It is wrong for ``alm`` that merges chunks, since a group can span two owners, and
for ``numerics="nemo"``, which chooses columns for a microbatch. Objectives over tokens
(``next_token``, ``vocab_kl``) need no exchange: call them on the slices.

B batch, Ts Tt tokens of whole sequences, C chunks, C' of them owned, M rows after the exchange.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from megatron_ext.alignment.batch import AlignmentBatch
from megatron_ext.constants import IGNORE_INDEX, NO_CHUNK, ON_HOST
from megatron_ext.distributed.context_parallel import (
    BLANK_ROW,
    RowExchange,
    SequenceLayout,
    exchange_rows,
)
from megatron_ext.errors import LossError
from megatron_ext.losses.base import DistillationInputs
from megatron_ext.losses.targets import TeacherTargets

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

Ids = NDArray[np.int64]

_TEACHER_ROWS = (
    "logits",
    "hidden",
    "topk_ids",
    "topk_logits",
    "log_normaliser",
    "label_log_probs",
    "boundary_log_probs",
    "stop_marks",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextParallelPlan:
    """Chunks of one microbatch that a rank owns, and the rows it sends and receives for them."""

    alignment: AlignmentBatch
    """The owned chunks, numbered from 0, over rows [1, M]: those of the chunks and the one after
    each, in the order of the whole sequences. A blank row follows a chunk that nothing follows."""

    chunks: torch.Tensor
    """[C'] int64: numbers of the owned chunks in the whole alignment, ascending."""

    student: RowExchange
    teacher: RowExchange

    student_rows: torch.Tensor = field(metadata=ON_HOST)
    """[M] int64: index of each row in the flattened whole sequences; ``BLANK_ROW`` a blank one."""

    teacher_rows: torch.Tensor = field(metadata=ON_HOST)
    """[M] int64"""

    @classmethod
    def from_alignment(
        cls,
        alignment: AlignmentBatch,
        *,
        student: SequenceLayout,
        teacher: SequenceLayout,
        rank: int,
        group: ProcessGroup | None,
    ) -> ContextParallelPlan:
        """Plan one microbatch on the host. No collectives: every rank knows the whole alignment.

        Args:
            alignment: Of whole sequences, the same on every rank, on the CPU.
            student: Cut of the student's sequences.
            teacher: Cut of the teacher's.
            rank: This rank in ``group``.
            group: The context-parallel group; None for one rank.

        Raises:
            LossError: Sequences that do not divide into the layout's slices.
        """
        sides = [
            (ids.numpy().reshape(-1), spans.numpy(), _bounds(ids, cu_seqlens), layout)
            for ids, spans, cu_seqlens, layout in (
                (
                    alignment.student_chunk_id,
                    alignment.student_spans,
                    alignment.student_cu_seqlens,
                    student,
                ),
                (
                    alignment.teacher_chunk_id,
                    alignment.teacher_spans,
                    alignment.teacher_cu_seqlens,
                    teacher,
                ),
            )
        ]
        holders = [layout.holders(bounds) for _, _, bounds, layout in sides]
        owner = holders[0][sides[0][1][:, 0]]
        chunks = np.flatnonzero(owner == rank)
        number = np.full(len(owner) + 1, NO_CHUNK, dtype=np.int64)
        number[chunks] = np.arange(len(chunks))
        exchanges, local_ids, local_bounds, needed_rows = [], [], [], []
        for holder, (ids, spans, bounds, _) in zip(holders, sides, strict=True):
            needed = [
                _needed_rows(ids, spans, bounds, owner == peer) for peer in range(student.size)
            ]
            exchanges.append(RowExchange.plan(holder, needed, rank=rank, group=group))
            needed_rows.append(needed[rank])
            rows, is_blank = needed[rank], needed[rank] == BLANK_ROW
            # The last entry of ``number`` is for NO_CHUNK.
            local_ids.append(np.where(is_blank, NO_CHUNK, number[ids[rows]])[None])
            local_bounds.append(_local_bounds(rows, bounds))
        return cls(
            alignment=AlignmentBatch.from_chunk_ids(
                torch.from_numpy(local_ids[0]),
                torch.from_numpy(local_ids[1]),
                is_exact=alignment.is_exact[torch.from_numpy(chunks)],
                student_cu_seqlens=torch.from_numpy(local_bounds[0]),
                teacher_cu_seqlens=torch.from_numpy(local_bounds[1]),
            ),
            chunks=torch.from_numpy(chunks),
            student=exchanges[0],
            teacher=exchanges[1],
            student_rows=torch.from_numpy(needed_rows[0]),
            teacher_rows=torch.from_numpy(needed_rows[1]),
        )

    def labels(
        self, student: torch.Tensor, teacher: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Labels [1, M] of the plan's rows, from those of whole sequences [B, T]; on the host.

        ``completions`` of ``inputs`` are made from them and ``alignment``.
        """
        return _picked(student, self.student_rows), _picked(teacher, self.teacher_rows)

    def to(self, device: torch.device | str) -> ContextParallelPlan:
        """The same plan on ``device``; row numbers stay on the host."""
        return ContextParallelPlan(
            alignment=self.alignment.to(device),
            chunks=self.chunks.to(device, non_blocking=True),
            student=self.student.to(device),
            teacher=self.teacher.to(device),
            student_rows=self.student_rows,
            teacher_rows=self.teacher_rows,
        )

    def inputs(self, slices: DistillationInputs) -> DistillationInputs:
        """Inputs of this rank's chunks, to call an objective with.

        Args:
            slices: Rows that this rank holds, [B, T of one rank] of the student and of the teacher,
                in the order of their layouts. Tensors [C], as ``chunk_mask``, are of all chunks;
                ``completions`` are those of the plan's alignment and labels. ``alignment`` is
                ignored.

        Returns:
            Rows [1, M] of the plan's alignment. A row after a chunk can also be on another rank, so
            an objective over tokens must not be called with them.

            One all-to-all for each tensor of rows, over the context-parallel group, which
            sends only rows of chunks that lie on several ranks: ``Vp`` or ``D`` elements a row.
            Backward: one for the student's logits, and one for its hidden states of each layer. The
            student's logits of this rank are copied once.

        Raises:
            LossError: Rows that are not those of the plan, or completions of another alignment.
        """
        _check_rows("student", slices.labels.shape, len(self.student.target))
        teacher = slices.teacher
        if teacher is not None:
            _check_rows("teacher", teacher.positions, len(self.teacher.target))
        chunks = self.alignment.chunk_count
        if slices.completions is not None and slices.completions.chunk_count != chunks:
            raise LossError(
                "completions are not those of the context-parallel plan's chunks",
                got=f"{slices.completions.chunk_count} chunks",
                expected=f"{chunks}",
                fix="make them of plan.alignment and plan.labels(...)",
            )
        return replace(
            slices,
            alignment=self.alignment,
            student_logits=_moved(slices.student_logits, self.student),
            labels=_moved_labels(slices.labels, self.student),
            student_hidden=_moved_if(slices.student_hidden, self.student),
            student_states=_moved_states(slices.student_states, self.student),
            teacher=None if teacher is None else self._teacher_rows(teacher),
            sampled_log_probs=None
            if slices.sampled_log_probs is None
            else _moved(slices.sampled_log_probs[..., None], self.student)[..., 0],
            teacher_labels=None
            if slices.teacher_labels is None
            else _moved_labels(slices.teacher_labels, self.teacher),
            **{
                name: getattr(slices, name)[self.chunks]
                for name in ("chunk_mask", "chunk_text_class", "chunk_script")
                if getattr(slices, name) is not None
            },
        )

    def _teacher_rows(self, teacher: TeacherTargets) -> TeacherTargets:
        rows: dict[str, Any] = {
            name: _moved_if(getattr(teacher, name), self.teacher) for name in _TEACHER_ROWS
        }
        return replace(teacher, states=_moved_states(teacher.states, self.teacher), **rows)


def _bounds(chunk_id: torch.Tensor, cu_seqlens: torch.Tensor | None) -> Ids:
    """Starts [B + 1] of the sequences in the flattened rows, and the end."""
    if cu_seqlens is not None:
        return cu_seqlens.numpy().astype(np.int64)
    return np.arange(chunk_id.shape[0] + 1, dtype=np.int64) * chunk_id.shape[1]


def _needed_rows(ids: Ids, spans: Ids, bounds: Ids, is_owned: NDArray[np.bool_]) -> Ids:
    """Rows of the owned chunks and the row after each, blank where its sequence ends."""
    # The last entry is for NO_CHUNK.
    is_needed = np.append(is_owned, False)[ids]
    after = spans[is_owned, 1]
    is_end = np.isin(after, bounds)
    is_needed[after[~is_end]] = True
    rows = np.flatnonzero(is_needed)
    return np.insert(rows, np.searchsorted(rows, np.unique(after[is_end])), BLANK_ROW)


def _local_bounds(rows: Ids, bounds: Ids) -> NDArray[np.int32]:
    """Starts [B + 1] of the sequences among the rows that a rank needs, and the end."""
    # A blank row belongs to the sequence of the row before it.
    filled = np.where(rows == BLANK_ROW, np.roll(rows, 1), rows)
    return np.searchsorted(filled, bounds).astype(np.int32)


def _moved(x: torch.Tensor, exchange: RowExchange) -> torch.Tensor:
    """[B, T, ...] to [1, M, ...]."""
    return exchange_rows(x.flatten(0, 1), exchange)[None]


def _moved_if(x: torch.Tensor | None, exchange: RowExchange) -> torch.Tensor | None:
    return None if x is None else _moved(x, exchange)


def _moved_states(
    states: Mapping[int, torch.Tensor], exchange: RowExchange
) -> dict[int, torch.Tensor]:
    """States by layer, in one order on every rank."""
    return {layer: _moved(states[layer], exchange) for layer in sorted(states)}


def _moved_labels(labels: torch.Tensor, exchange: RowExchange) -> torch.Tensor:
    return _moved(labels, exchange).index_fill_(1, exchange.blank, IGNORE_INDEX)


def _picked(labels: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    picked = labels.flatten()[rows.clamp(min=0)]
    return torch.where(rows == BLANK_ROW, IGNORE_INDEX, picked)[None]


def _check_rows(side: str, shape: torch.Size, expected: int) -> None:
    if len(shape) != 2 or shape[0] * shape[1] != expected:
        raise LossError(
            f"the {side}'s rows are not those of the context-parallel plan",
            got=f"{tuple(shape)} [B, T of one rank]",
            expected=f"{expected} rows",
        )
