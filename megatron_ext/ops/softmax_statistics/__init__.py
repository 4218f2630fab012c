from megatron_ext.ops.softmax_statistics.function import (
    RowStatistics,
    row_statistics,
    row_statistics_reference,
)

__all__ = ["RowStatistics", "row_statistics", "row_statistics_reference"]
