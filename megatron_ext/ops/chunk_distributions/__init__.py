from megatron_ext.ops.chunk_distributions.function import chunk_distributions

__all__ = ["chunk_distributions"]
