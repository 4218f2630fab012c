from megatron_ext.ops.projected_kl.function import ProjectedKL, projected_kl
from megatron_ext.ops.projected_kl.learned_entries import LearnedEntries
from megatron_ext.ops.projected_kl.reference import projected_kl_reference

__all__ = ["LearnedEntries", "ProjectedKL", "projected_kl", "projected_kl_reference"]
