from megatron_ext.ops.projected_kl.column_plan import ColumnPlan
from megatron_ext.ops.projected_kl.function import (
    evaluate_projected_kl,
    projected_kl,
    projected_kl_reference,
)
from megatron_ext.ops.projected_kl.operands import (
    LearnedEntries,
    ProjectedKL,
    ProjectedKLOptions,
    ShardedProjection,
    WeightedLabels,
)

__all__ = [
    "ColumnPlan",
    "LearnedEntries",
    "ProjectedKL",
    "ProjectedKLOptions",
    "ShardedProjection",
    "WeightedLabels",
    "evaluate_projected_kl",
    "projected_kl",
    "projected_kl_reference",
]
