"""Chunks and labels of some of the samples. B batch, Ts tokens, C chunks, S samples."""

from __future__ import annotations

from dataclasses import replace

import torch

from megatron_ext.alignment.batch import AlignmentBatch
from megatron_ext.constants import IGNORE_INDEX
from megatron_ext.errors import LossError
from megatron_ext.losses.count_ahead import KnownAhead, Over


def restricted(known: KnownAhead, is_chosen: torch.Tensor, over: Over) -> KnownAhead:
    """``known`` without the samples that are not chosen.

    Args:
        is_chosen: [S] bool.
        over: ``chunks``: chunks of other samples leave the chunk mask. ``tokens``: their labels
            become ``IGNORE_INDEX``.

    Raises:
        LossError: Chunks without an alignment.
    """
    alignment = known.alignment
    if over == "tokens":
        is_kept = is_chosen[_label_samples(known.labels, alignment)]
        return replace(known, labels=torch.where(is_kept, known.labels, IGNORE_INDEX))
    if alignment is None:
        raise LossError("chunks of some samples need an alignment", got="none")
    mask = is_chosen[alignment.sample]
    return replace(known, chunk_mask=mask if known.chunk_mask is None else known.chunk_mask & mask)


def _label_samples(labels: torch.Tensor, alignment: AlignmentBatch | None) -> torch.Tensor:
    """Sample of each label: [B, 1] where a sample is a row, otherwise [1, Ts]."""
    rows, length = labels.shape
    if alignment is None or alignment.student_cu_seqlens is None:
        return torch.arange(rows, device=labels.device)[:, None]
    ends = alignment.student_cu_seqlens[1:].to(torch.int64)
    positions = torch.arange(length, device=labels.device)
    return torch.bucketize(positions, ends, right=True).clamp(max=len(ends) - 1)[None]
