from megatron_ext.ops.projected_kl.column_plan import ColumnPlan
from megatron_ext.ops.projected_kl.evaluation import evaluate_projected_kl
from megatron_ext.ops.projected_kl.function import projected_kl
from megatron_ext.ops.projected_kl.operands import (
    LearnedEntries,
    ProjectedKL,
    ProjectedKLOptions,
    ShardedProjection,
    WeightedLabels,
)
from megatron_ext.ops.projected_kl.reference import projected_kl_reference

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
