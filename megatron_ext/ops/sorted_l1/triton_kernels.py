"""Triton kernels of the gradients of the sorted L1 of chunks, at candidates and elsewhere."""

import triton
import triton.language as tl

from megatron_ext.ops.chunk_kernels import row_probabilities
from megatron_ext.ops.triton_math import scaled


@triton.jit(do_not_specialize=["first_chunk"])
def keep_chosen_kernel(
    logits_ptr,
    order_ptr,
    offsets_ptr,
    peak_ptr,
    log_sum_ptr,
    columns_ptr,
    signs_ptr,
    kept_ptr,
    centre_ptr,
    first_chunk,
    row_stride,
    capacity,
    temperature,
    HAS_TEMPERATURE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program for each chunk: its rows' logits at the candidates, and ``sum q_i sign``.

    Candidates and signs are [C', capacity], ``kept`` is [T, capacity], ``centre`` [T].
    """
    program = tl.program_id(0).to(tl.int64)
    begin = tl.load(offsets_ptr + first_chunk + program)
    end = tl.load(offsets_ptr + first_chunk + program + 1)
    for place in range(begin, end):
        row = tl.load(order_ptr + place).to(tl.int64)
        peak = tl.load(peak_ptr + row)
        log_sum = tl.load(log_sum_ptr + row)
        centre = 0.0
        for start in range(0, capacity, BLOCK):
            slots = start + tl.arange(0, BLOCK)
            inside = slots < capacity
            sign = tl.load(signs_ptr + program * capacity + slots, mask=inside, other=0)
            used = sign != 0
            column = tl.load(columns_ptr + program * capacity + slots, mask=used, other=0)
            loaded = tl.load(logits_ptr + row * row_stride + column, mask=used, other=-float("inf"))
            tl.store(kept_ptr + row * capacity + slots, loaded, mask=inside)
            values = scaled(loaded, temperature, HAS_TEMPERATURE)
            share = tl.exp(values - peak - log_sum) * sign.to(tl.float32)
            centre += tl.sum(tl.where(used, share, 0.0), axis=0)
        tl.store(centre_ptr + row, centre)


@triton.jit(do_not_specialize=["first_chunk"])
def spread_kernel(
    logits_ptr,
    gradient_ptr,
    order_ptr,
    offsets_ptr,
    peak_ptr,
    log_sum_ptr,
    centre_ptr,
    scale_ptr,
    first_chunk,
    row_stride,
    gradient_stride,
    width,
    valid_width,
    temperature,
    HAS_TEMPERATURE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program for each chunk: ``-q_i centre_i scale_c`` in its rows, 0 in padding."""
    chunk = first_chunk + tl.program_id(0).to(tl.int64)
    begin = tl.load(offsets_ptr + chunk)
    end = tl.load(offsets_ptr + chunk + 1)
    scale = tl.load(scale_ptr + chunk)
    for place in range(begin, end):
        row = tl.load(order_ptr + place).to(tl.int64)
        centre = tl.load(centre_ptr + row)
        for start in range(0, width, BLOCK):
            columns = start + tl.arange(0, BLOCK)
            held = columns < width
            valid = columns < valid_width
            probabilities = row_probabilities(
                logits_ptr,
                row,
                row_stride,
                peak_ptr,
                log_sum_ptr,
                columns,
                held,
                valid,
                temperature,
                HAS_TEMPERATURE,
            )
            slope = tl.where(valid, -probabilities * centre * scale, 0.0)
            slope = tl.where(scale == 0.0, 0.0, slope)
            # The gradient may be the logits, which other threads may still be reading.
            tl.debug_barrier()
            place_of = gradient_ptr + row * gradient_stride + columns
            tl.store(place_of, slope.to(gradient_ptr.dtype.element_ty), mask=held)


@triton.jit(do_not_specialize=["first_chunk"])
def write_chosen_kernel(
    kept_ptr,
    gradient_ptr,
    order_ptr,
    offsets_ptr,
    peak_ptr,
    log_sum_ptr,
    columns_ptr,
    signs_ptr,
    centre_ptr,
    base_ptr,
    scale_ptr,
    first_chunk,
    gradient_stride,
    capacity,
    weight,
    temperature,
    HAS_BASE: tl.constexpr,
    HAS_TEMPERATURE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write ``q_i (base_c + weight sign - centre_i) scale_c`` at the candidates, by chunk."""
    program = tl.program_id(0).to(tl.int64)
    chunk = first_chunk + program
    begin = tl.load(offsets_ptr + chunk)
    end = tl.load(offsets_ptr + chunk + 1)
    scale = tl.load(scale_ptr + chunk)
    base = 0.0
    if HAS_BASE:
        base = tl.load(base_ptr + chunk)
    for place in range(begin, end):
        row = tl.load(order_ptr + place).to(tl.int64)
        peak = tl.load(peak_ptr + row)
        log_sum = tl.load(log_sum_ptr + row)
        centre = tl.load(centre_ptr + row)
        for start in range(0, capacity, BLOCK):
            slots = start + tl.arange(0, BLOCK)
            sign = tl.load(signs_ptr + program * capacity + slots, mask=slots < capacity, other=0)
            used = sign != 0
            column = tl.load(columns_ptr + program * capacity + slots, mask=used, other=0)
            loaded = tl.load(kept_ptr + row * capacity + slots, mask=used, other=-float("inf"))
            values = scaled(loaded, temperature, HAS_TEMPERATURE)
            slope = base + weight * sign.to(tl.float32) - centre
            slope = tl.exp(values - peak - log_sum) * slope * scale
            slope = tl.where(scale == 0.0, 0.0, slope)
            tl.store(
                gradient_ptr + row * gradient_stride + column,
                slope.to(gradient_ptr.dtype.element_ty),
                mask=used,
            )
