"""Hybrid KL: GOLD over a relaxed match of the vocabularies."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from megatron_ext.errors import LossError
from megatron_ext.losses.objective import LOSS_REGISTRY, Needs
from megatron_ext.losses.objectives.gold import GoldLoss


@dataclass(frozen=True, slots=True, kw_only=True)
class HybridKLLoss(GoldLoss):
    """``GoldLoss`` whose match holds tokens that mostly stand for one another, not equal ones only.

    H-KL of X-Token (arXiv 2605.21699). The inputs' match is of
    ``SparseProjection.partition(min_share)``; the objective is handed the match, and ``min_share``
    tells whoever builds it. Everything else is as ``GoldLoss`` says.

    Raises:
        LossError: As ``GoldLoss``, and for a share that is not above 0 and at most 1.
    """

    name: ClassVar[str] = "hybrid_kl"

    min_share: float = 0.6
    """Least share that a student token's largest teacher token has of it, to be common."""

    def __post_init__(self) -> None:
        # Without arguments, super() would look for the class that slots=True replaced.
        GoldLoss.__post_init__(self)
        if not 0 < self.min_share <= 1:
            raise LossError(
                "min_share of the objective hybrid_kl is no share",
                got=self.min_share,
                expected="above 0 and at most 1",
            )

    @property
    def needs(self) -> Needs:
        """The relaxed match."""
        return Needs(projection="retokenized", match=True, min_share=self.min_share)


LOSS_REGISTRY.register("hybrid_kl", HybridKLLoss)
