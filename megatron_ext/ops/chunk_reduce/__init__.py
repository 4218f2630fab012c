from megatron_ext.ops.chunk_reduce.function import chunk_mean_softmax, chunk_sizes, chunk_slots

__all__ = ["chunk_mean_softmax", "chunk_sizes", "chunk_slots"]
