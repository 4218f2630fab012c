from megatron_ext.ops.selected_log_prob.function import selected_log_prob
from megatron_ext.ops.selected_log_prob.reference import selected_log_prob_reference

__all__ = ["selected_log_prob", "selected_log_prob_reference"]
