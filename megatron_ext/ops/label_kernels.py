"""Triton kernels for numbers of rows with a label. T rows."""

import triton
import triton.language as tl


@triton.jit(
    do_not_specialize=["start", "rows"],
    do_not_specialize_on_alignment=["label_ptr", "weight_ptr", "peak_ptr", "total_ptr"],
)
def label_rows_kernel(
    logits_ptr,
    row_stride,
    label_ptr,
    weight_ptr,
    weight,
    start,
    width,
    rows,
    temperature,
    column_ptr,
    read_ptr,
    label_weight_ptr,
    peak_ptr,
    total_ptr,
    BLOCK: tl.constexpr,
):
    """Column and logit over the temperature of BLOCK labels, -1 and 0 where this rank has none.

    ``start`` is the rank's first column. A row is read where it has a label and a weight that is
    not 0; rows have the ``weight`` of all where they have none of their own.
    """
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    exists = row < rows
    label = tl.load(label_ptr + row, mask=exists, other=-1)
    if weight_ptr is not None:
        weight = tl.load(weight_ptr + row, mask=exists, other=0.0)
    is_read = (label >= 0) & (weight != 0.0)
    column = label - start
    is_here = (column >= 0) & (column < width) & (label >= 0)
    place = row.to(tl.int64) * row_stride + column
    picked = tl.load(logits_ptr + place, mask=is_here, other=0.0).to(tl.float32)
    tl.store(column_ptr + row, tl.where(is_here, column, -1), mask=exists)
    tl.store(read_ptr + row, is_read, mask=exists)
    tl.store(label_weight_ptr + row, tl.where(is_read, weight, 0.0), mask=exists)
    tl.store(peak_ptr + row, picked / temperature, mask=exists)
    tl.store(total_ptr + row, tl.where(is_here, 1.0, 0.0), mask=exists)


@triton.jit(
    do_not_specialize=["rows"],
    do_not_specialize_on_alignment=[
        "peak_ptr", "log_sum_ptr", "whole_peak_ptr", "whole_log_sum_ptr", "label_ptr",
    ],
)  # fmt: skip
def label_losses_kernel(
    peak_ptr,
    log_sum_ptr,
    whole_peak_ptr,
    whole_log_sum_ptr,
    label_ptr,
    read_ptr,
    vocab_size,
    rows,
    loss_ptr,
    BLOCK: tl.constexpr,
):
    """Cross-entropy of BLOCK labels from merged sums: 0 of rows that are not read, NaN of a label
    beyond the vocabulary."""
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    exists = row < rows
    label = tl.load(label_ptr + row, mask=exists, other=-1)
    is_read = label >= 0
    if read_ptr is not None:
        is_read = tl.load(read_ptr + row, mask=exists, other=0) != 0
    # Peaks first: the difference of two large numbers is exact, their sums are not.
    peaks = tl.load(peak_ptr + row, mask=exists) - tl.load(whole_peak_ptr + row, mask=exists)
    log_sum = tl.load(log_sum_ptr + row, mask=exists)
    loss = -(peaks + log_sum - tl.load(whole_log_sum_ptr + row, mask=exists))
    loss = tl.where(label >= vocab_size, float("nan"), loss)
    tl.store(loss_ptr + row, tl.where(is_read, loss, 0.0), mask=exists)
