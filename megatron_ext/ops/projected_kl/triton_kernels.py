"""Triton kernels of the projected KL: chunks of several student rows, and other directions.

Rows of chunk c of a side are ``order[offsets[c]:offsets[c + 1]]``. Tiles hold chunks from
``first_chunk`` on; scratch is indexed by the chunk within the tile. Programs of one chunk are
adjacent, so that its rows stay in the cache. Equations are those of the README.
"""

import math

import triton
import triton.language as tl

from megatron_ext.ops.kernel import kernel
from megatron_ext.ops.projected_kl.single_kernel import is_single
from megatron_ext.ops.triton_math import FLOOR, kept_terms, projected_terms, row_values, scaled

LOG_FLOOR = tl.constexpr(math.log(1024 * 1.1754943508222875e-38))


@triton.jit
def probabilities(
    logits_ptr,
    row,
    row_stride,
    columns,
    held,
    inside,
    lse_ptr,
    rows,
    temperature,
    HAS_TEMPERATURE: tl.constexpr,
):
    """Log-probabilities of a row at ``columns``, -inf outside. ``lse`` is [2, T]."""
    start = logits_ptr + row.to(tl.int64) * row_stride
    loaded = row_values(start, columns, held, inside)
    peak = tl.load(lse_ptr + row)
    log_sum = tl.load(lse_ptr + rows + row)
    return scaled(loaded, temperature, HAS_TEMPERATURE) - peak - log_sum


@triton.jit
def chunk_mean(
    logits_ptr,
    order_ptr,
    begin,
    end,
    row_stride,
    columns,
    held,
    inside,
    lse_ptr,
    rows,
    temperature,
    HAS_TEMPERATURE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Mean probability of a chunk's rows at ``columns``, 0 outside, and its logarithm.

    With a single row the logarithm is that of the row itself; both values are clamped to the floor.
    """
    log_mean = tl.full((BLOCK,), -float("inf"), tl.float32)
    mean = tl.zeros((BLOCK,), tl.float32)
    for place in range(begin, end):
        row = tl.load(order_ptr + place)
        log_mean = probabilities(
            logits_ptr,
            row,
            row_stride,
            columns,
            held,
            inside,
            lse_ptr,
            rows,
            temperature,
            HAS_TEMPERATURE,
        )
        mean += tl.exp(log_mean)
    if end - begin > 1:
        mean = mean / (end - begin)
        log_mean = tl.log(tl.where(mean < FLOOR, FLOOR, mean))
    # A comparison that NaN fails keeps NaN.
    log_mean = tl.where(log_mean < LOG_FLOOR, LOG_FLOOR, log_mean)
    return mean, log_mean


@triton.jit
def best_of(values, columns):
    """The largest value and the first of its columns."""
    best = tl.max(values, axis=0)
    return best, tl.min(tl.where(values == best, columns, 2147483647), axis=0)


@triton.jit
def store_partials(
    partial_ptr,
    best_ptr,
    place,
    stride,
    value,
    p,
    log_p,
    projected,
    columns,
    counted,
    HAS_DIAGNOSTICS: tl.constexpr,
):
    """Store a block's terms: ``partial`` [4, C', blocks] and columns [2, C', blocks]."""
    tl.store(partial_ptr + place, tl.sum(tl.where(counted, value, 0.0), axis=0))
    if HAS_DIAGNOSTICS:
        tl.store(partial_ptr + stride + place, tl.sum(tl.where(counted, -p * log_p, 0.0), axis=0))
        best_p, column_p = best_of(tl.where(counted, p, -1.0), columns)
        best_q, column_q = best_of(tl.where(counted, projected, -1.0), columns)
        tl.store(partial_ptr + 2 * stride + place, best_p)
        tl.store(partial_ptr + 3 * stride + place, best_q)
        tl.store(best_ptr + place, column_p)
        tl.store(best_ptr + stride + place, column_q)


@triton.jit
def with_labels(
    logit_gradient,
    loaded,
    log_q,
    row,
    columns,
    plain_lse_ptr,
    rows,
    label_ptr,
    label_weight_ptr,
    HAS_TEMPERATURE: tl.constexpr,
):
    """``logit_gradient`` plus that of the row's cross-entropy, at temperature 1."""
    weight = tl.load(label_weight_ptr + row)
    out = logit_gradient
    if weight != 0.0:
        if HAS_TEMPERATURE:
            peak = tl.load(plain_lse_ptr + row)
            log_sum = tl.load(plain_lse_ptr + rows + row)
            log_q = loaded - peak - log_sum
        label = tl.load(label_ptr + row)
        out = out + weight * (tl.exp(log_q) - tl.where(columns == label, 1.0, 0.0))
    return out


@triton.jit
def chunk_centre(dots_ptr, order_ptr, begin, end, mass):
    """``sum_u Q_c[u] f[u]``, from the products ``dots`` [T] of the chunk's rows with ``W f``."""
    total = 0.0
    for place in range(begin, end):
        total += tl.load(dots_ptr + tl.load(order_ptr + place))
    return total / (tl.maximum(end - begin, 1) * mass)


@kernel(
    do_not_specialize=[
        "student_rows",
        "teacher_rows",
        "first_chunk",
        "chunks",
        "partial_blocks",
        "partial_plane",
        "first_block",
        "rest_plane",
        "dots_plane",
        "block_count",
        "parts",
    ]
)
def sweep_kernel(
    student_ptr,
    student_order_ptr,
    student_chunk_ptr,
    student_stride,
    student_lse_ptr,
    student_rows,
    carried_lse_ptr,
    is_scaled_ptr,
    width,
    padded_width,
    teacher_ptr,
    teacher_order_ptr,
    teacher_chunk_ptr,
    teacher_stride,
    teacher_lse_ptr,
    teacher_rows,
    temperature,
    first_chunk,
    chunks,
    partner_ptr,
    row_mass_ptr,
    residual_ptr,
    residual_stride,
    mass_ptr,
    threshold_ptr,
    rest_ptr,
    rest_plane,
    mixture,
    partial_ptr,
    best_ptr,
    partial_blocks,
    partial_plane,
    first_block,
    dots_ptr,
    dots_plane,
    grad_scale_ptr,
    gradient_ptr,
    gradient_stride,
    plain_lse_ptr,
    label_ptr,
    label_weight_ptr,
    block_count,
    parts,
    DIRECTION: tl.constexpr,
    PASS: tl.constexpr,
    HAS_REST: tl.constexpr,
    HAS_DOTS: tl.constexpr,
    HAS_GRADIENT: tl.constexpr,
    HAS_DIAGNOSTICS: tl.constexpr,
    HAS_LABELS: tl.constexpr,
    HAS_TEMPERATURE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Pass over every column of the student of chunks that ``single_kernel`` leaves.

    A chunk's ``parts`` programs take its blocks of columns in turn. What is compared elsewhere
    stores nothing: ``partial`` is what no column gives before.

    Pass "values": direct pairs' terms of D; for chunks whose gradient is known by then (forward,
    one student row) the gradient, for others each row's ``sum q W f`` and ``sum q W 1`` of the
    block, ``dots`` [2, T, blocks]. Pass "gradient": the gradient of these others, from ``dots``
    [2, T], their sums. Columns between ``width`` and ``padded_width`` are padding, which
    has neither partner nor mass and gets 0.

    With ``vocab_topk``, all chunks are left to this kernel, ``threshold`` and ``rest`` are those of
    ``KeptColumns``, and pass "rest" stores a block's part of the latter in the first two planes of
    ``partial``.

    Columns with an entry are read under ``carried_lse``, which differs from the rows' log-sum-exp
    in chunks that are scaled up. There the others alone get a part in ``q . W f``.
    """
    pid = tl.program_id(0)
    chunk = pid // parts
    part = pid % parts
    begin = tl.load(student_chunk_ptr + first_chunk + chunk)
    end = tl.load(student_chunk_ptr + first_chunk + chunk + 1)
    is_known = (end - begin == 1) & (DIRECTION == "forward")
    works = True
    if PASS == "gradient":
        works = end - begin > 1
        if DIRECTION != "forward":
            works = end > begin
    elif (DIRECTION == "forward") & (not HAS_REST):
        is_scaled = tl.load(is_scaled_ptr + first_chunk + chunk)
        works = not is_single(end - begin, is_scaled, tl.load(grad_scale_ptr + first_chunk + chunk))
    first = tl.where(works, part, block_count)
    for block in range(first, block_count, parts):
        columns = block * BLOCK + tl.arange(0, BLOCK)
        inside = columns < width
        held = columns < padded_width
        partner = tl.load(partner_ptr + columns, mask=held, other=-1)
        is_direct = partner >= 0
        teacher_begin = tl.load(teacher_chunk_ptr + first_chunk + chunk)
        teacher_end = tl.load(teacher_chunk_ptr + first_chunk + chunk + 1)
        p, log_p = chunk_mean(
            teacher_ptr,
            teacher_order_ptr,
            teacher_begin,
            teacher_end,
            teacher_stride,
            partner,
            is_direct,
            is_direct,
            teacher_lse_ptr,
            teacher_rows,
            temperature,
            HAS_TEMPERATURE,
            BLOCK,
        )
        q, log_q = chunk_mean(
            student_ptr,
            student_order_ptr,
            begin,
            end,
            student_stride,
            columns,
            held,
            inside,
            carried_lse_ptr,
            student_rows,
            temperature,
            HAS_TEMPERATURE,
            BLOCK,
        )
        mass = tl.load(mass_ptr + first_chunk + chunk)
        if HAS_REST:
            in_rest = is_direct & (p < tl.load(threshold_ptr + first_chunk + chunk))
        if PASS == "rest":
            place = partial_ptr + chunk * partial_blocks + first_block + block
            tl.store(place, tl.sum(tl.where(in_rest, p, 0.0), axis=0))
            tl.store(place + partial_plane, tl.sum(tl.where(in_rest, q, 0.0), axis=0))
        elif HAS_REST:
            rest = rest_ptr + first_chunk + chunk
            value, slope = kept_terms(
                p,
                log_p,
                q,
                log_q,
                in_rest,
                tl.load(rest),
                tl.load(rest + rest_plane),
                mass,
                mixture,
                DIRECTION,
            )
        else:
            value, slope = projected_terms(p, log_p, q, log_q, mass, mixture, DIRECTION)
        if PASS == "values":
            store_partials(
                partial_ptr,
                best_ptr,
                chunk * partial_blocks + first_block + block,
                partial_plane,
                value,
                p,
                log_p,
                q,
                partner,
                is_direct,
                HAS_DIAGNOSTICS,
            )
        if HAS_DOTS:
            is_residual = partner < -1
            is_mapped = is_direct | is_residual
            is_scaled = tl.load(is_scaled_ptr + first_chunk + chunk) != 0
            residual = residual_ptr + chunk.to(tl.int64) * residual_stride - 2 - partner
            carried = tl.where(is_direct, slope, tl.load(residual, mask=is_residual, other=0.0))
            row_mass = tl.load(row_mass_ptr + columns, mask=held, other=0.0)
            grad_scale = tl.load(grad_scale_ptr + first_chunk + chunk)
            scale = temperature * grad_scale / (tl.maximum(end - begin, 1) * mass)
            centre = -1.0
            if (PASS == "gradient") & (DIRECTION != "forward"):
                centre = chunk_centre(dots_ptr, student_order_ptr, begin, end, mass)
            for place in range(begin, end):
                row = tl.load(student_order_ptr + place).to(tl.int64)
                start = student_ptr + row * student_stride
                loaded = row_values(start, columns, held, inside)
                peak = tl.load(student_lse_ptr + row)
                log_sum = tl.load(student_lse_ptr + student_rows + row)
                row_log_q = scaled(loaded, temperature, HAS_TEMPERATURE) - peak - log_sum
                row_q = tl.exp(row_log_q)
                if is_scaled:
                    carried_peak = tl.load(carried_lse_ptr + row)
                    carried_log_sum = tl.load(carried_lse_ptr + student_rows + row)
                    mapped_log_q = scaled(loaded, temperature, HAS_TEMPERATURE) - carried_peak
                    mapped_q = tl.exp(mapped_log_q - carried_log_sum)
                    row_q = tl.where(is_mapped, mapped_q, row_q)
                writes = False
                off_centre = carried - centre * row_mass
                if (PASS == "values") & HAS_GRADIENT:
                    writes = is_known
                if PASS == "gradient":
                    dot = tl.load(dots_ptr + row)
                    mapped = tl.load(dots_ptr + student_rows + row)
                    mapped_only = off_centre
                    off_centre = off_centre - (dot - centre * mapped)
                    if is_scaled:
                        off_centre = tl.where(is_mapped, mapped_only, off_centre)
                    writes = True
                if HAS_GRADIENT:
                    written = gradient_ptr + row * gradient_stride + columns
                    if writes:
                        out = row_q * off_centre * scale
                        out = tl.where(grad_scale == 0.0, 0.0, out)
                        if HAS_LABELS:
                            out = with_labels(
                                out,
                                loaded,
                                row_log_q,
                                row,
                                columns,
                                plain_lse_ptr,
                                student_rows,
                                label_ptr,
                                label_weight_ptr,
                                HAS_TEMPERATURE,
                            )
                        out = tl.where(inside, out, 0.0)
                        tl.store(written, out.to(gradient_ptr.dtype.element_ty), mask=held)
                if not writes:
                    summed = dots_ptr + row * block_count + block
                    tl.store(summed, tl.sum(row_q * carried, axis=0))
                    tl.store(summed + dots_plane, tl.sum(row_q * row_mass, axis=0))


@kernel(do_not_specialize=["chunk_count", "rows", "block_count"])
def outside_kernel(
    student_ptr,
    order_ptr,
    chunk_ptr,
    chunk_count,
    student_stride,
    rows,
    width,
    padded_width,
    gradient_ptr,
    gradient_stride,
    plain_lse_ptr,
    label_ptr,
    label_weight_ptr,
    block_count,
    HAS_LABELS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Gradient of rows of no chunk: their cross-entropy's, or 0.

    Programs take the rows' blocks in turn: how many there are, the host does not know.
    """
    first = tl.load(chunk_ptr + chunk_count)
    for item in range(tl.program_id(0), (rows - first) * block_count, tl.num_programs(0)):
        row = tl.load(order_ptr + first + item // block_count).to(tl.int64)
        columns = (item % block_count) * BLOCK + tl.arange(0, BLOCK)
        inside = columns < width
        out = tl.zeros((BLOCK,), tl.float32)
        if HAS_LABELS:
            start = student_ptr + row * student_stride
            loaded = row_values(start, columns, columns < padded_width, inside)
            out = with_labels(
                out,
                loaded,
                out,
                row,
                columns,
                plain_lse_ptr,
                rows,
                label_ptr,
                label_weight_ptr,
                True,
            )
        out = tl.where(inside, out, 0.0).to(gradient_ptr.dtype.element_ty)
        written = gradient_ptr + row * gradient_stride + columns
        tl.store(written, out, mask=columns < padded_width)


@kernel(
    do_not_specialize=["rows", "first_chunk", "chunks", "entries", "slots", "share", "block_count"]
)
def entry_gradient_kernel(
    student_ptr,
    order_ptr,
    chunk_ptr,
    student_stride,
    lse_ptr,
    rows,
    temperature,
    first_chunk,
    chunks,
    row_ptr,
    column_ptr,
    slot_ptr,
    entries,
    slope_ptr,
    slots,
    dots_ptr,
    mass_ptr,
    grad_scale_ptr,
    share,
    block_count,
    out_ptr,
    DIRECTION: tl.constexpr,
    HAS_TEMPERATURE: tl.constexpr,
    CHUNKS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Equation 11 without tau^2, of ``share`` chunks a program: [shares, N].

    An entry in a column that has no slot gives NaN.
    """
    pid = tl.program_id(0)
    part = pid // block_count
    entry = (pid % block_count) * BLOCK + tl.arange(0, BLOCK)
    exists = entry < entries
    source = tl.load(row_ptr + entry, mask=exists, other=0)
    column = tl.load(column_ptr + entry, mask=exists, other=0)
    slot = tl.load(slot_ptr + column, mask=exists, other=-1)
    has_slot = exists & (slot >= 0)
    total = tl.zeros((BLOCK,), tl.float32)
    for chunk in range(part * share, tl.minimum((part + 1) * share, chunks)):
        grad_scale = tl.load(grad_scale_ptr + first_chunk + chunk)
        begin = tl.load(chunk_ptr + first_chunk + chunk)
        end = tl.load(chunk_ptr + first_chunk + chunk + 1)
        if grad_scale != 0.0:
            wide_chunk = tl.full((), 0, tl.int64) + chunk
            place = (wide_chunk // CHUNKS * slots + slot) * CHUNKS + wide_chunk % CHUNKS
            slope = tl.load(slope_ptr + place, mask=has_slot, other=float("nan"))
            mass = tl.load(mass_ptr + first_chunk + chunk)
            centre = -1.0
            if DIRECTION != "forward":
                centre = chunk_centre(dots_ptr, order_ptr, begin, end, mass)
            factor = (slope - centre) * (grad_scale / (tl.maximum(end - begin, 1) * mass))
            for place_of_row in range(begin, end):
                row = tl.load(order_ptr + place_of_row)
                log_q = probabilities(
                    student_ptr,
                    row,
                    student_stride,
                    source,
                    exists,
                    exists,
                    lse_ptr,
                    rows,
                    temperature,
                    HAS_TEMPERATURE,
                )
                total += factor * tl.exp(log_q)
    tl.store(out_ptr + part.to(tl.int64) * entries + entry, total, mask=exists)
