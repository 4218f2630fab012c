from megatron_ext.ops.sorted_l1.function import SortedL1, sorted_l1
from megatron_ext.ops.sorted_l1.reference import sorted_l1_reference

__all__ = ["SortedL1", "sorted_l1", "sorted_l1_reference"]
