from megatron_ext.ops.unit_gradient.function import scale_rows_
from megatron_ext.ops.unit_gradient.handing_over import hand_over, hand_over_chunks

__all__ = ["hand_over", "hand_over_chunks", "scale_rows_"]
