"""Triton kernel of the forward projected KL of chunks with one student row, which most chunks are.

Their gradient needs no sum over columns, so that one pass gives it. With the row's mapped mass
``m``, ``n = q / m``, the chunk's weight ``b``, the label's ``w``, and sums ``W f`` and ``W 1`` of a
column's entries (README, equations 6 to 8):

    direct pair        n b + q w - b p
    residual column    n b (W f + W 1) + q w
    no entry           q w

A plan whose direct pairs are the first columns of both models, in one order, and whose residual
columns follow them (``ColumnPlan.pairs``) is read by contiguous loads alone; that is what the
co-sharded order of the heads gives. Others gather the teacher's columns.
"""

import math

import triton
import triton.language as tl

from megatron_ext.ops.kernel import kernel
from megatron_ext.ops.triton_math import LN_2, LOG2_E, LOWEST, row_bits, scaled, widened

FLOOR_BITS = tl.constexpr(math.log2(1024 * 1.1754943508222875e-38))
NO_COLUMN = tl.constexpr(2**31 - 1)


@triton.jit
def is_single(student_rows, is_scaled, grad_scale):
    """Whether ``single_kernel`` evaluates a chunk, and ``sweep_kernel`` leaves it out."""
    return (student_rows == 1) & (is_scaled == 0) & (grad_scale != 0.0)


@triton.jit
def bits_of(logits, peak, log_sum, temperature, HAS_TEMPERATURE: tl.constexpr):
    """``row_bits`` of logits over a temperature.

    Of 16 bits: one instruction, whose constant is rounded: to ``2^-23`` of the peak, less than
    the logits are.
    """
    if logits.dtype == tl.float32:
        bits = row_bits(scaled(logits, temperature, HAS_TEMPERATURE), peak, log_sum)
    else:
        factor = LOG2_E
        if HAS_TEMPERATURE:
            factor = LOG2_E / temperature
        bits = widened(logits) * factor - (peak * LOG2_E + log_sum)
    return bits


@triton.jit
def teacher_mean(
    p,
    columns,
    inside,
    logits_ptr,
    order_ptr,
    begin,
    end,
    row_stride,
    lse_ptr,
    rows,
    temperature,
    HAS_TEMPERATURE: tl.constexpr,
):
    """Mean over a chunk's rows of probabilities at ``columns``; ``p`` is the first row's."""
    for place in range(begin + 1, end):
        row = tl.load(order_ptr + place)
        start = logits_ptr + row.to(tl.int64) * row_stride
        loaded = tl.load(start + columns, mask=inside, other=-float("inf"))
        log_sum = tl.load(lse_ptr + rows + row) * LOG2_E
        p += tl.exp2(bits_of(loaded, tl.load(lse_ptr + row), log_sum, temperature, HAS_TEMPERATURE))
    return p / (end - begin)


@triton.jit
def kept_best(best, kept, start_of, values, start):
    """Largest value of each lane, the values of its block, and where that starts."""
    top = tl.max(values, axis=1)
    is_new = top > best
    kept = tl.where(is_new[:, None], values, kept)
    return tl.maximum(best, top), kept, tl.where(is_new, start, start_of)


@triton.jit
def best_column(best, kept, start_of, places):
    """The largest value of all lanes, and the first of its columns."""
    top = tl.max(best, axis=0)
    columns = tl.where(kept == top, start_of[:, None] + places, NO_COLUMN)
    return top, tl.min(tl.min(columns, axis=1), axis=0)


@triton.jit
def best_pair(
    row_ptr, column, pairs, part, PARTS: tl.constexpr, K: tl.constexpr, LANES: tl.constexpr
):
    """First column of a part's largest logit among the direct ``pairs``, of an aligned plan.

    ``column`` is that of the whole row, which it is for most rows and for the part that has it.
    ``NO_COLUMN`` without pairs, and for the other parts.
    """
    BLOCK: tl.constexpr = LANES * K
    if column < pairs:
        column = tl.where(column // BLOCK % PARTS == part, column, NO_COLUMN)
    else:
        # Twice: few rows have their largest logit elsewhere, and values kept take registers.
        places = tl.arange(0, LANES)[:, None] * K + tl.arange(0, K)[None, :]
        best = tl.full((LANES,), LOWEST, tl.float32)
        for start in range(part * BLOCK, pairs, PARTS * BLOCK):
            loaded = widened(tl.load(row_ptr + start + places))
            best = tl.maximum(best, tl.max(loaded, axis=1))
        top = tl.max(best, axis=0)
        first = tl.full((LANES,), NO_COLUMN, tl.int32)
        for start in range(part * BLOCK, pairs, PARTS * BLOCK):
            loaded = widened(tl.load(row_ptr + start + places))
            found = tl.where(loaded == top, start + places, NO_COLUMN)
            first = tl.minimum(first, tl.min(found, axis=1))
        column = tl.where(top == LOWEST, NO_COLUMN, tl.min(first, axis=0))
    return column


@triton.jit
def pairs_of_row(
    part,
    student_ptr,
    peak,
    log_sum,
    mass,
    width,
    padded_width,
    teacher_ptr,
    teacher_order_ptr,
    teacher_begin,
    teacher_end,
    teacher_stride,
    teacher_lse_ptr,
    teacher_rows,
    temperature,
    partner_ptr,
    pairs,
    mapped,
    row_mass_ptr,
    grad_scale,
    gradient_ptr,
    plain_peak,
    plain_sum,
    label,
    label_weight,
    top_column,
    teacher_column_ptr,
    SEVERAL: tl.constexpr,
    IS_ALIGNED: tl.constexpr,
    HAS_GRADIENT: tl.constexpr,
    HAS_DIAGNOSTICS: tl.constexpr,
    HAS_LABELS: tl.constexpr,
    HAS_TEMPERATURE: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Terms of D and of the entropy, largest P and Q~ and their teacher columns, of one row's part.

    ``student`` and ``gradient`` begin at the row. -1 stands for a part without a direct pair.
    """
    K: tl.constexpr = 8
    LANES: tl.constexpr = BLOCK // K
    lowest = FLOOR_BITS - tl.log2(mass)
    teacher_row = tl.load(teacher_order_ptr + teacher_begin)
    first_teacher_ptr = teacher_ptr + teacher_row.to(tl.int64) * teacher_stride
    teacher_peak = tl.load(teacher_lse_ptr + teacher_row)
    teacher_sum = tl.load(teacher_lse_ptr + teacher_rows + teacher_row) * LOG2_E
    factor = temperature * grad_scale
    label_factor = 0.0
    if HAS_LABELS & (not HAS_TEMPERATURE):
        label_factor = label_weight * mass
    # What is read here the gradient may overwrite, by another warp too.
    if HAS_GRADIENT & HAS_LABELS:
        pair = tl.load(partner_ptr + label, mask=label >= 0, other=-2)
        # The part that writes the column; of the first block of pairs, or of no entries.
        begin = tl.where(IS_ALIGNED & (label >= mapped), mapped, 0)
        is_own = ((label - begin) // BLOCK % PARTS == part) & (pair >= -1)
        if IS_ALIGNED:
            is_own &= (label < pairs) | (label >= mapped)
        label_logit = tl.load(student_ptr + label, mask=is_own, other=0.0)
    column_p = 0
    column_q = 0
    top_p = -float("inf")
    top_q = -float("inf")
    if HAS_DIAGNOSTICS & IS_ALIGNED:
        column_q = best_pair(student_ptr, top_column, pairs, part, PARTS, K, LANES)
        top_q = tl.load(student_ptr + column_q, mask=column_q < pairs, other=-float("inf"))
        top_q = bits_of(top_q, peak, log_sum, temperature, HAS_TEMPERATURE)
    if HAS_GRADIENT:
        tl.debug_barrier()

    places = tl.arange(0, LANES)[:, None] * K + tl.arange(0, K)[None, :]
    value = tl.zeros((LANES,), tl.float32)
    entropy = tl.zeros((LANES,), tl.float32)
    best_p = tl.full((LANES,), LOWEST, tl.float32)
    best_q = tl.full((LANES,), LOWEST, tl.float32)
    kept_p = tl.full((LANES, K), LOWEST, tl.float32)
    kept_q = tl.full((LANES, K), LOWEST, tl.float32)
    start_p = tl.zeros((LANES,), tl.int32)
    start_q = tl.zeros((LANES,), tl.int32)
    if IS_ALIGNED:
        for start in tl.range(part * BLOCK, pairs, PARTS * BLOCK, num_stages=2):
            columns = start + places
            loaded = tl.load(student_ptr + columns)
            other = tl.load(first_teacher_ptr + columns)
            log_q = bits_of(loaded, peak, log_sum, temperature, HAS_TEMPERATURE)
            log_p = bits_of(other, teacher_peak, teacher_sum, temperature, HAS_TEMPERATURE)
            p = tl.exp2(log_p)
            if SEVERAL:
                p = teacher_mean(
                    p, columns, columns < width, teacher_ptr, teacher_order_ptr, teacher_begin,
                    teacher_end, teacher_stride, teacher_lse_ptr, teacher_rows, temperature,
                    HAS_TEMPERATURE,
                )  # fmt: skip
                log_p = tl.log2(p)
            log_p = tl.maximum(log_p, FLOOR_BITS)
            is_low = log_q < lowest
            value += tl.sum(p * (log_p - tl.where(is_low, lowest, log_q)), axis=1)
            if HAS_DIAGNOSTICS:
                entropy += tl.sum(p * log_p, axis=1)
                if SEVERAL:
                    best_p, kept_p, start_p = kept_best(best_p, kept_p, start_p, log_p, start)
            if HAS_GRADIENT:
                out = tl.exp2(log_q) * (factor + label_factor)
                out -= tl.where(is_low, 0.0, p) * factor
                if HAS_LABELS & HAS_TEMPERATURE:
                    plain = bits_of(loaded, plain_peak, plain_sum, 1.0, False)
                    out += label_weight * tl.exp2(plain)
                tl.store(gradient_ptr + columns, out.to(gradient_ptr.dtype.element_ty))
        if HAS_GRADIENT:
            for start in tl.range(mapped + part * BLOCK, padded_width, PARTS * BLOCK, num_stages=2):
                columns = start + places
                held = columns < padded_width
                loaded = tl.load(student_ptr + columns, mask=held, other=0.0)
                log_q = bits_of(loaded, peak, log_sum, temperature, HAS_TEMPERATURE)
                out = tl.exp2(log_q) * label_factor
                if HAS_LABELS & HAS_TEMPERATURE:
                    plain = bits_of(loaded, plain_peak, plain_sum, 1.0, False)
                    out += label_weight * tl.exp2(plain)
                out = tl.where(columns < width, out, 0.0)
                tl.store(gradient_ptr + columns, out.to(gradient_ptr.dtype.element_ty), held)
    else:
        for start in tl.range(part * BLOCK, padded_width, PARTS * BLOCK):
            columns = start + places
            held = columns < padded_width
            partner = tl.load(partner_ptr + columns, mask=held, other=-1)
            # A residual column may hold its gradient by now.
            held = held & (partner >= -1)
            loaded = tl.load(student_ptr + columns, mask=held, other=0.0)
            is_direct = partner >= 0
            other = tl.load(first_teacher_ptr + partner, mask=is_direct, other=-float("inf"))
            log_q = bits_of(loaded, peak, log_sum, temperature, HAS_TEMPERATURE)
            log_p = bits_of(other, teacher_peak, teacher_sum, temperature, HAS_TEMPERATURE)
            p = tl.exp2(log_p)
            if SEVERAL:
                p = teacher_mean(
                    p, partner, is_direct, teacher_ptr, teacher_order_ptr, teacher_begin,
                    teacher_end, teacher_stride, teacher_lse_ptr, teacher_rows, temperature,
                    HAS_TEMPERATURE,
                )  # fmt: skip
                log_p = tl.log2(p)
            log_p = tl.maximum(log_p, FLOOR_BITS)
            is_low = log_q < lowest
            # Where there is no pair, p is 0.
            value += tl.sum(p * (log_p - tl.where(is_low, lowest, log_q)), axis=1)
            if HAS_DIAGNOSTICS:
                entropy += tl.sum(p * log_p, axis=1)
                said = tl.where(is_direct, log_p, LOWEST)
                best_p, kept_p, start_p = kept_best(best_p, kept_p, start_p, said, start)
                said = tl.where(is_direct, log_q, LOWEST)
                best_q, kept_q, start_q = kept_best(best_q, kept_q, start_q, said, start)
            if HAS_GRADIENT:
                row_mass = tl.load(row_mass_ptr + columns, mask=held, other=0.0)
                out = tl.exp2(log_q) * (row_mass * factor + label_factor)
                out -= tl.where(is_low, 0.0, p) * factor
                if HAS_LABELS & HAS_TEMPERATURE:
                    plain = bits_of(loaded, plain_peak, plain_sum, 1.0, False)
                    out += label_weight * tl.exp2(plain)
                out = tl.where(columns < width, out, 0.0)
                tl.store(gradient_ptr + columns, out.to(gradient_ptr.dtype.element_ty), held)

    if HAS_GRADIENT & HAS_LABELS:
        has_pair = pair >= 0
        if is_own & (label_weight != 0.0):
            other = tl.load(first_teacher_ptr + pair, mask=has_pair, other=-float("inf"))
            p = tl.exp2(bits_of(other, teacher_peak, teacher_sum, temperature, HAS_TEMPERATURE))
            if SEVERAL:
                p = teacher_mean(
                    p, pair, has_pair, teacher_ptr, teacher_order_ptr, teacher_begin,
                    teacher_end, teacher_stride, teacher_lse_ptr, teacher_rows, temperature,
                    HAS_TEMPERATURE,
                )  # fmt: skip
            row_mass = tl.load(row_mass_ptr + label)
            log_q = bits_of(label_logit, peak, log_sum, temperature, HAS_TEMPERATURE)
            out = tl.exp2(log_q) * (row_mass * factor + label_factor)
            out -= tl.where(log_q < lowest, 0.0, p) * factor
            if HAS_TEMPERATURE:
                plain = bits_of(label_logit, plain_peak, plain_sum, 1.0, False)
                out += label_weight * tl.exp2(plain)
            # After every thread's part of the row.
            tl.debug_barrier()
            tl.store(gradient_ptr + label, out - label_weight)

    if HAS_DIAGNOSTICS:
        if IS_ALIGNED:
            if SEVERAL:
                top_p, column_p = best_column(best_p, kept_p, start_p, places)
            else:
                column_p = tl.load(teacher_column_ptr + teacher_row).to(tl.int32)
                column_p = best_pair(first_teacher_ptr, column_p, pairs, part, PARTS, K, LANES)
                top_p = tl.load(
                    first_teacher_ptr + column_p, mask=column_p < pairs, other=-float("inf")
                )
                top_p = bits_of(top_p, teacher_peak, teacher_sum, temperature, HAS_TEMPERATURE)
        else:
            top_p, column_p = best_column(best_p, kept_p, start_p, places)
            top_q, column_q = best_column(best_q, kept_q, start_q, places)
            column_p = tl.load(partner_ptr + column_p, mask=column_p < width, other=-1)
            column_q = tl.load(partner_ptr + column_q, mask=column_q < width, other=-1)
        # Summed columns are compared by probabilities; -1 is below all of them.
        top_p = tl.where(top_p > LOWEST, tl.exp2(top_p), -1.0)
        top_q = tl.where(top_q > LOWEST, tl.exp2(top_q) * mass, -1.0)
    total = tl.sum(value, axis=0) * LN_2
    return total, -tl.sum(entropy, axis=0) * LN_2, top_p, column_p, top_q, column_q


@kernel(
    do_not_specialize=[
        "student_rows",
        "teacher_rows",
        "chunks",
        "sixteen_pairs",
        "sixteen_mapped",
    ]
)
def single_kernel(
    student_ptr,
    student_order_ptr,
    student_chunk_ptr,
    student_stride,
    student_lse_ptr,
    student_rows,
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
    chunks,
    partner_ptr,
    sixteen_pairs,
    sixteen_mapped,
    row_mass_ptr,
    mass_ptr,
    partial_ptr,
    best_ptr,
    grad_scale_ptr,
    gradient_ptr,
    gradient_stride,
    plain_lse_ptr,
    label_ptr,
    label_weight_ptr,
    student_column_ptr,
    teacher_column_ptr,
    IS_ALIGNED: tl.constexpr,
    HAS_GRADIENT: tl.constexpr,
    HAS_DIAGNOSTICS: tl.constexpr,
    HAS_LABELS: tl.constexpr,
    HAS_TEMPERATURE: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """``PARTS`` programs for each chunk, which take its blocks of columns in turn.

    Those of chunks that are not ``is_single`` store terms of 0. Where the plan ``IS_ALIGNED``,
    direct pairs are the first columns and residual ones come next, numbered from 0;
    ``sixteen_pairs`` and ``sixteen_mapped`` are the ends of both in units of 16 columns, multiples
    of ``BLOCK`` and of 16. Gradients of residual columns are not written here, but for those of
    ``residual_gradients_kernel`` they are all. ``partial`` is [4, C, PARTS] and ``best``
    [2, C, PARTS].
    """
    chunk = tl.program_id(0) // PARTS
    part = tl.program_id(0) % PARTS
    begin = tl.load(student_chunk_ptr + chunk)
    student_count = tl.load(student_chunk_ptr + chunk + 1) - begin
    teacher_begin = tl.load(teacher_chunk_ptr + chunk)
    teacher_end = tl.load(teacher_chunk_ptr + chunk + 1)
    grad_scale = tl.load(grad_scale_ptr + chunk)
    works = is_single(student_count, tl.load(is_scaled_ptr + chunk), grad_scale)
    place = chunk * PARTS + part
    plane = chunks * PARTS
    value = 0.0
    entropy = 0.0
    top_p = -1.0
    top_q = -1.0
    column_p = 0
    column_q = 0
    if works:
        row = tl.load(student_order_ptr + begin).to(tl.int64)
        mass = tl.load(mass_ptr + chunk)
        peak = tl.load(student_lse_ptr + row)
        log_sum = tl.load(student_lse_ptr + student_rows + row) * LOG2_E + tl.log2(mass)
        plain_peak = 0.0
        plain_sum = 0.0
        label_weight = 0.0
        label = -1
        if HAS_LABELS:
            label = tl.load(label_ptr + row).to(tl.int32)
            label_weight = tl.load(label_weight_ptr + row)
            if HAS_TEMPERATURE:
                plain_peak = tl.load(plain_lse_ptr + row)
                plain_sum = tl.load(plain_lse_ptr + student_rows + row) * LOG2_E
        top_column = 0
        if HAS_DIAGNOSTICS & IS_ALIGNED:
            top_column = tl.load(student_column_ptr + row).to(tl.int32)
        several = teacher_end - teacher_begin > 1
        gradient_row_ptr = gradient_ptr
        if HAS_GRADIENT:
            gradient_row_ptr = gradient_ptr + row * gradient_stride
        if several:
            value, entropy, top_p, column_p, top_q, column_q = pairs_of_row(
                part, student_ptr + row * student_stride, peak, log_sum, mass, width, padded_width,
                teacher_ptr, teacher_order_ptr, teacher_begin, teacher_end, teacher_stride,
                teacher_lse_ptr, teacher_rows, temperature, partner_ptr, sixteen_pairs * 16,
                sixteen_mapped * 16, row_mass_ptr, grad_scale, gradient_row_ptr, plain_peak,
                plain_sum, label, label_weight, top_column, teacher_column_ptr, True, IS_ALIGNED,
                HAS_GRADIENT, HAS_DIAGNOSTICS, HAS_LABELS, HAS_TEMPERATURE, PARTS, BLOCK,
            )  # fmt: skip
        else:
            value, entropy, top_p, column_p, top_q, column_q = pairs_of_row(
                part, student_ptr + row * student_stride, peak, log_sum, mass, width, padded_width,
                teacher_ptr, teacher_order_ptr, teacher_begin, teacher_end, teacher_stride,
                teacher_lse_ptr, teacher_rows, temperature, partner_ptr, sixteen_pairs * 16,
                sixteen_mapped * 16, row_mass_ptr, grad_scale, gradient_row_ptr, plain_peak,
                plain_sum, label, label_weight, top_column, teacher_column_ptr, False, IS_ALIGNED,
                HAS_GRADIENT, HAS_DIAGNOSTICS, HAS_LABELS, HAS_TEMPERATURE, PARTS, BLOCK,
            )  # fmt: skip
    tl.store(partial_ptr + place, value)
    if HAS_DIAGNOSTICS:
        tl.store(partial_ptr + plane + place, entropy)
        tl.store(partial_ptr + 2 * plane + place, top_p)
        tl.store(partial_ptr + 3 * plane + place, top_q)
        tl.store(best_ptr + place, column_p)
        tl.store(best_ptr + plane + place, column_q)
