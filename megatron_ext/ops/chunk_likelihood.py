"""Likelihoods of chunks from those of their rows. T rows, each of one chunk or none; C chunks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import torch
from torch.autograd.function import once_differentiable

from megatron_ext.ops.chunk_rows import ChunkRows, chunk_slots, index_sum
from megatron_ext.ops.launch import Implementation, small_block, uses_triton

_BLOCK: Final = 128
"""Chunks, or rows, of a program."""


class PlaceAfter(NamedTuple):
    """Row after each chunk [C]; an arbitrary row where there is none."""

    row: torch.Tensor
    exists: torch.Tensor


class ChunkedLabels(NamedTuple):
    """Labels of one side's rows, and where its chunks are among them."""

    rows: ChunkRows

    spans: torch.Tensor
    """int64 [C, 2]: first row of each chunk and one past its last."""

    labels: torch.Tensor
    """int64 [B, L], T in all: the token that each row predicts, negative for none."""

    given: torch.Tensor | None = None
    """int64 [C]: row behind each chunk, -1 for none. None: the next one, if it is of the same
    sequence and has a label."""

    def after(self) -> PlaceAfter:
        """Rows behind the chunks, no two of which have the same."""
        if self.given is not None:
            return PlaceAfter(self.given.clamp(min=0), self.given >= 0)
        within = self.spans[:, 1] % self.labels.shape[1] != 0
        row = torch.where(within, self.spans[:, 1], 0)
        return PlaceAfter(row, within & (self.labels.flatten()[row] >= 0))


class RowLikelihoods(NamedTuple):
    """One model's log-probabilities [T], of one float dtype for both models."""

    log_prob: torch.Tensor
    """Of each row's label."""

    log_mass: torch.Tensor
    """Of any boundary token."""


class ChunkLikelihoods(NamedTuple):
    """Likelihoods [C], the same on every rank; the student's have a graph.

    Numbers of chunks that are not usable are arbitrary, but their rows, NaN included, reach no
    other chunk.
    """

    student: torch.Tensor
    """Sum of the log-probabilities of the chunk's student tokens."""

    teacher: torch.Tensor

    student_boundary: torch.Tensor
    """Log-probability that a boundary token follows, 0 where ``follows`` is False."""

    teacher_boundary: torch.Tensor

    follows: torch.Tensor
    """bool: both models predict the position after the chunk."""

    usable: torch.Tensor
    """bool: the chunk counts, and each of its positions has a label."""


def chunk_likelihoods(
    likelihoods: tuple[RowLikelihoods, RowLikelihoods],
    places: tuple[ChunkedLabels, ChunkedLabels],
    counted: torch.Tensor | None,
    *,
    implementation: Implementation = "auto",
) -> ChunkLikelihoods:
    """Add up the likelihoods of each chunk's rows, student's and teacher's, in their order.

    No collectives. By kernel one launch, and two in the backward.

    Args:
        counted: bool [C], chunks that count; None: all.
    """
    student, teacher = likelihoods
    if student.log_prob.dtype == torch.float32 and uses_triton(implementation, *student, *teacher):
        return ChunkLikelihoods(*_ByKernel.apply(*student, *teacher, places, counted))
    count = places[0].rows.chunk_count
    usable = labelled_chunks(
        [side.labels.flatten() for side in places], [side.rows.chunk_id for side in places], count
    )
    if counted is not None:
        usable = usable & counted
    behind = [side.after() for side in places]
    follows = usable & behind[0].exists & behind[1].exists
    sums = [
        _sum_rows(its.log_prob, side.rows.chunk_id, count)
        for its, side in zip(likelihoods, places, strict=True)
    ]
    boundaries = [
        torch.where(follows, its.log_mass[place.row], 0.0)
        for its, place in zip(likelihoods, behind, strict=True)
    ]
    return ChunkLikelihoods(sums[0], sums[1], boundaries[0], boundaries[1], follows, usable)


class _ByKernel(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        student: torch.Tensor,
        student_mass: torch.Tensor,
        teacher: torch.Tensor,
        teacher_mass: torch.Tensor,
        places: tuple[ChunkedLabels, ChunkedLabels],
        counted: torch.Tensor | None,
    ) -> tuple[torch.Tensor, ...]:
        from megatron_ext.ops.likelihood_kernels import chunk_likelihoods_kernel

        count = places[0].rows.chunk_count
        numbers, behind = student.new_empty(4, count), places[0].spans.new_empty(count)
        flags = torch.empty(2, count, dtype=torch.bool, device=student.device)
        block = small_block(count, _BLOCK)
        if count:
            chunk_likelihoods_kernel[(-(-count // block),)](
                *_arguments(student, student_mass, places[0]),
                *_arguments(teacher, teacher_mass, places[1]),
                counted,
                count,
                numbers,
                behind,
                flags,
                BLOCK=block,
            )
        ctx.save_for_backward(places[0].rows.chunk_id, behind)
        sums, masses = numbers.split(2)
        follows, usable = flags.unbind()
        (own, its), (own_mass, its_mass) = sums.unbind(), masses.unbind()
        ctx.mark_non_differentiable(its, its_mass, follows, usable)
        ctx.set_materialize_grads(False)
        return own, its, own_mass, its_mass, follows, usable

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any,
        on_chunk: torch.Tensor | None,
        _: torch.Tensor | None,
        on_boundary: torch.Tensor | None,
        *__: Any,
    ) -> tuple[torch.Tensor | None, ...]:
        from megatron_ext.ops.likelihood_kernels import chunk_likelihood_gradients_kernel

        if on_chunk is None:
            if on_boundary is None:
                return (None,) * 6
            on_chunk = torch.zeros_like(on_boundary)
        chunk_id, behind = ctx.saved_tensors
        rows, chunks = len(chunk_id), len(behind)
        on_token = on_chunk.new_empty(rows)
        on_mass = None if on_boundary is None else on_chunk.new_zeros(rows)
        block = small_block(max(rows, chunks), _BLOCK)
        if rows:
            chunk_likelihood_gradients_kernel[(-(-max(rows, chunks) // block),)](
                on_chunk.contiguous(),
                None if on_boundary is None else on_boundary.contiguous(),
                chunk_id,
                behind,
                rows,
                chunks,
                on_token,
                on_mass,
                BLOCK=block,
            )
        return on_token, on_mass, None, None, None, None


def _arguments(log_prob: torch.Tensor, log_mass: torch.Tensor, side: ChunkedLabels) -> list[Any]:
    """Arguments of a kernel for one side."""
    rows = side.rows
    return [
        log_prob.contiguous(),
        log_mass.contiguous(),
        side.labels.contiguous(),
        rows.order,
        rows.offsets,
        side.spans.contiguous(),
        side.given,
        side.labels.shape[1],
    ]


def labelled_chunks(
    labels: Sequence[torch.Tensor], chunk_ids: Sequence[torch.Tensor], count: int
) -> torch.Tensor:
    """Chunks of which every position has a label, bool [C], on all given sides ([T] each)."""
    missing = torch.zeros(count, dtype=torch.int64, device=labels[0].device)
    for side, ids in zip(labels, chunk_ids, strict=True):
        missing += _sum_rows((side < 0).to(torch.int64), ids, count)
    return missing == 0


def _sum_rows(values: torch.Tensor, chunk_id: torch.Tensor, count: int) -> torch.Tensor:
    return index_sum(values, chunk_slots(chunk_id, count), count + 1)[:-1]
