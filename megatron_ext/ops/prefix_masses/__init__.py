from megatron_ext.ops.prefix_masses.function import PrefixTargets, start_columns
from megatron_ext.ops.prefix_masses.operands import (
    PrefixColumns,
    PrefixSums,
    Spans,
    StartColumns,
    TargetRows,
)

__all__ = [
    "PrefixColumns",
    "PrefixSums",
    "PrefixTargets",
    "Spans",
    "StartColumns",
    "TargetRows",
    "start_columns",
]
