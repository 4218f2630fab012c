from megatron_ext.ops.chunk_distributions.model_rows import (
    ModelRows,
    chunk_means,
    chunk_means_by_kernel,
    clear_rows_of_no_chunk_,
    host_offsets,
    pair_of_models,
    row_scale,
    write_row_gradients,
)

__all__ = [
    "ModelRows",
    "chunk_means",
    "chunk_means_by_kernel",
    "clear_rows_of_no_chunk_",
    "host_offsets",
    "pair_of_models",
    "row_scale",
    "write_row_gradients",
]
