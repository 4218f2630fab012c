from megatron_ext.ops.token_likelihood.function import ModelRows, TokenLikelihood, token_likelihood

__all__ = ["ModelRows", "TokenLikelihood", "token_likelihood"]
