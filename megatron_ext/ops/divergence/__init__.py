from megatron_ext.ops.divergence.function import (
    FORWARD_KL,
    Divergence,
    DivergenceOptions,
    ProjectedTerms,
    check_divergence,
    divergence,
    divergence_slope,
    divergence_terms,
    log1mexp,
    probability_floor,
    projected_terms,
)
from megatron_ext.ops.divergence.reference import divergence_reference

__all__ = [
    "FORWARD_KL",
    "Divergence",
    "DivergenceOptions",
    "ProjectedTerms",
    "check_divergence",
    "divergence",
    "divergence_reference",
    "divergence_slope",
    "divergence_terms",
    "log1mexp",
    "probability_floor",
    "projected_terms",
]
