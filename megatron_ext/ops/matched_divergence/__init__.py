from megatron_ext.ops.matched_divergence.exchange import onto_student_columns
from megatron_ext.ops.matched_divergence.function import MatchedDivergence, matched_divergence
from megatron_ext.ops.matched_divergence.reference import matched_divergence_reference

__all__ = [
    "MatchedDivergence",
    "matched_divergence",
    "matched_divergence_reference",
    "onto_student_columns",
]
