"""Chunks and labels of some of the samples. B batch, Ts tokens, C chunks, S samples."""

from __future__ import annotations

from dataclasses import replace

import torch

from megatron_ext.constants import IGNORE_INDEX
from megatron_ext.errors import LossError
from megatron_ext.losses.count_ahead import KnownAhead, Over
from megatron_ext.losses.inputs.row_samples import row_samples


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
        cu_seqlens = None if alignment is None else alignment.student_cu_seqlens
        is_kept = is_chosen[row_samples(known.labels, cu_seqlens)].view_as(known.labels)
        return replace(known, labels=torch.where(is_kept, known.labels, IGNORE_INDEX))
    if alignment is None:
        raise LossError("chunks of some samples need an alignment", got="none")
    mask = is_chosen[alignment.sample]
    return replace(known, chunk_mask=mask if known.chunk_mask is None else known.chunk_mask & mask)
