from megatron_ext.ops.sorted_l1.evaluation import ChunkSortedL1, evaluate_sorted_l1
from megatron_ext.ops.sorted_l1.function import SortedL1, chunk_sorted_l1, sorted_l1
from megatron_ext.ops.sorted_l1.reference import sorted_l1_reference

__all__ = [
    "ChunkSortedL1",
    "SortedL1",
    "chunk_sorted_l1",
    "evaluate_sorted_l1",
    "sorted_l1",
    "sorted_l1_reference",
]
