"""Consecutive chunks that count as one event. C chunks, G groups, at most C."""

from __future__ import annotations

from typing import NamedTuple

import torch

from megatron_ext.alignment.batch import AlignmentBatch
from megatron_ext.ops.index_sum import index_sum


class ChunkGroups(NamedTuple):
    """A group is a run of chunks; it is written in the place of its last one."""

    group: torch.Tensor
    """int64 [C], ascending from 0."""

    is_last: torch.Tensor
    """bool [C]: last chunks of groups."""

    @classmethod
    def single(cls, count: int, device: torch.device) -> ChunkGroups:
        """Each of ``count`` chunks alone."""
        each = torch.arange(count, device=device)
        return cls(each, torch.ones_like(each, dtype=torch.bool))

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """Sums of ``values`` [C] over each group, [C]: at every chunk its group's."""
        return index_sum(values, self.group, len(values))[self.group]


def chunk_groups(
    alignment: AlignmentBatch, *, usable: torch.Tensor, closes: torch.Tensor
) -> ChunkGroups:
    """Groups of neighbouring usable chunks, each up to the first that closes it.

    A group never runs over anything: not over the end of a sample, not over tokens in no chunk on
    either side, and not over a chunk that cannot be used, which is a group of its own.

    Args:
        usable: bool [C].
        closes: bool [C]: chunks after which the next begins a group.
    """
    # The end of each chunk against the start of the next, on both sides.
    apart = torch.zeros_like(closes[1:])
    for spans in (alignment.student_spans, alignment.teacher_spans):
        apart = apart | (spans[:-1, 1] != spans[1:, 0])
    apart = apart | (alignment.sample[1:] != alignment.sample[:-1])
    begins = apart | closes[:-1] | ~usable[:-1] | ~usable[1:]
    is_last = torch.ones_like(closes)
    is_last[: len(begins)] = begins
    group = torch.zeros_like(closes, dtype=torch.int64)
    group[1:] = begins.cumsum(dim=0)
    return ChunkGroups(group, is_last)
