"""What a partition KL says of chunks and tokens."""

from __future__ import annotations

from typing import NamedTuple

import torch


class EventComparison(NamedTuple):
    """One number a chunk, replicated over the group; only ``divergence`` can have a graph."""

    divergence: torch.Tensor
    """D, in nats, without tau^2."""

    student_rest: torch.Tensor
    """Probability of the rest, at the temperature."""

    teacher_rest: torch.Tensor

    agreement: torch.Tensor
    """bool: both models have the same most probable event."""


class PartitionValues(NamedTuple):
    """Without a graph, replicated over the group. C singles, H chains, T student rows."""

    singles: EventComparison
    """[C]"""

    chains: EventComparison
    """[H]"""

    token_loss: torch.Tensor | None
    """[T] cross-entropy of each label, 0 where there is none; None without labels."""

    def divergences(self) -> torch.Tensor:
        """[C + H]"""
        return torch.cat([self.singles.divergence, self.chains.divergence])
