from megatron_ext.ops.projected_kl.column_plan import ColumnPlan
from megatron_ext.ops.projected_kl.evaluation import evaluate_projected_kl
from megatron_ext.ops.projected_kl.function import projected_kl
from megatron_ext.ops.projected_kl.learned_entries import LearnedEntries
from megatron_ext.ops.projected_kl.reference import (
    projected_kl_reference,
    projected_kl_with_ce_reference,
)
from megatron_ext.ops.projected_kl.sharded_projection import ShardedProjection
from megatron_ext.ops.projected_kl.values import Comparing, CrossEntropy, ProjectedKL

__all__ = [
    "ColumnPlan",
    "Comparing",
    "CrossEntropy",
    "LearnedEntries",
    "ProjectedKL",
    "ShardedProjection",
    "evaluate_projected_kl",
    "projected_kl",
    "projected_kl_reference",
    "projected_kl_with_ce_reference",
]
