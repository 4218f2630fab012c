from megatron_ext.ops.sorted_l1.function import (
    ChunkSortedL1,
    SortedL1,
    chunk_sorted_l1,
    evaluate_sorted_l1,
    sorted_l1,
    sorted_l1_reference,
)

__all__ = [
    "ChunkSortedL1",
    "SortedL1",
    "chunk_sorted_l1",
    "evaluate_sorted_l1",
    "sorted_l1",
    "sorted_l1_reference",
]
