from megatron_ext.ops.matched_divergence.function import (
    evaluate_matched_divergence,
    matched_divergence,
    matched_divergence_reference,
)
from megatron_ext.ops.matched_divergence.matching import (
    MatchedDivergence,
    MatchedOptions,
    Matching,
    onto_student_columns,
)

__all__ = [
    "MatchedDivergence",
    "MatchedOptions",
    "Matching",
    "evaluate_matched_divergence",
    "matched_divergence",
    "matched_divergence_reference",
    "onto_student_columns",
]
