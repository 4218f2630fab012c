"""Kernel of the starts' masses."""

import triton.language as tl

from megatron_ext.ops.kernel import kernel
from megatron_ext.ops.triton_math import LOG2_E


@kernel()
def column_masses_kernel(
    logits_ptr,
    row_ptr,
    peak_ptr,
    log_sum_ptr,
    column_ptr,
    pointers_ptr,
    slot_ptr,
    out_ptr,
    row_stride,
    out_stride,
    slots,
    BLOCK: tl.constexpr,
):
    """Probabilities of a row's columns added up by slot, [S, slots]; one start and BLOCK slots.

    ``column`` has the columns of the slots one after the other, from ``pointers`` [slots + 1] on;
    ``slot`` the slots by their number of columns, so that those of a program have about as many.
    """
    start = tl.program_id(0).to(tl.int64)
    row = tl.load(row_ptr + start)
    start_of_row = logits_ptr + row * row_stride
    peak = tl.load(peak_ptr + row)
    log_sum = tl.load(log_sum_ptr + row)
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = place < slots
    slot = tl.load(slot_ptr + place, mask=inside, other=0)
    first = tl.load(pointers_ptr + slot, mask=inside, other=0)
    stop = tl.load(pointers_ptr + slot + 1, mask=inside, other=0)
    total = tl.zeros((BLOCK,), tl.float32)
    for step in range(0, tl.max(stop - first, axis=0)):
        held = first + step < stop
        column = tl.load(column_ptr + first + step, mask=held, other=0)
        logit = tl.load(start_of_row + column, mask=held, other=-float("inf")).to(tl.float32)
        # The difference first, which is exact for large logits.
        total += tl.where(held, tl.exp2(((logit - peak) - log_sum) * LOG2_E), 0.0)
    tl.store(out_ptr + start * out_stride + slot, total, mask=inside)
