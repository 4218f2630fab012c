from megatron_ext.ops.unit_gradient.function import scale_rows_

__all__ = ["scale_rows_"]
