"""Rows times a factor each, in place; most are 1 and are not touched."""

import triton
import triton.language as tl


@triton.jit
def scale_rows_kernel(gradient_ptr, scale_ptr, row_stride, width, BLOCK: tl.constexpr):
    """A program a row and block of columns."""
    row = tl.program_id(0).to(tl.int64)
    scale = tl.load(scale_ptr + row)
    if scale != 1.0:
        columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        inside = columns < width
        place = gradient_ptr + row * row_stride + columns
        gradient = tl.load(place, mask=inside, other=0.0)
        product = gradient.to(tl.float32) * scale
        tl.store(place, tl.where(scale == 0.0, 0.0, product).to(gradient.dtype), mask=inside)
