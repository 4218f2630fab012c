"""Chunk ids with the chunks that do not count taken out. T rows, C chunks."""

from __future__ import annotations

import torch

from megatron_ext.constants import NO_CHUNK
from megatron_ext.losses.base import DistillationInputs


def counted_ids(inputs: DistillationInputs) -> tuple[torch.Tensor, torch.Tensor]:
    """Student [B Ts] and teacher [B Tt] ids, ``NO_CHUNK`` in chunks outside ``chunk_mask``.

    Rows without a chunk are looked at by no objective, so that what is in them, NaN included, is
    neither in the value nor in the gradient.
    """
    alignment = inputs.alignment
    assert alignment is not None
    student, teacher = alignment.student_chunk_id.flatten(), alignment.teacher_chunk_id.flatten()
    mask = inputs.chunk_mask
    if mask is None:
        return student, teacher
    # One more for NO_CHUNK, the last from behind.
    counts = torch.cat([mask, mask.new_zeros(1)])
    return (
        torch.where(counts[student], student, NO_CHUNK),
        torch.where(counts[teacher], teacher, NO_CHUNK),
    )
