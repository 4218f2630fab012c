from megatron_ext.ops.divergence.function import (
    FORWARD_KL,
    Divergence,
    DivergenceOptions,
    check_divergence,
    divergence,
    divergence_terms,
    log1mexp,
)
from megatron_ext.ops.divergence.reference import divergence_reference

__all__ = [
    "FORWARD_KL",
    "Divergence",
    "DivergenceOptions",
    "check_divergence",
    "divergence",
    "divergence_reference",
    "divergence_terms",
    "log1mexp",
]
