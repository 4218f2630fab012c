"""Triton kernels of summed columns: means of residual ones, sums, slopes, and residual gradients.

Chunks are taken ``CHUNKS`` at a time, a group, whose numbers stand side by side: an entry of the
projection is read once for all of them. Each kernel has ``blocks`` programs for a group. Equations
are those of the README.
"""

import math

import triton
import triton.language as tl

from megatron_ext.ops.kernel import kernel
from megatron_ext.ops.projected_kl.single_kernel import bits_of, is_single
from megatron_ext.ops.triton_math import FLOOR, LOG2_E, kept_terms, projected_terms, scaled

LOG_FLOOR = tl.constexpr(math.log(1024 * 1.1754943508222875e-38))


@triton.jit
def group_means(
    logits_ptr,
    order_ptr,
    chunk_ptr,
    first,
    stop,
    row_stride,
    columns,
    inside,
    lse_ptr,
    rows,
    temperature,
    HAS_TEMPERATURE: tl.constexpr,
    CHUNKS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """``chunk_mean`` of chunks from ``first`` on, [CHUNKS, COLUMNS]; 0 from ``stop`` on."""
    chunk = first + tl.arange(0, CHUNKS)
    begin = tl.load(chunk_ptr + chunk, mask=chunk < stop, other=0)
    count = tl.load(chunk_ptr + chunk + 1, mask=chunk < stop, other=0) - begin
    mean = tl.zeros((CHUNKS, COLUMNS), tl.float32)
    log_mean = tl.full((CHUNKS, COLUMNS), -float("inf"), tl.float32)
    for step in range(0, tl.max(count, axis=0)):
        has_row = step < count
        row = tl.load(order_ptr + begin + step, mask=has_row, other=0)
        peak = tl.load(lse_ptr + row, mask=has_row, other=0.0)
        log_sum = tl.load(lse_ptr + rows + row, mask=has_row, other=0.0)
        place = logits_ptr + row.to(tl.int64)[:, None] * row_stride + columns[None, :]
        wanted = has_row[:, None] & inside[None, :]
        loaded = tl.load(place, mask=wanted, other=-float("inf"))
        log_row = scaled(loaded, temperature, HAS_TEMPERATURE) - peak[:, None] - log_sum[:, None]
        log_mean = tl.where(has_row[:, None], log_row, log_mean)
        mean += tl.exp(log_row)
    several = (count > 1)[:, None]
    mean = tl.where(several, mean / tl.maximum(count, 1)[:, None], mean)
    log_mean = tl.where(several, tl.log(tl.where(mean < FLOOR, FLOOR, mean)), log_mean)
    # A comparison that NaN fails keeps NaN.
    return mean, tl.where(log_mean < LOG_FLOOR, LOG_FLOOR, log_mean)


@triton.jit
def better_of(best, column, values, columns):
    """``best`` and its ``column``, or larger ``values`` with theirs; of equals the first column."""
    is_better = (values > best) | ((values == best) & (columns < column))
    return tl.where(is_better, values, best), tl.where(is_better, columns, column)


@triton.jit
def best_of_lanes(best, column):
    """The largest of each chunk [CHUNKS, COLUMNS], and the first of its columns."""
    top = tl.max(best, axis=1)
    return top, tl.min(tl.where(best == top[:, None], column, 2147483647), axis=1)


@triton.jit
def residual_columns(
    number, residual_rows, columns_ptr, pairs, padded_width, IS_ALIGNED: tl.constexpr
):
    """Student columns of residual rows, and whether they are ``held`` in memory.

    In an aligned plan a multiple of 16 of them are: their masks are one, and a thread loads 16
    bytes.
    """
    if IS_ALIGNED:
        columns = pairs + number
        held = (number < residual_rows // 16 * 16) & (columns < padded_width)
    else:
        columns = tl.load(columns_ptr + number, mask=number < residual_rows, other=-1)
        held = columns >= 0
    return columns, held


@kernel(
    do_not_specialize=["rows", "first_chunk", "chunks", "sixteen_pairs", "residual_rows", "blocks"]
)
def residual_means_kernel(
    logits_ptr,
    order_ptr,
    chunk_ptr,
    row_stride,
    lse_ptr,
    rows,
    temperature,
    first_chunk,
    chunks,
    width,
    padded_width,
    columns_ptr,
    sixteen_pairs,
    residual_rows,
    out_ptr,
    blocks,
    IS_ALIGNED: tl.constexpr,
    HAS_TEMPERATURE: tl.constexpr,
    CHUNKS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Means of residual columns [G, R, CHUNKS]: of ``BLOCK`` of them, ``COLUMNS`` at once."""
    group = tl.program_id(0) // blocks
    block = tl.program_id(0) % blocks
    pairs = sixteen_pairs * 16
    out_ptr += group.to(tl.int64) * residual_rows * CHUNKS
    lane = tl.arange(0, CHUNKS)
    local = group * CHUNKS + lane
    begin = tl.load(chunk_ptr + first_chunk + local, mask=local < chunks, other=0)
    end = tl.load(chunk_ptr + first_chunk + local + 1, mask=local < chunks, other=0)
    count = end - begin
    most = tl.max(count, axis=0)
    share = 1.0 / tl.maximum(count, 1).to(tl.float32)
    first = tl.load(order_ptr + begin, mask=count > 0, other=0)
    first_peak = tl.load(lse_ptr + first, mask=count > 0, other=0.0)
    first_sum = tl.load(lse_ptr + rows + first, mask=count > 0, other=0.0) * LOG2_E
    for start in range(block * BLOCK, tl.minimum((block + 1) * BLOCK, residual_rows), COLUMNS):
        number = start + tl.arange(0, COLUMNS)
        exists = number < residual_rows
        columns, held = residual_columns(
            number, residual_rows, columns_ptr, pairs, padded_width, IS_ALIGNED
        )
        mean = row_shares(
            logits_ptr, first, row_stride, columns, count > 0, held, first_peak, first_sum,
            temperature, HAS_TEMPERATURE,
        )  # fmt: skip
        for step in range(1, most):
            has_row = step < count
            row = tl.load(order_ptr + begin + step, mask=has_row, other=0)
            peak = tl.load(lse_ptr + row, mask=has_row, other=0.0)
            log_sum = tl.load(lse_ptr + rows + row, mask=has_row, other=0.0) * LOG2_E
            mean += row_shares(
                logits_ptr, row, row_stride, columns, has_row, held, peak, log_sum, temperature,
                HAS_TEMPERATURE,
            )  # fmt: skip
        place = out_ptr + number[None, :] * CHUNKS + lane[:, None]
        mean = tl.where((columns < width)[None, :], mean * share[:, None], 0.0)
        tl.store(place, mean, mask=exists[None, :])


@triton.jit
def row_shares(
    logits_ptr,
    row,
    row_stride,
    columns,
    has_row,
    inside,
    peak,
    log_sum,
    temperature,
    HAS_TEMPERATURE: tl.constexpr,
):
    """Probabilities of a row of each chunk [CHUNKS, COLUMNS], 0 where there is none."""
    place = logits_ptr + row.to(tl.int64)[:, None] * row_stride + columns[None, :]
    wanted = has_row[:, None] & inside[None, :]
    loaded = tl.load(place, mask=wanted, other=-float("inf"))
    return tl.exp2(bits_of(loaded, peak[:, None], log_sum[:, None], temperature, HAS_TEMPERATURE))


@kernel(do_not_specialize=["value_rows", "out_rows", "blocks"])
def column_sums_kernel(
    value_ptr,
    value_rows,
    offsets_ptr,
    target_ptr,
    source_ptr,
    weight_ptr,
    blocks_ptr,
    out_ptr,
    out_rows,
    blocks,
    CHUNKS: tl.constexpr,
    SUMS: tl.constexpr,
    ENTRIES: tl.constexpr,
):
    """Sums of weighted rows of ``value`` [G, R, CHUNKS] in ``out`` [G, D, CHUNKS].

    A sparse matrix times a dense one; ``weight`` are its entries in the order of the sums, which
    are those of a block of ``Segments``. One of more
    than ``SUMS`` entries is alone, and reads ``ENTRIES`` of them at once.
    """
    group = tl.program_id(0) // blocks
    block = tl.program_id(0) % blocks
    value_ptr += group.to(tl.int64) * value_rows * CHUNKS
    out_ptr += group.to(tl.int64) * out_rows * CHUNKS
    first = tl.load(blocks_ptr + 2 * block)
    stop = tl.load(blocks_ptr + 2 * block + 1)
    lane = tl.arange(0, CHUNKS)
    step_of = tl.arange(0, SUMS)
    sums = first + step_of
    exists = sums < stop
    begin = tl.load(offsets_ptr + sums, mask=exists, other=0)
    end = tl.load(offsets_ptr + sums + 1, mask=exists, other=0)
    longest = tl.max(end - begin, axis=0)
    if longest <= SUMS:
        total = entry_sums(begin, end, longest, value_ptr, source_ptr, weight_ptr, CHUNKS, SUMS)
        target = tl.load(target_ptr + sums, mask=exists, other=0)
        place = target[:, None] * CHUNKS + lane[None, :]
        tl.store(out_ptr + place, total, mask=exists[:, None])
    else:
        alone = long_sum(
            tl.load(offsets_ptr + first), tl.load(offsets_ptr + first + 1), value_ptr, source_ptr,
            weight_ptr, CHUNKS, ENTRIES,
        )  # fmt: skip
        tl.store(out_ptr + tl.load(target_ptr + first) * CHUNKS + lane, alone)


@triton.jit
def long_sum(
    begin,
    end,
    value_ptr,
    source_ptr,
    weight_ptr,
    CHUNKS: tl.constexpr,
    ENTRIES: tl.constexpr,
):
    """One sum [CHUNKS] of weighted rows of ``value``, ``ENTRIES`` of them at once."""
    total = tl.zeros((ENTRIES, CHUNKS), tl.float32)
    for start in range(begin, end, ENTRIES):
        places = start + tl.arange(0, ENTRIES)
        inside = places < end
        source = tl.load(source_ptr + places, mask=inside, other=0)
        weight = tl.load(weight_ptr + places, mask=inside, other=0.0)
        place = value_ptr + source[:, None] * CHUNKS + tl.arange(0, CHUNKS)[None, :]
        total += weight[:, None] * tl.load(place, mask=inside[:, None], other=0.0)
    return tl.sum(total, axis=0)


@triton.jit
def entry_sums(
    begin,
    end,
    longest,
    value_ptr,
    source_ptr,
    weight_ptr,
    CHUNKS: tl.constexpr,
    SUMS: tl.constexpr,
):
    """Sums [SUMS, CHUNKS] of weighted rows of ``value`` over entries from ``begin`` to ``end``.

    Four entries of each are read at once, so that one read does not wait for another.
    """
    total = tl.zeros((SUMS, CHUNKS), tl.float32)
    for step in range(0, longest, 4):
        for more in tl.static_range(4):
            number = begin + step + more
            inside = number < end
            source = tl.load(source_ptr + number, mask=inside, other=0)
            weight = tl.load(weight_ptr + number, mask=inside, other=0.0)
            place = value_ptr + source[:, None] * CHUNKS + tl.arange(0, CHUNKS)[None, :]
            total += weight[:, None] * tl.load(place, mask=inside[:, None], other=0.0)
    return total


@kernel(
    do_not_specialize=[
        "slots", "residual_rows", "rows", "first_chunk", "chunks", "sixteen_pairs", "blocks",
    ]
)  # fmt: skip
def residual_gradients_kernel(
    slope_ptr,
    slots,
    offsets_ptr,
    source_ptr,
    weight_ptr,
    residual_ptr,
    residual_rows,
    student_ptr,
    order_ptr,
    chunk_ptr,
    row_stride,
    lse_ptr,
    rows,
    temperature,
    first_chunk,
    chunks,
    width,
    padded_width,
    columns_ptr,
    sixteen_pairs,
    row_mass_ptr,
    is_scaled_ptr,
    mass_ptr,
    grad_scale_ptr,
    gradient_ptr,
    gradient_stride,
    plain_lse_ptr,
    label_ptr,
    label_weight_ptr,
    blocks,
    HAS_SINGLES: tl.constexpr,
    IS_ALIGNED: tl.constexpr,
    HAS_GRADIENT: tl.constexpr,
    HAS_LABELS: tl.constexpr,
    HAS_TEMPERATURE: tl.constexpr,
    CHUNKS: tl.constexpr,
    SUMS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """``W f`` of ``BLOCK`` residual rows and a group's chunks, ``SUMS`` at once.

    Of chunks of ``single_kernel`` it goes into the gradient of the residual columns, of the others
    to ``residual`` [C', R]. ``slope`` is [G, D, CHUNKS].
    """
    group = tl.program_id(0) // blocks
    block = tl.program_id(0) % blocks
    pairs = sixteen_pairs * 16
    slope_ptr += group.to(tl.int64) * slots * CHUNKS
    local = group * CHUNKS + tl.arange(0, CHUNKS)
    is_chunk = local < chunks
    chunk = first_chunk + local
    single = is_chunk & HAS_SINGLES
    if HAS_SINGLES:
        first = tl.load(chunk_ptr + chunk, mask=is_chunk, other=0)
        count = tl.load(chunk_ptr + chunk + 1, mask=is_chunk, other=0) - first
        grad_scale = tl.load(grad_scale_ptr + chunk, mask=is_chunk, other=0.0)
        is_scaled = tl.load(is_scaled_ptr + chunk, mask=is_chunk, other=0)
        single = is_chunk & is_single(count, is_scaled, grad_scale)
    is_stored = is_chunk & (single == 0)
    stores = tl.max(is_stored.to(tl.int32), axis=0) > 0
    if HAS_GRADIENT & HAS_SINGLES:
        row = tl.load(order_ptr + first, mask=single, other=0)
        mass = tl.load(mass_ptr + chunk, mask=single, other=1.0)
        peak = tl.load(lse_ptr + row, mask=single, other=0.0)
        log_sum = tl.load(lse_ptr + rows + row, mask=single, other=0.0) * LOG2_E + tl.log2(mass)
        factor = temperature * grad_scale
        label_factor = 0.0 * mass
        if HAS_LABELS:
            label = tl.load(label_ptr + row, mask=single, other=-1).to(tl.int32)
            label_weight = tl.load(label_weight_ptr + row, mask=single, other=0.0)
            if HAS_TEMPERATURE:
                plain_peak = tl.load(plain_lse_ptr + row, mask=single, other=0.0)
                plain_sum = tl.load(plain_lse_ptr + rows + row, mask=single, other=0.0) * LOG2_E
            else:
                label_factor = label_weight * mass
    for start in range(block * BLOCK, tl.minimum((block + 1) * BLOCK, residual_rows), SUMS):
        number = start + tl.arange(0, SUMS)
        exists = number < residual_rows
        begin = tl.load(offsets_ptr + number, mask=exists, other=0)
        end = tl.load(offsets_ptr + number + 1, mask=exists, other=0)
        longest = tl.max(end - begin, axis=0)
        total = entry_sums(begin, end, longest, slope_ptr, source_ptr, weight_ptr, CHUNKS, SUMS)
        if stores:
            place = local.to(tl.int64)[None, :] * residual_rows + number[:, None]
            tl.store(residual_ptr + place, total, mask=exists[:, None] & is_stored[None, :])
        if HAS_GRADIENT & HAS_SINGLES:
            columns, held = residual_columns(
                number, residual_rows, columns_ptr, pairs, padded_width, IS_ALIGNED
            )
            written = held[:, None] & single[None, :]
            place = student_ptr + row.to(tl.int64)[None, :] * row_stride + columns[:, None]
            loaded = tl.load(place, mask=written, other=0.0)
            log_q = bits_of(loaded, peak[None, :], log_sum[None, :], temperature, HAS_TEMPERATURE)
            row_mass = tl.load(row_mass_ptr + columns, mask=held, other=0.0)
            out = (total + row_mass[:, None]) * factor[None, :] + label_factor[None, :]
            out = out * tl.exp2(log_q)
            if HAS_LABELS:
                if HAS_TEMPERATURE:
                    plain = bits_of(loaded, plain_peak[None, :], plain_sum[None, :], 1.0, False)
                    out += label_weight[None, :] * tl.exp2(plain)
                is_label = columns[:, None] == label[None, :]
                out -= tl.where(is_label, label_weight[None, :], 0.0)
            out = tl.where((columns < width)[:, None], out, 0.0)
            # After every thread has read what the gradient may overwrite.
            tl.debug_barrier()
            place = gradient_ptr + row.to(tl.int64)[None, :] * gradient_stride + columns[:, None]
            tl.store(place, out.to(gradient_ptr.dtype.element_ty), mask=written)


@kernel(
    do_not_specialize=[
        "rows", "first_chunk", "slots", "crossing", "crossed_plane", "chunks", "partial_blocks",
        "partial_plane", "rest_plane", "blocks",
    ]
)  # fmt: skip
def summed_slopes_kernel(
    logits_ptr,
    order_ptr,
    chunk_ptr,
    row_stride,
    lse_ptr,
    rows,
    temperature,
    first_chunk,
    home_ptr,
    slots,
    crossing,
    crossed_ptr,
    crossed_plane,
    chunks,
    scratch_ptr,
    mass_ptr,
    threshold_ptr,
    rest_ptr,
    rest_plane,
    mixture,
    partial_ptr,
    best_ptr,
    partial_blocks,
    partial_plane,
    blocks,
    DIRECTION: tl.constexpr,
    PASS: tl.constexpr,
    HAS_REST: tl.constexpr,
    HAS_CROSSING: tl.constexpr,
    HAS_DIAGNOSTICS: tl.constexpr,
    HAS_TEMPERATURE: tl.constexpr,
    CHUNKS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """``dD/dQ`` of summed columns in place of their ``Q~`` [G, D, CHUNKS], and their terms of D.

    Of a group's ``BLOCK`` slots, ``COLUMNS`` at once. ``crossed`` [2, G, X, CHUNKS] holds ``Q~``
    and ``P`` of the crossing ones, over all ranks. Pass "rest", before pass "values" with
    ``vocab_topk``, is that of ``sweep_kernel``, and writes nothing else.
    """
    group = tl.program_id(0) // blocks
    block = tl.program_id(0) % blocks
    local = group * CHUNKS + tl.arange(0, CHUNKS)
    is_chunk = local < chunks
    lane = tl.arange(0, CHUNKS)[:, None]
    mass = tl.load(mass_ptr + first_chunk + local, mask=is_chunk, other=1.0)[:, None]
    if HAS_REST:
        threshold = tl.load(threshold_ptr + first_chunk + local, mask=is_chunk, other=0.0)[:, None]
        rest = rest_ptr + first_chunk + local
        rest_p = tl.load(rest, mask=is_chunk, other=0.0)[:, None]
        rest_q = tl.load(rest + rest_plane, mask=is_chunk, other=0.0)[:, None]
    total = tl.zeros((CHUNKS, COLUMNS), tl.float32)
    entropy = tl.zeros((CHUNKS, COLUMNS), tl.float32)
    best_p = tl.full((CHUNKS, COLUMNS), -1.0, tl.float32)
    best_q = tl.full((CHUNKS, COLUMNS), -1.0, tl.float32)
    column_p = tl.zeros((CHUNKS, COLUMNS), tl.int32)
    column_q = tl.zeros((CHUNKS, COLUMNS), tl.int32)
    for start in range(0, tl.minimum(BLOCK, slots - block * BLOCK), COLUMNS):
        slot = block * BLOCK + start + tl.arange(0, COLUMNS)
        exists = slot < slots
        home = tl.load(home_ptr + slot, mask=exists, other=-1)
        is_own = (home >= 0) & (slot >= crossing)
        p, log_p = group_means(
            logits_ptr,
            order_ptr,
            chunk_ptr,
            first_chunk + group * CHUNKS,
            first_chunk + chunks,
            row_stride,
            home,
            is_own,
            lse_ptr,
            rows,
            temperature,
            HAS_TEMPERATURE,
            CHUNKS,
            COLUMNS,
        )
        place = (group.to(tl.int64) * slots + slot)[None, :] * CHUNKS + lane
        projected = tl.load(scratch_ptr + place, mask=exists[None, :], other=0.0)
        if HAS_CROSSING:
            crosses = (slot < crossing)[None, :]
            crossed = (group.to(tl.int64) * crossing + slot)[None, :] * CHUNKS + lane
            arrived = tl.load(crossed_ptr + crossed, mask=crosses, other=0.0)
            projected = tl.where(crosses, arrived, projected)
            arrived = tl.load(crossed_ptr + crossed_plane + crossed, mask=crosses, other=0.0)
            p = tl.where(crosses, arrived, p)
            log_p = tl.where(crosses, tl.log(tl.where(p < FLOOR, FLOOR, p)), log_p)
        log_projected = tl.log(tl.where(projected < FLOOR, FLOOR, projected))
        counted = (home >= 0)[None, :]
        if HAS_REST:
            in_rest = p < threshold
        if PASS == "rest":
            # The two sums of this pass.
            total += tl.where(counted & in_rest, p, 0.0)
            entropy += tl.where(counted & in_rest, projected, 0.0)
        elif HAS_REST:
            value, slope = kept_terms(
                p, log_p, projected, log_projected, in_rest, rest_p, rest_q, mass, mixture,
                DIRECTION,
            )  # fmt: skip
        else:
            value, slope = projected_terms(
                p, log_p, projected, log_projected, mass, mixture, DIRECTION
            )
        if PASS == "values":
            total += tl.where(counted, value, 0.0)
            # Where a tile has fewer elements than there are threads, several warps load each.
            tl.debug_barrier()
            tl.store(scratch_ptr + place, slope, mask=exists[None, :])
        if HAS_DIAGNOSTICS & (PASS == "values"):
            entropy -= tl.where(counted, p * log_p, 0.0)
            columns = home[None, :]
            best_p, column_p = better_of(best_p, column_p, tl.where(counted, p, -1.0), columns)
            said = tl.where(counted, projected, -1.0)
            best_q, column_q = better_of(best_q, column_q, said, columns)
    place = local * partial_blocks + block
    plane = partial_plane
    tl.store(partial_ptr + place, tl.sum(total, axis=1), mask=is_chunk)
    if HAS_DIAGNOSTICS | (PASS == "rest"):
        tl.store(partial_ptr + plane + place, tl.sum(entropy, axis=1), mask=is_chunk)
    if HAS_DIAGNOSTICS & (PASS == "values"):
        top, column = best_of_lanes(best_p, column_p)
        tl.store(partial_ptr + 2 * plane + place, top, mask=is_chunk)
        tl.store(best_ptr + place, column, mask=is_chunk)
        top, column = best_of_lanes(best_q, column_q)
        tl.store(partial_ptr + 3 * plane + place, top, mask=is_chunk)
        tl.store(best_ptr + plane + place, column, mask=is_chunk)


@kernel(do_not_specialize=["rows", "first_chunk", "chunks", "crossing", "block_count"])
def crossing_teacher_kernel(
    logits_ptr,
    order_ptr,
    chunk_ptr,
    row_stride,
    lse_ptr,
    rows,
    temperature,
    first_chunk,
    chunks,
    home_ptr,
    crossing,
    block_count,
    out_ptr,
    HAS_TEMPERATURE: tl.constexpr,
    CHUNKS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """``P`` of the crossing columns that this rank holds, 0 at others: [G, X, CHUNKS]."""
    pid = tl.program_id(0)
    group = pid // block_count
    slots = (pid % block_count) * COLUMNS + tl.arange(0, COLUMNS)
    exists = slots < crossing
    home = tl.load(home_ptr + slots, mask=exists, other=-1)
    p, _ = group_means(
        logits_ptr,
        order_ptr,
        chunk_ptr,
        first_chunk + group * CHUNKS,
        first_chunk + chunks,
        row_stride,
        home,
        home >= 0,
        lse_ptr,
        rows,
        temperature,
        HAS_TEMPERATURE,
        CHUNKS,
        COLUMNS,
    )
    place = (group.to(tl.int64) * crossing + slots) * CHUNKS
    place = out_ptr + place[None, :] + tl.arange(0, CHUNKS)[:, None]
    tl.store(place, p, mask=exists[None, :])
