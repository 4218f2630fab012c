from megatron_ext.ops.token_log_prob.function import token_log_prob

__all__ = ["token_log_prob"]
