from megatron_ext.ops.binary_divergence.function import (
    Difference,
    binary_divergence,
    check_binary_divergence,
)

__all__ = ["Difference", "binary_divergence", "check_binary_divergence"]
