"""Triton kernels of the matched divergence by chunk: values with row slopes, and the gradient."""

import triton
import triton.language as tl

from megatron_ext.ops.chunk_kernels import mean_probabilities, row_probabilities
from megatron_ext.ops.triton_math import LN_2, LOG2_E, LOWEST, divergence_terms, scaled

SUMS: tl.constexpr = tl.constexpr(16)
"""Rows of a chunk that a program holds at once."""


@triton.jit
def _log(probabilities):
    """Logarithm, at least -87.3, that of the smallest normal number; NaN stays."""
    return tl.where(probabilities < 1.1754944e-38, -87.33654, tl.log(probabilities))


@triton.jit
def _terms(p, q, mixture, DIRECTION: tl.constexpr):
    """Terms of the divergence and their derivatives by ``q`` (``ops/divergence``)."""
    log_p = _log(p)
    log_q = _log(q)
    if DIRECTION == "jensen_shannon":
        log_mix = _log(mixture * p + (1.0 - mixture) * q)
        log_p -= log_mix
        log_q -= log_mix
    no_mass = q < 1.1754944e-38
    value, slope = divergence_terms(p, q, log_p, log_q, no_mass, mixture, DIRECTION)
    # 1024 times the smallest normal number, as in torch.
    return value, slope / tl.where(q < 1.2037062e-35, 1.2037062e-35, q)


@triton.jit
def _bits(values, peak, log_sum):
    """Logarithms to base 2; ``log_sum`` is to base 2 too."""
    # The difference first, which is exact for large logits where their product is not.
    return (values - peak) * LOG2_E - log_sum


@triton.jit
def _normal(bits):
    """Logarithms to base 2, at least -126, that of the smallest normal number; NaN stays."""
    return tl.maximum(bits, -126.0, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _single_pair(
    start_of_student,
    start_of_teacher,
    pairs_ptr,
    columns,
    student_peak,
    student_log_sum,
    teacher_peak,
    teacher_log_sum,
    temperature,
    IS_ALIGNED: tl.constexpr,
    HAS_TEMPERATURE: tl.constexpr,
):
    """Logarithms of P^ and Q^ to base 2 at columns that are all real, and which are common.

    The logarithms of the sums are to base 2 and hold those of the used masses. Where a column is
    not common, P^ is 0, and Q^ is the row's probability over the used mass. Aligned columns are
    common, each with the teacher's column of the same number.
    """
    own = scaled(tl.load(start_of_student + columns), temperature, HAS_TEMPERATURE)
    if IS_ALIGNED:
        common = columns >= 0
        other = tl.load(start_of_teacher + columns)
    else:
        pair = tl.load(pairs_ptr + columns)
        common = pair >= 0
        other = tl.load(start_of_teacher + pair, mask=common, other=-float("inf"))
    log_p = _bits(scaled(other, temperature, HAS_TEMPERATURE), teacher_peak, teacher_log_sum)
    return log_p, _bits(own, student_peak, student_log_sum), common


@triton.jit
def _single_terms(log_p, log_q, common, mixture, DIRECTION: tl.constexpr):
    """Terms of the divergence to base 2, and of ``q f_q``, as ``_terms`` has them; and Q^."""
    p = tl.exp2(log_p)
    q = tl.exp2(log_q)
    log_p = _normal(log_p)
    log_q = _normal(log_q)
    # 1 but where Q is less than 1024 times the smallest normal number, as in torch.
    share = tl.minimum(q * (1.0 / 1.2037062e-35), 1.0)
    if DIRECTION == "forward":
        value = p * (log_p - log_q)
        slope = -p * tl.where(log_q > -126.0, share, 0.0)
    else:
        if DIRECTION == "reverse":
            value = q * (log_q - log_p)
            slope = (value * LN_2 + q) * share
        else:
            log_mix = _normal(tl.log2(mixture * p + (1.0 - mixture) * q))
            of_q = q * (log_q - log_mix) * (1.0 - mixture)
            value = mixture * p * (log_p - log_mix) + of_q
            slope = of_q * share * LN_2
        value = tl.where(common, value, 0.0)
        slope = tl.where(common, slope, 0.0)
    return value, slope, q


@triton.jit
def _compared_block(
    found,
    start,
    block,
    start_of_own,
    start_of_other,
    pairs_ptr,
    own_peak,
    own_log_sum,
    other_peak,
    other_log_sum,
    temperature,
    mixture,
    IS_ALIGNED: tl.constexpr,
    DIRECTION: tl.constexpr,
    HAS_TEMPERATURE: tl.constexpr,
):
    """What lanes have found after a block: sums, peaks of log P^ and log Q^, and their blocks."""
    values, wholes, p_peak, q_peak, p_first, q_first = found
    log_p, log_q, common = _single_pair(
        start_of_own,
        start_of_other,
        pairs_ptr,
        start + block,
        own_peak,
        own_log_sum,
        other_peak,
        other_log_sum,
        temperature,
        IS_ALIGNED,
        HAS_TEMPERATURE,
    )
    value, slope, _ = _single_terms(log_p, log_q, common, mixture, DIRECTION)
    values += tl.sum(value, axis=1)
    wholes += tl.sum(slope, axis=1)
    top = tl.max(log_p, axis=1)
    p_first = tl.where(top > p_peak, start, p_first)
    p_peak = tl.maximum(p_peak, top)
    top = tl.max(log_q if IS_ALIGNED else tl.where(common, log_q, LOWEST), axis=1)
    q_first = tl.where(top > q_peak, start, q_first)
    q_peak = tl.maximum(q_peak, top)
    return values, wholes, p_peak, q_peak, p_first, q_first


@triton.jit
def _write_block(
    start_of_gradient,
    columns,
    start_of_own,
    start_of_other,
    pairs_ptr,
    own_peak,
    own_log_sum,
    other_peak,
    other_log_sum,
    on_common,
    on_others,
    scale,
    temperature,
    mixture,
    IS_ALIGNED: tl.constexpr,
    DIRECTION: tl.constexpr,
    HAS_TEMPERATURE: tl.constexpr,
):
    """Write the gradient of a chunk's only row at a block of columns."""
    log_p, log_q, common = _single_pair(
        start_of_own,
        start_of_other,
        pairs_ptr,
        columns,
        own_peak,
        own_log_sum,
        other_peak,
        other_log_sum,
        temperature,
        IS_ALIGNED,
        HAS_TEMPERATURE,
    )
    _, slope, q = _single_terms(log_p, log_q, common, mixture, DIRECTION)
    factor = on_common if IS_ALIGNED else tl.where(common, on_common, on_others)
    out = q * factor + slope * scale
    tl.store(start_of_gradient + columns, out.to(start_of_gradient.dtype.element_ty))


@triton.jit
def _both_sides(
    student_ptr,
    student_order_ptr,
    student_peak_ptr,
    student_log_sum_ptr,
    student_stride,
    student_begin,
    student_end,
    student_used,
    teacher_ptr,
    teacher_order_ptr,
    teacher_peak_ptr,
    teacher_log_sum_ptr,
    teacher_stride,
    teacher_begin,
    teacher_end,
    teacher_used,
    pairs_ptr,
    moved_row_ptr,
    columns,
    held,
    inside,
    temperature,
    MOVED: tl.constexpr,
    HAS_TEMPERATURE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """P^ and Q^ at a block of student columns, 0 where not common, and the mask of common ones."""
    pair = tl.load(pairs_ptr + columns, mask=held, other=-1)
    common = inside & (pair >= 0)
    q = mean_probabilities(
        student_ptr,
        student_order_ptr,
        student_begin,
        student_end,
        student_stride,
        student_peak_ptr,
        student_log_sum_ptr,
        columns,
        held,
        common,
        temperature,
        HAS_TEMPERATURE,
    )
    if MOVED:
        p = tl.where(common, tl.load(moved_row_ptr + columns, mask=held, other=0.0), 0.0)
    else:
        p = mean_probabilities(
            teacher_ptr,
            teacher_order_ptr,
            teacher_begin,
            teacher_end,
            teacher_stride,
            teacher_peak_ptr,
            teacher_log_sum_ptr,
            pair,
            common,
            common,
            temperature,
            HAS_TEMPERATURE,
        )
    return p / teacher_used, q / student_used, common


@triton.jit(do_not_specialize=["first_chunk"])
def compare_kernel(
    student_ptr,
    student_order_ptr,
    student_offsets_ptr,
    student_peak_ptr,
    student_log_sum_ptr,
    student_used_ptr,
    teacher_ptr,
    teacher_order_ptr,
    teacher_offsets_ptr,
    teacher_peak_ptr,
    teacher_log_sum_ptr,
    teacher_used_ptr,
    pairs_ptr,
    moved_ptr,
    value_ptr,
    row_slope_ptr,
    best_ptr,
    column_ptr,
    first_chunk,
    aligned,
    paired,
    student_stride,
    teacher_stride,
    moved_stride,
    width,
    padded_width,
    column_start,
    temperature,
    mixture,
    DIRECTION: tl.constexpr,
    MOVED: tl.constexpr,
    HAS_TEMPERATURE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Value, slope of each row, and largest columns of a chunk.

    Two programs for each chunk, of which one returns at once: first those of several rows a side,
    which take longer.

    ``value`` [C'] over this rank's columns; ``row_slope`` [T] of its rows, ``sum_v q_i f_q``;
    ``best`` and ``column`` [2, C'], the largest P^ and Q^ and their columns. Whole blocks of a
    row a side, whose logarithms are known, are loaded ahead of time, the first of aligned columns.
    Columns behind the last pair are not read.
    """
    chunks = tl.num_programs(0) // 2
    program = (tl.program_id(0) % chunks).to(tl.int64)
    chunk = first_chunk + program
    begin = tl.load(student_offsets_ptr + chunk)
    end = tl.load(student_offsets_ptr + chunk + 1)
    teacher_begin = tl.load(teacher_offsets_ptr + chunk)
    teacher_end = tl.load(teacher_offsets_ptr + chunk + 1)
    has_several = (end - begin > 1) | (teacher_end - teacher_begin > 1)
    if has_several != (tl.program_id(0) < chunks):
        return
    student_used = tl.load(student_used_ptr + chunk)
    teacher_used = tl.load(teacher_used_ptr + chunk)
    moved_row_ptr = moved_ptr
    if MOVED:
        moved_row_ptr = moved_ptr + program * moved_stride
    lanes = tl.arange(0, SUMS)
    # A single row is the mean itself and is not read again.
    alone = end - begin == 1
    single_value = 0.0
    single_whole = 0.0
    single_p = -float("inf")
    single_q = -float("inf")
    single_p_column = 0
    single_q_column = 0
    whole_end = 0
    paired_end = tl.minimum(paired, width)
    if not MOVED:
        K: tl.constexpr = 8
        LANES: tl.constexpr = BLOCK // K
        single = alone & (teacher_end - teacher_begin == 1)
        aligned_end = tl.where(single, aligned // BLOCK * BLOCK, 0)
        whole_end = tl.where(single, paired_end // BLOCK * BLOCK, 0)
        own_row = tl.load(student_order_ptr + begin, mask=single, other=0).to(tl.int64)
        other_row = tl.load(teacher_order_ptr + teacher_begin, mask=single, other=0).to(tl.int64)
        own_peak = tl.load(student_peak_ptr + own_row)
        own_log_sum = tl.load(student_log_sum_ptr + own_row) * LOG2_E + tl.log2(student_used)
        other_peak = tl.load(teacher_peak_ptr + other_row)
        other_log_sum = tl.load(teacher_log_sum_ptr + other_row) * LOG2_E + tl.log2(teacher_used)
        start_of_own = student_ptr + own_row * student_stride
        start_of_other = teacher_ptr + other_row * teacher_stride
        block = tl.arange(0, LANES)[:, None] * K + tl.arange(0, K)[None, :]
        values = tl.zeros((LANES,), tl.float32)
        wholes = tl.zeros((LANES,), tl.float32)
        p_peak = tl.full((LANES,), LOWEST, tl.float32)
        q_peak = tl.full((LANES,), LOWEST, tl.float32)
        p_first = tl.zeros((LANES,), tl.int32)
        q_first = tl.zeros((LANES,), tl.int32)
        for start in tl.range(0, aligned_end, BLOCK, num_stages=3):
            values, wholes, p_peak, q_peak, p_first, q_first = _compared_block(
                (values, wholes, p_peak, q_peak, p_first, q_first),
                start,
                block,
                start_of_own,
                start_of_other,
                pairs_ptr,
                own_peak,
                own_log_sum,
                other_peak,
                other_log_sum,
                temperature,
                mixture,
                True,
                DIRECTION,
                HAS_TEMPERATURE,
            )
        for start in tl.range(aligned_end, whole_end, BLOCK, num_stages=3):
            values, wholes, p_peak, q_peak, p_first, q_first = _compared_block(
                (values, wholes, p_peak, q_peak, p_first, q_first),
                start,
                block,
                start_of_own,
                start_of_other,
                pairs_ptr,
                own_peak,
                own_log_sum,
                other_peak,
                other_log_sum,
                temperature,
                mixture,
                False,
                DIRECTION,
                HAS_TEMPERATURE,
            )
        if whole_end > 0:
            single_value = tl.sum(values, axis=0) * LN_2
            single_whole = tl.sum(wholes, axis=0)
            p_top = tl.max(p_peak, axis=0)
            q_top = tl.max(q_peak, axis=0)
            lanes_start = tl.arange(0, LANES) * K
            p_lane = tl.min(tl.where(p_peak == p_top, p_first + lanes_start, width), axis=0)
            q_lane = tl.min(tl.where(q_peak == q_top, q_first + lanes_start, width), axis=0)
            places = tl.arange(0, K)
            p_at, _, common = _single_pair(
                start_of_own,
                start_of_other,
                pairs_ptr,
                p_lane + places,
                own_peak,
                own_log_sum,
                other_peak,
                other_log_sum,
                temperature,
                False,
                HAS_TEMPERATURE,
            )
            p_hit = tl.where((p_at == p_top) & common, p_lane + places, width)
            _, q_at, common = _single_pair(
                start_of_own,
                start_of_other,
                pairs_ptr,
                q_lane + places,
                own_peak,
                own_log_sum,
                other_peak,
                other_log_sum,
                temperature,
                False,
                HAS_TEMPERATURE,
            )
            q_hit = tl.where((q_at == q_top) & common, q_lane + places, width)
            single_p = tl.exp2(p_top)
            single_q = tl.exp2(q_top)
            single_p_column = tl.min(p_hit, axis=0) % width
            single_q_column = tl.min(q_hit, axis=0) % width
    for first in range(begin, tl.maximum(end, begin + 1), SUMS):
        last = tl.where(alone, first, tl.minimum(first + SUMS, end))
        value = single_value
        whole = single_whole
        slopes = tl.zeros([SUMS], tl.float32)
        p_best = single_p
        q_best = single_q
        p_column = single_p_column
        q_column = single_q_column
        for start in range(whole_end, paired_end, BLOCK):
            columns = start + tl.arange(0, BLOCK)
            inside = columns < width
            held = columns < padded_width
            p, q, common = _both_sides(
                student_ptr,
                student_order_ptr,
                student_peak_ptr,
                student_log_sum_ptr,
                student_stride,
                begin,
                end,
                student_used,
                teacher_ptr,
                teacher_order_ptr,
                teacher_peak_ptr,
                teacher_log_sum_ptr,
                teacher_stride,
                teacher_begin,
                teacher_end,
                teacher_used,
                pairs_ptr,
                moved_row_ptr,
                columns,
                held,
                inside,
                temperature,
                MOVED,
                HAS_TEMPERATURE,
                BLOCK,
            )
            terms, slope = _terms(p, q, mixture, DIRECTION)
            value += tl.sum(tl.where(common, terms, 0.0), axis=0)
            whole += tl.sum(tl.where(common, q * slope, 0.0), axis=0)
            for place in range(first, last):
                row = tl.load(student_order_ptr + place).to(tl.int64)
                own = row_probabilities(
                    student_ptr,
                    row,
                    student_stride,
                    student_peak_ptr,
                    student_log_sum_ptr,
                    columns,
                    held,
                    common,
                    temperature,
                    HAS_TEMPERATURE,
                )
                share = tl.sum(tl.where(common, own * slope, 0.0), axis=0)
                slopes += tl.where(lanes == place - first, share, 0.0)
            top, index = tl.max(tl.where(inside, p, -float("inf")), axis=0, return_indices=True)
            p_column = tl.where(top > p_best, start + index, p_column)
            p_best = tl.maximum(p_best, top)
            top, index = tl.max(tl.where(inside, q, -float("inf")), axis=0, return_indices=True)
            q_column = tl.where(top > q_best, start + index, q_column)
            q_best = tl.maximum(q_best, top)
        slopes = tl.where(alone & (lanes == 0), whole * student_used, slopes)
        kept = lanes < end - first
        row = tl.load(student_order_ptr + first + lanes, mask=kept, other=0)
        tl.store(row_slope_ptr + row, slopes, mask=kept)
        tl.store(value_ptr + program, value)
        tl.store(best_ptr + program, p_best)
        tl.store(best_ptr + chunks + program, q_best)
        tl.store(column_ptr + program, (column_start + p_column).to(tl.int64))
        tl.store(column_ptr + chunks + program, (column_start + q_column).to(tl.int64))


@triton.jit(do_not_specialize=["first_chunk"])
def gradient_kernel(
    student_ptr,
    gradient_ptr,
    student_order_ptr,
    student_offsets_ptr,
    student_peak_ptr,
    student_log_sum_ptr,
    student_used_ptr,
    teacher_ptr,
    teacher_order_ptr,
    teacher_offsets_ptr,
    teacher_peak_ptr,
    teacher_log_sum_ptr,
    teacher_used_ptr,
    pairs_ptr,
    moved_ptr,
    base_ptr,
    shift_ptr,
    centre_ptr,
    scale_ptr,
    first_chunk,
    aligned,
    paired,
    student_stride,
    gradient_stride,
    teacher_stride,
    moved_stride,
    width,
    valid_width,
    temperature,
    mixture,
    DIRECTION: tl.constexpr,
    MOVED: tl.constexpr,
    HAS_TEMPERATURE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """``q_i (g_c - centre_i) scale_c`` in a chunk's rows, 0 in padding; programs as above.

    ``g_c`` is that of the matched columns, and ``base_c`` elsewhere.
    """
    chunks = tl.num_programs(0) // 2
    program = (tl.program_id(0) % chunks).to(tl.int64)
    chunk = first_chunk + program
    begin = tl.load(student_offsets_ptr + chunk)
    end = tl.load(student_offsets_ptr + chunk + 1)
    teacher_begin = tl.load(teacher_offsets_ptr + chunk)
    teacher_end = tl.load(teacher_offsets_ptr + chunk + 1)
    has_several = (end - begin > 1) | (teacher_end - teacher_begin > 1)
    if has_several != (tl.program_id(0) < chunks):
        return
    student_used = tl.load(student_used_ptr + chunk)
    teacher_used = tl.load(teacher_used_ptr + chunk)
    base = tl.load(base_ptr + chunk)
    shift = tl.load(shift_ptr + chunk)
    scale = tl.load(scale_ptr + chunk)
    moved_row_ptr = moved_ptr
    if MOVED:
        moved_row_ptr = moved_ptr + program * moved_stride
    whole_end = 0
    if not MOVED:
        K: tl.constexpr = 8
        LANES: tl.constexpr = BLOCK // K
        single = (end - begin == 1) & (teacher_end - teacher_begin == 1) & (scale != 0.0)
        aligned_end = tl.where(single, aligned // BLOCK * BLOCK, 0)
        whole_end = tl.where(single, valid_width // BLOCK * BLOCK, 0)
        own_row = tl.load(student_order_ptr + begin, mask=single, other=0).to(tl.int64)
        other_row = tl.load(teacher_order_ptr + teacher_begin, mask=single, other=0).to(tl.int64)
        own_peak = tl.load(student_peak_ptr + own_row)
        own_log_sum = tl.load(student_log_sum_ptr + own_row) * LOG2_E + tl.log2(student_used)
        other_peak = tl.load(teacher_peak_ptr + other_row)
        other_log_sum = tl.load(teacher_log_sum_ptr + other_row) * LOG2_E + tl.log2(teacher_used)
        start_of_own = student_ptr + own_row * student_stride
        start_of_other = teacher_ptr + other_row * teacher_stride
        start_of_gradient = gradient_ptr + own_row * gradient_stride
        centre = tl.load(centre_ptr + own_row)
        # Q^ is the row's probability over the used mass.
        on_common = -(shift + centre) * student_used * scale
        on_others = (base - centre) * student_used * scale
        block = tl.arange(0, LANES)[:, None] * K + tl.arange(0, K)[None, :]
        for start in tl.range(0, aligned_end, BLOCK, num_stages=3):
            _write_block(
                start_of_gradient,
                start + block,
                start_of_own,
                start_of_other,
                pairs_ptr,
                own_peak,
                own_log_sum,
                other_peak,
                other_log_sum,
                on_common,
                on_others,
                scale,
                temperature,
                mixture,
                True,
                DIRECTION,
                HAS_TEMPERATURE,
            )
        for start in tl.range(aligned_end, whole_end, BLOCK, num_stages=3):
            _write_block(
                start_of_gradient,
                start + block,
                start_of_own,
                start_of_other,
                pairs_ptr,
                own_peak,
                own_log_sum,
                other_peak,
                other_log_sum,
                on_common,
                on_others,
                scale,
                temperature,
                mixture,
                False,
                DIRECTION,
                HAS_TEMPERATURE,
            )
    # Chunks without rows have nothing to write.
    for start in range(whole_end, tl.where(end > begin, width, 0), BLOCK):
        columns = start + tl.arange(0, BLOCK)
        held = columns < width
        valid = columns < valid_width
        p, q, common = _both_sides(
            student_ptr,
            student_order_ptr,
            student_peak_ptr,
            student_log_sum_ptr,
            student_stride,
            begin,
            end,
            student_used,
            teacher_ptr,
            teacher_order_ptr,
            teacher_peak_ptr,
            teacher_log_sum_ptr,
            teacher_stride,
            teacher_begin,
            teacher_end,
            teacher_used,
            pairs_ptr,
            moved_row_ptr,
            columns,
            held,
            valid,
            temperature,
            MOVED,
            HAS_TEMPERATURE,
            BLOCK,
        )
        _, slope = _terms(p, q, mixture, DIRECTION)
        slope = tl.where(common, slope / student_used - shift, base)
        for place in range(begin, end):
            row = tl.load(student_order_ptr + place).to(tl.int64)
            own = row_probabilities(
                student_ptr,
                row,
                student_stride,
                student_peak_ptr,
                student_log_sum_ptr,
                columns,
                held,
                valid,
                temperature,
                HAS_TEMPERATURE,
            )
            out = own * (slope - tl.load(centre_ptr + row)) * scale
            out = tl.where(valid, out, 0.0)
            out = tl.where(scale == 0.0, 0.0, out)
            # The gradient may be the logits, which other threads may still be reading.
            tl.debug_barrier()
            place_of = gradient_ptr + row * gradient_stride + columns
            tl.store(place_of, out.to(gradient_ptr.dtype.element_ty), mask=held)
