"""Triton kernels of the sorted L1 of chunks: candidates compared by place, and gradients."""

import triton
import triton.language as tl

from megatron_ext.ops.chunk_kernels import row_probabilities
from megatron_ext.ops.kernel import kernel
from megatron_ext.ops.triton_math import scaled

ROUNDING: tl.constexpr = tl.constexpr(8 * 1.1920928955078125e-07)
"""8 units in the last place of 1, within which two probabilities count as equal."""


@triton.jit
def _merged_places(
    side_ptr, run, runs, length, index, inside, values, STEPS: tl.constexpr, BLOCK: tl.constexpr
):
    """Places of a run's ``values`` [BLOCK] among all runs; equal values are in the order of runs.

    Of every other run it counts the values before them, by a binary search in ``STEPS`` steps.
    """
    places = index
    for other in range(0, runs):
        if other != run:
            start_of_run = side_ptr + other * length
            before = tl.zeros((BLOCK,), tl.int32)
            for step in tl.static_range(STEPS):
                until = before + (1 << (STEPS - 1 - step))
                found = tl.load(
                    start_of_run + until - 1, mask=inside & (until <= length), other=-2.0
                )
                is_before = (found > values) | ((found == values) & (other < run))
                before = tl.where(is_before, until, before)
            places += before
    return places


@kernel()
def compare_places_kernel(
    student_ptr,
    origin_ptr,
    teacher_ptr,
    merged_ptr,
    rest_ptr,
    value_ptr,
    left_out_ptr,
    signs_ptr,
    places,
    kept,
    student_runs,
    student_length,
    teacher_runs,
    teacher_length,
    first_run,
    own_runs,
    own_count,
    STUDENT_STEPS: tl.constexpr,
    TEACHER_STEPS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program for each chunk: L1 of the first ``places``, what is left out, and the signs.

    Both sides [C', runs, length] are in descending order run by run, and below 0 where there is no
    candidate. ``merged`` [C', kept] is room for the teacher's, as many as are compared. ``signs``
    [C', own_count] are of this rank's candidates, whose places in the runs from ``first_run`` on
    ``origin`` [C', own_runs, length] holds; ``rest`` [C'] is the mass outside all candidates.
    """
    program = tl.program_id(0).to(tl.int64)
    student_count = student_runs * student_length
    student_ptr += program * student_count
    teacher_ptr += program * teacher_runs * teacher_length
    origin_ptr += program * own_runs * student_length
    merged_ptr += program * kept
    signs_ptr += program * own_count
    values = tl.zeros((BLOCK,), tl.float32)
    tails = tl.zeros((BLOCK,), tl.float32)
    for run in range(0, teacher_runs):
        for start in range(0, teacher_length, BLOCK):
            index = start + tl.arange(0, BLOCK)
            inside = index < teacher_length
            held = tl.load(teacher_ptr + run * teacher_length + index, mask=inside, other=-1.0)
            place = _merged_places(
                teacher_ptr, run, teacher_runs, teacher_length, index, inside, held,
                TEACHER_STEPS, BLOCK,
            )  # fmt: skip
            # NaN is not below 0, and stays; where it is, two candidates may share a place.
            mass = tl.where(held < 0.0, 0.0, held)
            values += tl.where(mass != mass, mass, 0.0)
            tails += tl.where(inside & (place >= places), mass, 0.0)
            tl.store(merged_ptr + place, mass, mask=inside & (place < kept))
    tl.debug_barrier()
    for run in range(0, student_runs):
        is_own = (run >= first_run) & (run < first_run + own_runs)
        for start in range(0, student_length, BLOCK):
            index = start + tl.arange(0, BLOCK)
            inside = index < student_length
            held = tl.load(student_ptr + run * student_length + index, mask=inside, other=-1.0)
            place = _merged_places(
                student_ptr, run, student_runs, student_length, index, inside, held,
                STUDENT_STEPS, BLOCK,
            )  # fmt: skip
            mass = tl.where(held < 0.0, 0.0, held)
            compared = inside & (place < places)
            other = tl.load(merged_ptr + place, mask=inside & (place < kept), other=0.0)
            difference = mass - other
            distance = tl.abs(difference)
            values += tl.where(compared, distance, 0.0)
            tails += tl.where(inside & (place >= places), mass, 0.0)
            has_sign = compared & (held >= 0.0) & (distance > (mass + other) * ROUNDING)
            sign = tl.where(has_sign, tl.where(difference > 0.0, 1, -1), 0)
            held_at = (run - first_run) * student_length
            slot = tl.load(origin_ptr + held_at + index, mask=inside & is_own, other=0) + held_at
            tl.store(signs_ptr + slot, sign.to(tl.int8), mask=inside & is_own & (slot < own_count))
    # Places of the teacher's candidates beyond the last of the student's.
    for start in range(student_count, kept, BLOCK):
        index = start + tl.arange(0, BLOCK)
        values += tl.load(merged_ptr + index, mask=index < kept, other=0.0)
    tl.store(value_ptr + program, tl.sum(values, axis=0))
    tl.store(left_out_ptr + program, tl.load(rest_ptr + program) + tl.sum(tails, axis=0))


@kernel(do_not_specialize=["first_chunk"])
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


@kernel(do_not_specialize=["first_chunk"])
def spread_kernel(
    logits_ptr,
    gradient_ptr,
    order_ptr,
    offsets_ptr,
    peak_ptr,
    log_sum_ptr,
    centre_ptr,
    scale_ptr,
    label_ptr,
    label_weight_ptr,
    plain_peak_ptr,
    plain_log_sum_ptr,
    first_chunk,
    row_stride,
    gradient_stride,
    width,
    valid_width,
    temperature,
    HAS_TEMPERATURE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program for each chunk: ``-q_i centre_i scale_c`` in its rows, 0 in padding, and the
    gradient of the rows' labels, if there are any."""
    chunk = first_chunk + tl.program_id(0).to(tl.int64)
    begin = tl.load(offsets_ptr + chunk)
    end = tl.load(offsets_ptr + chunk + 1)
    scale = tl.load(scale_ptr + chunk)
    for place in range(begin, end):
        row = tl.load(order_ptr + place).to(tl.int64)
        factor = tl.where(scale == 0.0, 0.0, -tl.load(centre_ptr + row) * scale)
        label_column = -1
        label_weight = 0.0
        label_logit = 0.0
        if label_ptr is not None:
            label_column = tl.load(label_ptr + row).to(tl.int32)
            label_weight = tl.load(label_weight_ptr + row)
            at_label = logits_ptr + row * row_stride + label_column
            label_logit = tl.load(at_label, mask=label_column >= 0, other=0.0).to(tl.float32)
            if not HAS_TEMPERATURE:
                factor += label_weight
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
            slope = tl.where(factor == 0.0, 0.0, probabilities * factor)
            if HAS_TEMPERATURE and label_ptr is not None:
                probabilities = row_probabilities(
                    logits_ptr,
                    row,
                    row_stride,
                    plain_peak_ptr,
                    plain_log_sum_ptr,
                    columns,
                    held,
                    valid,
                    1.0,
                    False,
                )
                slope += tl.where(label_weight == 0.0, 0.0, probabilities * label_weight)
            # The gradient may be the logits, which other threads may still be reading.
            tl.debug_barrier()
            place_of = gradient_ptr + row * gradient_stride + columns
            tl.store(place_of, slope.to(gradient_ptr.dtype.element_ty), mask=held)
        if label_ptr is not None:
            value = scaled(label_logit, temperature, HAS_TEMPERATURE)
            share = tl.exp(value - tl.load(peak_ptr + row) - tl.load(log_sum_ptr + row))
            slope = tl.where(factor == 0.0, 0.0, share * factor)
            if HAS_TEMPERATURE:
                peak = tl.load(plain_peak_ptr + row)
                share = tl.exp(label_logit - peak - tl.load(plain_log_sum_ptr + row))
                slope += tl.where(label_weight == 0.0, 0.0, share * label_weight)
            slope = (slope - label_weight).to(gradient_ptr.dtype.element_ty)
            at_label = gradient_ptr + row * gradient_stride + label_column
            # Behind the store of the whole row.
            tl.debug_barrier()
            tl.store(at_label, slope, mask=(label_column >= 0) & (label_weight != 0.0))


@kernel(do_not_specialize=["first_chunk"])
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
    label_ptr,
    label_weight_ptr,
    plain_peak_ptr,
    plain_log_sum_ptr,
    first_chunk,
    gradient_stride,
    capacity,
    weight,
    temperature,
    HAS_BASE: tl.constexpr,
    HAS_TEMPERATURE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write ``q_i (base_c + weight sign - centre_i) scale_c`` at the candidates, by chunk, with the
    gradient of the rows' labels."""
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
            probabilities = tl.exp(values - peak - log_sum)
            slope = probabilities * slope * scale
            slope = tl.where(scale == 0.0, 0.0, slope)
            if label_ptr is not None:
                label_weight = tl.load(label_weight_ptr + row)
                if HAS_TEMPERATURE:
                    of_row = tl.load(plain_peak_ptr + row), tl.load(plain_log_sum_ptr + row)
                    probabilities = tl.exp(loaded.to(tl.float32) - of_row[0] - of_row[1])
                slope += tl.where(label_weight == 0.0, 0.0, probabilities * label_weight)
                slope -= tl.where(column == tl.load(label_ptr + row), label_weight, 0.0)
            tl.store(
                gradient_ptr + row * gradient_stride + column,
                slope.to(gradient_ptr.dtype.element_ty),
                mask=used,
            )
