from megatron_ext.ops.partition_kl.chain_masses import RowMasses
from megatron_ext.ops.partition_kl.evaluation import evaluate_partition_kl
from megatron_ext.ops.partition_kl.kernel_numbers import values_by_chunk
from megatron_ext.ops.partition_kl.operands import (
    ChainEdges,
    ChainRows,
    Chains,
    EventComparison,
    PartitionPlan,
    PartitionValues,
    SingleRows,
    partition_kl_reference,
)
from megatron_ext.ops.partition_kl.shared_columns import ColumnSet, SharedColumns, shared_columns

__all__ = [
    "ChainEdges",
    "ChainRows",
    "Chains",
    "ColumnSet",
    "EventComparison",
    "PartitionPlan",
    "PartitionValues",
    "RowMasses",
    "SharedColumns",
    "SingleRows",
    "evaluate_partition_kl",
    "partition_kl_reference",
    "shared_columns",
    "values_by_chunk",
]
