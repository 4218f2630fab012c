"""Options of the matched divergence."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_ext.ops.divergence import DivergenceOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class MatchedOptions(DivergenceOptions):
    """How chunk distributions are compared."""

    uncommon_weight: float = 0.0
    """w of the sorted L1 over the other columns."""

    top_u: int | None = None
    """Places of it that are compared; None: all, which is exact."""
