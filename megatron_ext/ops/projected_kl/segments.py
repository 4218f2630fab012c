"""Sums over a few entries each, arranged so that a program has equally many. N sums, E entries."""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

ENTRIES: Final = 1024
"""Entries that a program holds at once."""

_WIDEST: Final = ENTRIES.bit_length() - 1


class Segments(NamedTuple):
    """int32 tensors. Sums are in the order of their lengths, rounded up to powers of two."""

    offsets: torch.Tensor
    """[N + 1]: the i-th sum is over entries ``offsets[i]:offsets[i + 1]``."""

    target: torch.Tensor
    """[N] where the i-th sum belongs, a permutation."""

    source: torch.Tensor
    """[E] what is summed, ascending within a sum."""

    entry: torch.Tensor
    """[E] place of its weight among this rank's entries."""

    blocks: torch.Tensor
    """[B, 3] what a program does: the logarithm of the length that its sums have room for, the
    first of them, and the one after the last. Sums longer than ``ENTRIES`` are alone in theirs."""

    widest: int
    """Largest logarithm among the blocks."""

    @classmethod
    def of(
        cls,
        target: NDArray[np.int64],
        source: NDArray[np.int64],
        entry: NDArray[np.int64],
        count: int,
        device: torch.device | str,
    ) -> Segments:
        """From the target, source and place of each entry; there are ``count`` targets."""
        lengths = np.bincount(target, minlength=count)
        width = np.minimum(np.ceil(np.log2(np.maximum(lengths, 1))).astype(np.int64), _WIDEST)
        order = np.argsort(width, kind="stable")
        rank = np.empty(count, dtype=np.int64)
        rank[order] = np.arange(count)
        by_sum = np.lexsort((source, rank[target]))
        offsets = np.zeros(count + 1, dtype=np.int64)
        offsets[1:] = np.cumsum(lengths[order])
        blocks = _blocks(np.bincount(width, minlength=_WIDEST + 1))
        arrays = (offsets, order, source[by_sum], entry[by_sum], blocks)
        tensors = (torch.from_numpy(x.astype(np.int32)).to(device) for x in arrays)
        offsets_, target_, source_, entry_, blocks_ = tensors
        widest = int(blocks[:, 0].max(initial=0))
        return cls(offsets_, target_, source_, entry_, blocks_, widest)


def _blocks(counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """[B, 3] for so many sums of each width, narrow ones first."""
    blocks, first = [], 0
    for width, count in enumerate(counts.tolist()):
        stop, step = first + count, ENTRIES >> width
        blocks += [(width, start, min(start + step, stop)) for start in range(first, stop, step)]
        first = stop
    return np.array(blocks, dtype=np.int64).reshape(-1, 3)
