from megatron_ext.ops.top_log_probs.function import TopLogProbs, top_log_probs
from megatron_ext.ops.top_log_probs.reference import top_log_probs_reference

__all__ = ["TopLogProbs", "top_log_probs", "top_log_probs_reference"]
