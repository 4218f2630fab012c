"""Sums over a microbatch's chunks and labels, for its loss and its metrics, and flags of bad rows.

T rows, C chunks, K columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import torch
from torch.autograd.function import once_differentiable

from megatron_ext.constants import IGNORE_INDEX, NO_CHUNK
from megatron_ext.ops.launch import Implementation, small_block, uses_triton

_BLOCK: Final = 1024
_MOST_ROWS: Final = 4096
"""Rows that a program which sums them all reads at once."""


class ClassSums(NamedTuple):
    """Sums by class of the chunks, [n] each."""

    used: torch.Tensor
    """Number of used chunks, in the dtype of the loss."""

    loss: torch.Tensor
    """Loss of the used chunks."""

    counts: torch.Tensor
    """int64: number of used chunks."""

    chunks: torch.Tensor
    """int64: number of all chunks."""


class ChunkSums(NamedTuple):
    """Sums over the used chunks, on the device."""

    loss: torch.Tensor
    """Scalar with a graph to the chunks' loss."""

    columns: torch.Tensor
    """[K] of the other columns."""

    number: torch.Tensor
    """int64 scalar: number of used chunks."""

    rows: torch.Tensor
    """int64 scalar: number of rows of the used chunks; 0 without offsets."""

    by_class: ClassSums

    kept: torch.Tensor
    """[C]: the chunks' loss without a graph, 0 of those that are not used."""


class CountedChunks(NamedTuple):
    """Which chunks are used, and what they are counted by."""

    used: torch.Tensor | None
    """bool [C]; None: all."""

    classes: torch.Tensor | None = None
    """Integers [C], from 0 below ``class_count``; None: there are no classes."""

    class_count: int = 0

    offsets: torch.Tensor | None = None
    """int32 [C + 1] of a side's rows by chunk, see ``ChunkRows``; None: none are counted."""


def chunk_sums(
    chunk_loss: torch.Tensor,
    columns: Sequence[torch.Tensor],
    chunks: CountedChunks,
    *,
    implementation: Implementation = "auto",
) -> ChunkSums:
    """Add up the chunks' loss [C] and other columns [C], of any dtype, in fp32 (fp64 for an fp64
    loss). By kernel two launches, and one more where a column is not in fp32.

    Values of chunks that are not used are ignored, NaN included. No collectives.
    """
    dtype = torch.float64 if chunk_loss.dtype == torch.float64 else torch.float32
    values = torch.stack([column.detach().to(dtype) for column in (chunk_loss, *columns)])
    by = _by_kernel if uses_triton(implementation, values) else _by_torch
    loss, *others = _ChunkSums.apply(chunk_loss, values, chunks, by)
    sums, count, rows, kept, *by_class = others
    return ChunkSums(loss, sums, count, rows, ClassSums(*by_class), kept)


class _ChunkSums(torch.autograd.Function):
    """Of the values, which hold the loss without a graph; its gradient is that of its sum."""

    @staticmethod
    def forward(
        ctx: Any, chunk_loss: torch.Tensor, values: torch.Tensor, chunks: CountedChunks, by: Any
    ) -> tuple[torch.Tensor, ...]:
        sums = by(values, chunks)
        ctx.save_for_backward(chunks.used)
        ctx.count, ctx.dtype = len(chunk_loss), chunk_loss.dtype
        out = (sums.loss, sums.columns, sums.number, sums.rows, sums.kept, *sums.by_class)
        ctx.mark_non_differentiable(*out[1:])
        # Else each of them gets a gradient of zeros.
        ctx.set_materialize_grads(False)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor | None, *_: Any) -> tuple[torch.Tensor | None, ...]:
        if grad is None:
            return None, None, None, None
        (used,) = ctx.saved_tensors
        of_chunks = grad.to(ctx.dtype).expand(ctx.count)
        if used is not None:
            of_chunks = of_chunks.masked_fill(~used, 0.0)
        return of_chunks, None, None, None


def _by_torch(values: torch.Tensor, chunks: CountedChunks) -> ChunkSums:
    used, device = chunks.used, values.device
    if used is None:
        used = torch.ones(values.shape[1], dtype=torch.bool, device=device)
    kept = values.where(used, 0.0)
    sums = kept.sum(dim=1)
    numbers = torch.arange(chunks.class_count, device=device)[:, None]
    is_member = numbers == (values[0] if chunks.classes is None else chunks.classes)
    counted = is_member & used
    counts = counted.sum(dim=1)
    by_class = ClassSums(
        counts.to(values.dtype),
        # A loss of NaN is that of its own class alone.
        values[0].where(counted, 0.0).sum(dim=1),
        counts,
        is_member.sum(dim=1),
    )
    rows = torch.zeros((), dtype=torch.int64, device=device)
    if chunks.offsets is not None:
        rows = chunks.offsets.diff().where(used, 0).sum()
    return ChunkSums(sums[0], sums[1:], used.sum(), rows, by_class, kept[0])


def _by_kernel(values: torch.Tensor, chunks: CountedChunks) -> ChunkSums:
    from megatron_ext.ops.sum_kernels import chunk_sums_kernel

    (columns, count), classes = values.shape, chunks.class_count
    sums = values.new_empty(columns + 2 * classes)
    counts = values.new_empty(2 + 2 * classes, dtype=torch.int64)
    kept = values[0] if chunks.used is None else torch.empty_like(values[0])
    chunk_sums_kernel[(columns + 1 + classes,)](
        values,
        chunks.used,
        chunks.classes,
        chunks.offsets,
        count,
        sums,
        counts,
        kept,
        HAS_USED=chunks.used is not None,
        HAS_ROWS=chunks.offsets is not None,
        COLUMNS=columns,
        CLASSES=classes,
        BLOCK=small_block(count, _BLOCK),
    )
    of_columns, used, loss = sums.split([columns, classes, classes])
    (used_count, rows), of_used, of_all = counts.split([2, classes, classes])
    by_class = ClassSums(used, loss, of_used, of_all)
    return ChunkSums(of_columns[0], of_columns[1:], used_count, rows, by_class, kept)


class LabelSums(NamedTuple):
    """Scalars of all rows, on the device."""

    loss: torch.Tensor

    hits: torch.Tensor
    """Number of rows whose label is the largest logit, in the dtype of the loss."""

    number: torch.Tensor
    """int64: number of labels."""


def label_sums(
    row_loss: torch.Tensor,
    top_column: torch.Tensor,
    labels: torch.Tensor,
    *,
    implementation: Implementation = "auto",
) -> LabelSums:
    """Add up the loss of labels, their number and that of hits; by kernel one launch. No graph.

    Args:
        row_loss: [T], 0 where there is no label.
        top_column: int64 [T] of each row's largest logit.
        labels: int64 [T], ``IGNORE_INDEX`` where there is none.
    """
    if not uses_triton(implementation, row_loss):
        # No column is ``IGNORE_INDEX``.
        hits = (top_column == labels).sum(dtype=row_loss.dtype)
        return LabelSums(row_loss.sum(), hits, (labels != IGNORE_INDEX).sum())
    from megatron_ext.ops.sum_kernels import label_sums_kernel

    rows = len(labels)
    sums = row_loss.new_empty(2, dtype=torch.float32)
    count = labels.new_empty((), dtype=torch.int64)
    label_sums_kernel[(1,)](
        row_loss,
        top_column,
        labels,
        rows,
        sums,
        count,
        NO_LABEL=IGNORE_INDEX,
        BLOCK=small_block(rows, _MOST_ROWS),
        num_warps=8,
    )
    return LabelSums(sums[0], sums[1], count)


class ReadRows(NamedTuple):
    """One model's rows: what tells of bad numbers in them, and which of them are read."""

    told: torch.Tensor
    """[T]: bool, True where a row has bad numbers; or sums of rows, NaN where it has."""

    labels: torch.Tensor | None = None
    """int64 [T]: a row with a label is read, too."""

    chunk_id: torch.Tensor | None = None
    """int64 [T]: a row of a chunk is read. All are read where both are None."""


def bad_rows(
    student: ReadRows, teacher: ReadRows, *, implementation: Implementation = "auto"
) -> torch.Tensor:
    """int32 [2]: whether a row of the student that is read has bad numbers, and of the teacher.
    By kernel one launch."""
    fits = all(side.told.dtype in (torch.bool, torch.float32) for side in (student, teacher))
    if not fits or not uses_triton(implementation, torch.empty(0, device=student.told.device)):
        found = [_is_bad(side).any() for side in (student, teacher)]
        return torch.stack(found).to(torch.int32)
    from megatron_ext.ops.sum_kernels import bad_rows_kernel

    flags = torch.empty(2, dtype=torch.int32, device=student.told.device)
    bad_rows_kernel[(2,)](
        *student,
        len(student.told),
        *teacher,
        len(teacher.told),
        flags,
        NO_LABEL=IGNORE_INDEX,
        NO_CHUNK=NO_CHUNK,
        BLOCK=small_block(max(len(student.told), len(teacher.told)), _MOST_ROWS),
        num_warps=8,
    )
    return flags


def _is_bad(side: ReadRows) -> torch.Tensor:
    """bool [T]: rows that are read, with bad numbers."""
    is_bad = side.told if side.told.dtype == torch.bool else side.told.isnan()
    masks = [] if side.labels is None else [side.labels != IGNORE_INDEX]
    if side.chunk_id is not None:
        masks.append(side.chunk_id != NO_CHUNK)
    return is_bad & torch.stack(masks).any(dim=0) if masks else is_bad
