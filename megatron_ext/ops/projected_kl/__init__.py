from megatron_ext.ops.projected_kl.function import KLDirection, ProjectedKL, projected_kl
from megatron_ext.ops.projected_kl.reference import projected_kl_reference

__all__ = ["KLDirection", "ProjectedKL", "projected_kl", "projected_kl_reference"]
