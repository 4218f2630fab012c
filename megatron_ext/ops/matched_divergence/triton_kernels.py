"""Triton kernels of the matched divergence by chunk: values with row slopes, and the gradient."""

import triton.language as tl

from megatron_ext.ops.chunk_kernels import row_probabilities
from megatron_ext.ops.kernel import kernel
from megatron_ext.ops.matched_divergence.pair_blocks import (
    add_label_part,
    block_gradient,
    both_sides,
    compared_block,
    pair_terms,
    single_pair,
)
from megatron_ext.ops.triton_math import LN_2, LOG2_E, LOWEST

SUMS: tl.constexpr = tl.constexpr(16)
"""Rows of a chunk that a program holds at once."""


@kernel(do_not_specialize=["first_chunk"])
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
        sides = (
            start_of_own, start_of_other, pairs_ptr, own_peak, own_log_sum, other_peak,
            other_log_sum,
        )  # fmt: skip
        block = tl.arange(0, LANES)[:, None] * K + tl.arange(0, K)[None, :]
        values = tl.zeros((LANES,), tl.float32)
        wholes = tl.zeros((LANES,), tl.float32)
        p_peak = tl.full((LANES,), LOWEST, tl.float32)
        q_peak = tl.full((LANES,), LOWEST, tl.float32)
        p_first = tl.zeros((LANES,), tl.int32)
        q_first = tl.zeros((LANES,), tl.int32)
        for start in tl.range(0, aligned_end, BLOCK, num_stages=3):
            values, wholes, p_peak, q_peak, p_first, q_first = compared_block(
                (values, wholes, p_peak, q_peak, p_first, q_first),
                start,
                block,
                sides,
                temperature,
                mixture,
                True,
                DIRECTION,
                HAS_TEMPERATURE,
            )
        for start in tl.range(aligned_end, whole_end, BLOCK, num_stages=3):
            values, wholes, p_peak, q_peak, p_first, q_first = compared_block(
                (values, wholes, p_peak, q_peak, p_first, q_first),
                start,
                block,
                sides,
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
            p_at, _, common = single_pair(
                sides,
                p_lane + places,
                temperature,
                False,
                HAS_TEMPERATURE,
            )
            p_hit = tl.where((p_at == p_top) & common, p_lane + places, width)
            _, q_at, common = single_pair(
                sides,
                q_lane + places,
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
            p, q, common = both_sides(
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
            terms, slope = pair_terms(p, q, mixture, DIRECTION)
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


@kernel(do_not_specialize=["first_chunk"])
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
    label_ptr,
    label_weight_ptr,
    plain_peak_ptr,
    plain_log_sum_ptr,
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

    ``g_c`` is that of the matched columns, and ``base_c`` elsewhere. The gradient of the rows'
    labels is added.
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
        sides = (
            start_of_own, start_of_other, pairs_ptr, own_peak, own_log_sum, other_peak,
            other_log_sum,
        )  # fmt: skip
        start_of_gradient = gradient_ptr + own_row * gradient_stride
        centre = tl.load(centre_ptr + own_row)
        # Q^ is the row's probability over the used mass.
        on_common = -(shift + centre) * student_used * scale
        on_others = (base - centre) * student_used * scale
        block = tl.arange(0, LANES)[:, None] * K + tl.arange(0, K)[None, :]
        label_column = -1
        label_weight = 0.0
        plain_peak = 0.0
        plain_log_sum = 0.0
        at_label = 0.0
        if label_ptr is not None:
            label_column = tl.load(label_ptr + own_row).to(tl.int32)
            label_weight = tl.load(label_weight_ptr + own_row)
            plain_peak = tl.load(plain_peak_ptr + own_row)
            plain_log_sum = tl.load(plain_log_sum_ptr + own_row) * LOG2_E
            if not HAS_TEMPERATURE:
                on_common += label_weight * student_used
                on_others += label_weight * student_used
            if whole_end > 0:
                at_label = block_gradient(
                    tl.maximum(label_column, 0),
                    sides,
                    on_common,
                    on_others,
                    scale,
                    (label_weight, plain_peak, plain_log_sum),
                    temperature,
                    mixture,
                    False,
                    DIRECTION,
                    HAS_TEMPERATURE,
                    True,
                )
                # All threads have read the label's logit before one writes the gradient over it.
                tl.debug_barrier()
        for start in tl.range(0, aligned_end, BLOCK, num_stages=3):
            out = block_gradient(
                start + block,
                sides,
                on_common,
                on_others,
                scale,
                (label_weight, plain_peak, plain_log_sum),
                temperature,
                mixture,
                True,
                DIRECTION,
                HAS_TEMPERATURE,
                label_ptr is not None,
            )
            tl.store(start_of_gradient + start + block, out.to(gradient_ptr.dtype.element_ty))
        for start in tl.range(aligned_end, whole_end, BLOCK, num_stages=3):
            out = block_gradient(
                start + block,
                sides,
                on_common,
                on_others,
                scale,
                (label_weight, plain_peak, plain_log_sum),
                temperature,
                mixture,
                False,
                DIRECTION,
                HAS_TEMPERATURE,
                label_ptr is not None,
            )
            tl.store(start_of_gradient + start + block, out.to(gradient_ptr.dtype.element_ty))
        if label_ptr is not None:
            tl.debug_barrier()
            # Loaded again, not kept in registers.
            label_column = tl.load(label_ptr + own_row).to(tl.int32)
            at_label -= tl.load(label_weight_ptr + own_row)
            is_written = (label_column >= 0) & (label_column < whole_end)
            at_label = at_label.to(gradient_ptr.dtype.element_ty)
            tl.store(start_of_gradient + label_column, at_label, mask=is_written)
    # Chunks without rows have nothing to write.
    for start in range(whole_end, tl.where(end > begin, width, 0), BLOCK):
        columns = start + tl.arange(0, BLOCK)
        held = columns < width
        valid = columns < valid_width
        p, q, common = both_sides(
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
        _, slope = pair_terms(p, q, mixture, DIRECTION)
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
            if label_ptr is not None:
                out = add_label_part(
                    out,
                    own,
                    (label_ptr, label_weight_ptr, plain_peak_ptr, plain_log_sum_ptr),
                    student_ptr,
                    row,
                    student_stride,
                    columns,
                    held,
                    valid,
                    HAS_TEMPERATURE,
                )
            # The gradient may be the logits, which other threads may still be reading.
            tl.debug_barrier()
            place_of = gradient_ptr + row * gradient_stride + columns
            tl.store(place_of, out.to(gradient_ptr.dtype.element_ty), mask=held)
