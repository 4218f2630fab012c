from megatron_ext.ops.token_log_prob.evaluation import CrossEntropy, evaluate_cross_entropy
from megatron_ext.ops.token_log_prob.function import (
    TokenPrediction,
    token_log_prob,
    token_prediction,
)

__all__ = [
    "CrossEntropy",
    "TokenPrediction",
    "evaluate_cross_entropy",
    "token_log_prob",
    "token_prediction",
]
