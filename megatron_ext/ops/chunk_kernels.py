"""Triton kernels of a chunk's mean softmax, and of the gradient of a row's token and its set."""

import triton
import triton.language as tl

from megatron_ext.ops.kernel import kernel
from megatron_ext.ops.triton_math import LOG2_E, row_values, scaled

SMALL_MASS = tl.constexpr(-20.0)
"""Log-mass below which shares are computed from logits, since dividing by it loses digits."""


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
    log_sum = tl.load(log_sum_ptr + row) * LOG2_E
    # The difference first, which is exact for large logits where their product is not.
    probabilities = tl.exp2((values - tl.load(peak_ptr + row)) * LOG2_E - log_sum)
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
):
    """Mean softmax of the rows ``order[begin:end]`` at ``columns``; 0 without rows."""
    sums = tl.zeros(columns.shape, tl.float32)
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


@kernel(do_not_specialize=["first_chunk"])
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
    )
    tl.store(out_ptr + place * width + columns, means, mask=columns < width)


@kernel(do_not_specialize=["rows"])
def token_gradient_kernel(
    logits_ptr,
    members_ptr,
    vectors_ptr,
    column_ptr,
    written_ptr,
    gradient_ptr,
    logits_stride,
    gradient_stride,
    width,
    padded_width,
    rows,
    temperature,
    HAS_MEMBERS: tl.constexpr,
    HAS_TEMPERATURE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program for each row. ``gradient`` may be ``logits``.

    ``vectors`` is fp32 [6, T]: peak and log-sum over all columns and over the members, and the
    gradients of the token's and the set's log-probability, over the temperature. ``column`` is
    int64 [T], -1 where the token is not among these columns. Of ``written`` bool [T] only such rows
    are written.
    """
    row = tl.program_id(0).to(tl.int64)
    if written_ptr is not None:  # noqa: SIM102 - Triton evaluates both sides of "and"
        if tl.load(written_ptr + row) == 0:
            return
    vectors = vectors_ptr + row
    peak = tl.load(vectors)
    log_sum = tl.load(vectors + rows)
    on_token = tl.load(vectors + 4 * rows)
    on_mass = 0.0
    if HAS_MEMBERS:
        member_peak = tl.load(vectors + 2 * rows)
        member_log_sum = tl.load(vectors + 3 * rows)
        on_mass = tl.load(vectors + 5 * rows)
        log_mass = (member_peak - peak) + (member_log_sum - log_sum)
        # A member's share of the set is a multiple of its probability, unless that underflows.
        is_multiple = log_mass > SMALL_MASS
        multiple = tl.where(is_multiple & (on_mass != 0.0), on_mass * tl.exp(-log_mass), 0.0)
    total = on_token + on_mass
    token_column = tl.load(column_ptr + row).to(tl.int32)
    start_of_row = logits_ptr + row * logits_stride
    place = gradient_ptr + row * gradient_stride
    # A row without an upstream gradient is not read.
    used = tl.where((on_token != 0.0) | (on_mass != 0.0), padded_width, 0)
    for start in range(0, used, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        inside = columns < width
        held = columns < padded_width
        loaded = row_values(start_of_row, columns, held, inside)
        values = scaled(loaded, temperature, HAS_TEMPERATURE)
        gradient = tl.exp((values - peak) - log_sum)
        if HAS_MEMBERS:
            is_member = tl.load(members_ptr + columns, mask=held, other=0) != 0
            gradient = gradient * tl.where(is_member, multiple - total, -total)
            if (on_mass != 0.0) & (log_mass <= SMALL_MASS):
                shares = tl.exp((values - member_peak) - member_log_sum)
                gradient = gradient + tl.where(is_member, shares * on_mass, 0.0)
        else:
            gradient = gradient * -total
        gradient = gradient + tl.where(columns == token_column, on_token, 0.0)
        gradient = tl.where(inside, gradient, 0.0)
        tl.store(place + columns, gradient.to(place.dtype.element_ty), mask=columns < padded_width)
    for start in range(used, padded_width, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        nothing = tl.zeros((BLOCK,), dtype=place.dtype.element_ty)
        tl.store(place + columns, nothing, mask=columns < padded_width)
