"""What the data says of a microbatch before the student has run, and objectives count by.

A schedule runs the backward pass of one microbatch before the forward pass of the next, so the
global count must be there before the first. The data says it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from megatron_ext.alignment.batch import AlignmentBatch
from megatron_ext.errors import LossError

Over = Literal["chunks", "tokens"]
"""What an objective sums over: chunks of an alignment, or the student's labels (``vocab_kl``)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownAhead:
    """The fields of ``DistillationInputs`` that the data gives."""

    labels: torch.Tensor
    """[B, Ts] int64"""

    alignment: AlignmentBatch | None = None

    chunk_mask: torch.Tensor | None = None
    """[C] bool; None: all."""

    teacher_labels: torch.Tensor | None = None
    """[B, Tt] int64, for objectives that read them; None: every chunk has all of them."""

    word_starts: torch.Tensor | None = None
    """[V] bool, by a label of the student's: whether it begins a word; see ``BoundaryColumns``."""

    @property
    def aligned(self) -> AlignmentBatch:
        """The alignment.

        Raises:
            LossError: There is none.
        """
        if self.alignment is None:
            raise LossError("chunks are counted by an alignment", got="none")
        return self.alignment

    def chunks(self, usable: torch.Tensor | None = None) -> torch.Tensor:
        """int64 scalar: chunks that are in the mask and in ``usable`` [C] bool; None: all."""
        if self.chunk_mask is None and usable is None:
            return torch.tensor(self.aligned.chunk_count, device=self.labels.device)
        if self.chunk_mask is None or usable is None:
            mask = self.chunk_mask if usable is None else usable
            assert mask is not None
            return mask.sum()
        return (self.chunk_mask & usable).sum()
