"""Triton kernels for numbers of rows and chunks of the matched divergence. T rows, C chunks."""

import triton
import triton.language as tl

from megatron_ext.ops.kernel import kernel
from megatron_ext.ops.triton_math import event_terms

SMALLEST = tl.constexpr(1.2037062152420224e-35)
"""1024 times the smallest normal number of fp32, below which nothing is divided by."""


@triton.jit
def at_least_smallest(mass):
    """A comparison that NaN fails keeps NaN."""
    return tl.where(mass < SMALLEST, SMALLEST, mass)


@triton.jit
def mean_mass(
    peak_ptr, log_sum_ptr, members_peak_ptr, members_sum_ptr, order_ptr, begin, count, mass_ptr,
    HAS_ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Mean share of the members in the rows of chunks, and with ``HAS_ROWS`` the share of each row
    in ``mass`` [T]."""
    total = tl.zeros((BLOCK,), tl.float32)
    for step in range(0, tl.max(count, axis=0)):
        inside = step < count
        row = tl.load(order_ptr + begin + step, mask=inside, other=0)
        share = tl.load(members_peak_ptr + row) - tl.load(peak_ptr + row)
        share = share + tl.load(members_sum_ptr + row) - tl.load(log_sum_ptr + row)
        mass = tl.exp(share)
        total += tl.where(inside, mass, 0.0)
        if HAS_ROWS:
            tl.store(mass_ptr + row, mass, mask=inside)
    return total / tl.maximum(count, 1)


@kernel(
    do_not_specialize=["chunks"],
    do_not_specialize_on_alignment=[
        "student_peak_ptr", "student_log_sum_ptr", "student_members_peak_ptr",
        "student_members_sum_ptr", "teacher_peak_ptr", "teacher_log_sum_ptr",
        "teacher_members_peak_ptr", "teacher_members_sum_ptr", "scale_ptr",
    ],
)  # fmt: skip
def chunk_masses_kernel(
    student_peak_ptr,
    student_log_sum_ptr,
    student_members_peak_ptr,
    student_members_sum_ptr,
    student_order_ptr,
    student_chunk_ptr,
    teacher_peak_ptr,
    teacher_log_sum_ptr,
    teacher_members_peak_ptr,
    teacher_members_sum_ptr,
    teacher_order_ptr,
    teacher_chunk_ptr,
    scale_ptr,
    chunks,
    temperature,
    mixture,
    row_mass_ptr,
    student_used_ptr,
    teacher_used_ptr,
    student_mass_ptr,
    teacher_mass_ptr,
    value_ptr,
    slope_ptr,
    factor_ptr,
    DIRECTION: tl.constexpr,
    WITH_REST: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Masses of the members of BLOCK chunks, and what follows from them.

    These are the masses that student and teacher are normalised by, ``used``, those outside the
    matched columns, ``mass``, the value and the slope of the bucket of these columns, and the
    factor of the rows' gradients. ``row_mass`` [Ts] is written for the student's rows of chunks.
    """
    chunk = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    exists = chunk < chunks
    begin = tl.load(student_chunk_ptr + chunk, mask=exists, other=0)
    own_count = tl.load(student_chunk_ptr + chunk + 1, mask=exists, other=0) - begin
    own = mean_mass(
        student_peak_ptr, student_log_sum_ptr, student_members_peak_ptr, student_members_sum_ptr,
        student_order_ptr, begin, own_count, row_mass_ptr, True, BLOCK,
    )  # fmt: skip
    begin = tl.load(teacher_chunk_ptr + chunk, mask=exists, other=0)
    its_count = tl.load(teacher_chunk_ptr + chunk + 1, mask=exists, other=0) - begin
    its = mean_mass(
        teacher_peak_ptr, teacher_log_sum_ptr, teacher_members_peak_ptr, teacher_members_sum_ptr,
        teacher_order_ptr, begin, its_count, row_mass_ptr, False, BLOCK,
    )  # fmt: skip
    value = tl.zeros((BLOCK,), tl.float32)
    slope, used_own, used_its = value, value + 1.0, value + 1.0
    if WITH_REST:
        value, slope = event_terms(tl.log(its), tl.log(own), mixture, DIRECTION)
        slope = slope / at_least_smallest(own)
    else:
        used_own, used_its = at_least_smallest(own), at_least_smallest(its)
        own = tl.where(own_count > 0, 1.0, 0.0) - own
        its = tl.where(its_count > 0, 1.0, 0.0) - its
        own, its = tl.where(own < 0.0, 0.0, own), tl.where(its < 0.0, 0.0, its)
    tl.store(student_used_ptr + chunk, used_own, mask=exists)
    tl.store(teacher_used_ptr + chunk, used_its, mask=exists)
    tl.store(student_mass_ptr + chunk, own, mask=exists)
    tl.store(teacher_mass_ptr + chunk, its, mask=exists)
    tl.store(value_ptr + chunk, value, mask=exists)
    tl.store(slope_ptr + chunk, slope, mask=exists)
    scale = 1.0
    if scale_ptr is not None:
        scale = tl.load(scale_ptr + chunk, mask=exists, other=0.0)
    factor = scale / (tl.maximum(own_count, 1).to(tl.float32) * temperature)
    tl.store(factor_ptr + chunk, factor, mask=exists)


@kernel(
    do_not_specialize=["rows"],
    do_not_specialize_on_alignment=["chunk_ptr", "row_slope_ptr", "chosen_ptr"],
)
def rest_centre_kernel(
    chunk_ptr,
    row_slope_ptr,
    chosen_ptr,
    mass_ptr,
    slope_ptr,
    rows,
    weight,
    centre_ptr,
    BLOCK: tl.constexpr,
):
    """``q_i . g_c`` of BLOCK rows where the masses outside are compared, too."""
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    exists = row < rows
    chunk = tl.load(chunk_ptr + row, mask=exists, other=-1)
    inside = chunk >= 0
    slope = tl.load(slope_ptr + chunk, mask=inside, other=0.0)
    mass = tl.load(mass_ptr + row, mask=inside, other=0.0)
    centre = tl.load(row_slope_ptr + row, mask=exists, other=0.0) + mass * slope
    centre += weight * tl.load(chosen_ptr + row, mask=exists, other=0.0)
    tl.store(centre_ptr + row, centre, mask=exists)
