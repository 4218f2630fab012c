"""Triton functions of chunk distributions: blocks of columns of a chunk's mean softmax."""

import triton
import triton.language as tl

from megatron_ext.ops.triton_math import row_values, scaled


@triton.jit
def row_probabilities(
    logits_ptr,
    row,
    row_stride,
    peak_ptr,
    log_sum_ptr,
    columns,
    held,
    inside,
    temperature,
    HAS_TEMPERATURE: tl.constexpr,
):
    """Softmax of a row at ``columns``, 0 where not ``inside``. ``row`` is int64."""
    loaded = row_values(logits_ptr + row * row_stride, columns, held, inside)
    values = scaled(loaded, temperature, HAS_TEMPERATURE)
    probabilities = tl.exp(values - tl.load(peak_ptr + row) - tl.load(log_sum_ptr + row))
    return tl.where(inside, probabilities, 0.0)


@triton.jit
def mean_probabilities(
    logits_ptr,
    order_ptr,
    begin,
    end,
    row_stride,
    peak_ptr,
    log_sum_ptr,
    columns,
    held,
    inside,
    temperature,
    HAS_TEMPERATURE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Mean softmax of the rows ``order[begin:end]`` at ``columns``; 0 without rows."""
    sums = tl.zeros([BLOCK], tl.float32)
    for place in range(begin, end):
        row = tl.load(order_ptr + place).to(tl.int64)
        sums += row_probabilities(
            logits_ptr,
            row,
            row_stride,
            peak_ptr,
            log_sum_ptr,
            columns,
            held,
            inside,
            temperature,
            HAS_TEMPERATURE,
        )
    return sums / tl.maximum(end - begin, 1).to(tl.float32)


@triton.jit
def chunk_means_kernel(
    logits_ptr,
    order_ptr,
    offsets_ptr,
    peak_ptr,
    log_sum_ptr,
    out_ptr,
    first_chunk,
    row_stride,
    width,
    valid_width,
    temperature,
    HAS_TEMPERATURE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program for each chunk and block of columns; ``out`` is [C', width]."""
    place = tl.program_id(0).to(tl.int64)
    begin = tl.load(offsets_ptr + first_chunk + place)
    end = tl.load(offsets_ptr + first_chunk + place + 1)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    means = mean_probabilities(
        logits_ptr,
        order_ptr,
        begin,
        end,
        row_stride,
        peak_ptr,
        log_sum_ptr,
        columns,
        columns < width,
        columns < valid_width,
        temperature,
        HAS_TEMPERATURE,
        BLOCK,
    )
    tl.store(out_ptr + place * width + columns, means, mask=columns < width)
