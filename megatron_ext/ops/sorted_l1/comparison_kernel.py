"""Triton kernel that compares both sides' sorted candidates place by place."""

import triton
import triton.language as tl

ROUNDING: tl.constexpr = tl.constexpr(8 * 1.1920928955078125e-07)
"""8 units in the last place of 1, within which two probabilities count as equal."""


@triton.jit
def compare_places_kernel(
    student_ptr,
    origin_ptr,
    teacher_ptr,
    rest_ptr,
    value_ptr,
    left_out_ptr,
    signs_ptr,
    places,
    student_count,
    teacher_count,
    first_origin,
    own_count,
    BLOCK: tl.constexpr,
):
    """One program for each chunk: L1 of the first ``places``, what is left out, and the signs.

    ``student`` [C', student_count] and ``teacher`` [C', teacher_count] are in descending order and
    below 0 where there is no candidate. ``signs`` [C', own_count] are by the student's ``origin``
    from ``first_origin`` on, of which each is met once; ``rest`` [C'] is the mass outside the
    candidates.
    """
    program = tl.program_id(0).to(tl.int64)
    student_ptr += program * student_count
    origin_ptr += program * student_count
    teacher_ptr += program * teacher_count
    signs_ptr += program * own_count
    values = tl.zeros((BLOCK,), tl.float32)
    tails = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, tl.maximum(student_count, teacher_count), BLOCK):
        place = start + tl.arange(0, BLOCK)
        is_own = place < student_count
        held = tl.load(student_ptr + place, mask=is_own, other=0.0)
        other = tl.load(teacher_ptr + place, mask=place < teacher_count, other=0.0)
        # NaN is not below 0, and stays.
        first = tl.where(held < 0.0, 0.0, held)
        second = tl.where(other < 0.0, 0.0, other)
        together = first + second
        difference = first - second
        distance = tl.abs(difference)
        compared = place < places
        values += tl.where(compared, distance, 0.0)
        tails += tl.where(compared, 0.0, together)
        has_sign = compared & (held >= 0.0) & (distance > together * ROUNDING)
        sign = tl.where(has_sign, tl.where(difference > 0.0, 1, -1), 0)
        slot = tl.load(origin_ptr + place, mask=is_own, other=-1) - first_origin
        stored = is_own & (slot >= 0) & (slot < own_count)
        tl.store(signs_ptr + slot, sign.to(tl.int8), mask=stored)
    tl.store(value_ptr + program, tl.sum(values, axis=0))
    tl.store(left_out_ptr + program, tl.load(rest_ptr + program) + tl.sum(tails, axis=0))
