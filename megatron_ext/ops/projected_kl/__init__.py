from megatron_ext.ops.projected_kl.column_plan import ColumnPlan
from megatron_ext.ops.projected_kl.evaluation import evaluate_projected_kl
from megatron_ext.ops.projected_kl.function import projected_kl
from megatron_ext.ops.projected_kl.learned_entries import LearnedEntries
from megatron_ext.ops.projected_kl.reference import projected_kl_reference
from megatron_ext.ops.projected_kl.sharded_projection import ShardedProjection
from megatron_ext.ops.projected_kl.values import ProjectedKL, ProjectedKLOptions, WeightedLabels

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
