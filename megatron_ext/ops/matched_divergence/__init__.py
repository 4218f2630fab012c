from megatron_ext.ops.matched_divergence.comparison import MatchedOptions
from megatron_ext.ops.matched_divergence.evaluation import evaluate_matched_divergence
from megatron_ext.ops.matched_divergence.exchange import onto_student_columns
from megatron_ext.ops.matched_divergence.function import matched_divergence
from megatron_ext.ops.matched_divergence.matching import Matching
from megatron_ext.ops.matched_divergence.reference import matched_divergence_reference
from megatron_ext.ops.matched_divergence.values import MatchedDivergence

__all__ = [
    "MatchedDivergence",
    "MatchedOptions",
    "Matching",
    "evaluate_matched_divergence",
    "matched_divergence",
    "matched_divergence_reference",
    "onto_student_columns",
]
