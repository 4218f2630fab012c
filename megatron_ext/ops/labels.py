"""Rows with a label: their columns, weights, sums and losses, and flags of rows with bad numbers.

T rows, Vp local columns.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import torch

from megatron_ext.constants import IGNORE_INDEX, NO_CHUNK
from megatron_ext.distributed.vocab_parallel import LogSumExp, VocabShard, accumulation_dtype
from megatron_ext.ops.chunk_rows import ExpSums, local_column, token_exp_sums, token_log_probs
from megatron_ext.ops.launch import Implementation, small_block, uses_triton

_BLOCK: Final = 1024
_MOST_ROWS: Final = 4096
"""Rows that a program looks up, and that one which sums them all reads at once."""


class LabelRows(NamedTuple):
    """Numbers of each row [T] on this rank."""

    column: torch.Tensor
    """int64: this rank's column of the label, -1 where it has none."""

    read: torch.Tensor
    """bool: rows with a label and a weight that is not 0."""

    weight: torch.Tensor
    """Gradient that the label's loss gets, in the accumulation dtype; 0 where not read."""


def label_rows(
    logits: torch.Tensor,
    labels: torch.Tensor,
    shard: VocabShard,
    weight: torch.Tensor | float,
    into: ExpSums,
    *,
    temperature: float = 1.0,
    implementation: Implementation = "auto",
) -> LabelRows:
    """Look labels up; no graph, no collectives. By kernel one launch.

    Args:
        logits: [T, Vp]
        labels: int64 [T] over all shards, negative for none.
        weight: [T], or that of all labels.
        into: Memory [T] of the label's logit over the temperature, as a sum of one column.
    """
    dtype = accumulation_dtype(logits.dtype)
    if not uses_triton(implementation, logits):
        column = local_column(labels, shard)
        for memory, part in zip(into, token_exp_sums(logits, column, temperature), strict=True):
            memory.copy_(part)
        if not isinstance(weight, torch.Tensor):
            weight = torch.full_like(labels, weight, dtype=dtype)
        read = (labels >= 0) & (weight != 0)
        return LabelRows(column, read, weight.to(dtype).masked_fill(~read, 0.0))
    from megatron_ext.ops.sum_kernels import label_rows_kernel

    rows, labels, own, common = len(labels), labels.contiguous(), None, 0.0
    if isinstance(weight, torch.Tensor):
        own = weight.float().contiguous()
    else:
        common = float(weight)
    out = LabelRows(
        torch.empty_like(labels),
        torch.empty_like(labels, dtype=torch.bool),
        torch.empty_like(labels, dtype=dtype),
    )
    if rows:
        block = small_block(rows, _BLOCK)
        label_rows_kernel[(-(-rows // block),)](
            logits,
            logits.stride(0),
            labels,
            own,
            common,
            shard.start,
            shard.valid_width,
            rows,
            temperature,
            *out,
            *into,
            BLOCK=block,
        )
    return out


def label_losses(
    token: LogSumExp,
    whole: LogSumExp,
    labels: torch.Tensor,
    read: torch.Tensor | None,
    shard: VocabShard,
    *,
    implementation: Implementation = "auto",
) -> torch.Tensor:
    """Cross-entropy [T] of labels from merged sums, 0 of rows that are not read, NaN of a label
    beyond the vocabulary. By kernel one launch.

    Args:
        read: bool [T], rows with a label; None: all of them.
    """
    if token.peak.dtype != torch.float32 or not uses_triton(implementation, token.peak):
        log_prob = token_log_probs(token, whole, labels, shard)
        loss = log_prob.neg_()
        return loss if read is None else loss.masked_fill_(~read, 0.0)
    from megatron_ext.ops.sum_kernels import label_losses_kernel

    rows = len(labels)
    loss = token.peak.new_empty(rows)
    if rows:
        block = small_block(rows, _BLOCK)
        label_losses_kernel[(-(-rows // block),)](
            *token, *whole, labels.contiguous(), read, shard.vocab_size, rows, loss, BLOCK=block
        )
    return loss


class LabelTerm(NamedTuple):
    """Cross-entropy of rows' labels at temperature 1, as their gradient needs it."""

    label: torch.Tensor
    """int64 [T] over all shards, negative for none."""

    column: torch.Tensor
    """int64 [T]: this rank's column of the label, -1 where another rank has it."""

    weight: torch.Tensor
    """[T] upstream gradient, 0 where there is no label. A row at 0 gets none, whatever it holds."""

    whole: LogSumExp
    """[T] over all columns of all shards."""

    numbers: torch.Tensor | None = None
    """fp32 [3, T] of ``whole`` and ``weight``, where a kernel made them."""

    def gradient(self, logits: torch.Tensor, rows: torch.Tensor | slice) -> torch.Tensor:
        """Gradient in this rank's columns ``logits`` [T', Vp] of ``rows``, which it overwrites.

        Padding of ``logits`` is -inf. A row of weight 0 gets 0.
        """
        grad = self.whole.normalise_(logits, rows).exp_()
        weight = self.weight[rows, None].to(grad.dtype)
        grad.mul_(weight).masked_fill_(weight == 0, 0.0)
        column = self.column[rows, None]
        return grad.scatter_add_(-1, column.clamp(min=0), weight.neg().masked_fill(column < 0, 0.0))


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
