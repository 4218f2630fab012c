"""What an objective will count, before the student has run.

A schedule runs the backward pass of one microbatch before the forward pass of the next, so the
global count must be there before the first. The data says it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

import torch

from megatron_ext.alignment.batch import AlignmentBatch
from megatron_ext.constants import IGNORE_INDEX
from megatron_ext.errors import LossError
from megatron_ext.losses.base import Objective

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


@runtime_checkable
class CountsAhead(Protocol):
    """An objective that knows from the data which chunks it leaves out."""

    def count_ahead(self, known: KnownAhead) -> torch.Tensor:
        """int64 scalar: ``LossOutput.count`` of these inputs."""


def count_ahead(objective: Objective, known: KnownAhead, *, over: Over = "chunks") -> torch.Tensor:
    """int64 scalar by which the global batch's sum of ``objective`` is divided.

    That is what the objective says, where it is ``CountsAhead``; otherwise all labels, or all
    chunks that it is given, used or not.

    Raises:
        LossError: Chunks without an alignment.
    """
    if isinstance(objective, CountsAhead):
        return objective.count_ahead(known)
    if over == "tokens":
        return (known.labels != IGNORE_INDEX).sum()
    return known.chunks()
