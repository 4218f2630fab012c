from megatron_ext.ops.token_likelihood.function import (
    EvaluatedLikelihood,
    TokenLikelihood,
    TokenRows,
    evaluate_token_likelihood,
    token_likelihood,
    write_likelihood_gradient,
)
from megatron_ext.ops.token_likelihood.token_gradient import RowGradient, write_token_gradient

__all__ = [
    "EvaluatedLikelihood",
    "RowGradient",
    "TokenLikelihood",
    "TokenRows",
    "evaluate_token_likelihood",
    "token_likelihood",
    "write_likelihood_gradient",
    "write_token_gradient",
]
