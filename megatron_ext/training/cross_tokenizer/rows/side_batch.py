"""The tensors of one side. B rows, T label positions."""

from __future__ import annotations

import numpy as np
import torch

from megatron_ext.constants import IGNORE_INDEX
from megatron_ext.training.cross_tokenizer.rows.batch import SideBatch
from megatron_ext.training.cross_tokenizer.rows.layout import Layout


def side_batch(
    layout: Layout, *, pad: int, byte_count: int, position_count: int | None = None
) -> SideBatch:
    """The tensors of a layout.

    Args:
        layout: B rows of segments.
        pad: What fills the inputs.
        byte_count: Bytes of the texts.
        position_count: How many positions a model knows; padding beyond them has the last one's
            number. None: no row is longer.
    """
    segments = layout.segments
    labels = layout.laid_out((segment.labels() for segment in segments), IGNORE_INDEX)
    bounds = layout.bounds
    sizes = np.diff(bounds)
    counted = np.arange(sizes.max(initial=0))
    if position_count is not None:
        counted = np.minimum(counted, position_count - 1)
    positions = [counted[:size] for size in sizes.tolist()]
    return SideBatch(
        input_ids=torch.from_numpy(
            layout.laid_out((segment.inputs() for segment in segments), pad)
        ),
        labels=torch.from_numpy(labels),
        loss_mask=torch.from_numpy((labels != IGNORE_INDEX).astype(np.float32)),
        position_ids=torch.from_numpy(np.concatenate([counted[:0], *positions])).view(labels.shape),
        lengths=torch.from_numpy(layout.filled),
        cu_seqlens=torch.from_numpy(bounds.astype(np.int32)),
        max_seqlen=int(sizes.max(initial=0)),
        byte_count=byte_count,
    )
