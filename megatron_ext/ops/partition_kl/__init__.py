from megatron_ext.ops.partition_kl.chain_masses import RowMasses
from megatron_ext.ops.partition_kl.chains import ChainRows, Chains
from megatron_ext.ops.partition_kl.function import Comparison, partition_kl
from megatron_ext.ops.partition_kl.logit_rows import SingleRows
from megatron_ext.ops.partition_kl.reference import partition_kl_reference
from megatron_ext.ops.partition_kl.shared_vocabulary import SharedColumns, shared_columns

__all__ = [
    "ChainRows",
    "Chains",
    "Comparison",
    "RowMasses",
    "SharedColumns",
    "SingleRows",
    "partition_kl",
    "partition_kl_reference",
    "shared_columns",
]
