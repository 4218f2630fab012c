"""Triton kernels for numbers of rows and of chunks of one token a side, which torch would take a
hundred small operations for. T rows, C chunks."""

import triton
import triton.language as tl

from megatron_ext.ops.kernel import kernel
from megatron_ext.ops.triton_math import event_terms, log_add, lost_share


@triton.jit
def peak_of_set(peak, log_sum):
    """Peak of a set of columns, -inf of one without a column, which has no peak of its own."""
    return tl.where(log_sum == -float("inf"), -float("inf"), peak)


@kernel(
    do_not_specialize=["rows"],
    do_not_specialize_on_alignment=[
        "members_peak_ptr", "members_sum_ptr", "others_peak_ptr", "others_sum_ptr",
    ],
)  # fmt: skip
def whole_rows_kernel(
    members_peak_ptr,
    members_sum_ptr,
    others_peak_ptr,
    others_sum_ptr,
    weight_ptr,
    rows,
    numbers_ptr,
    BLOCK: tl.constexpr,
):
    """Log-sum-exp of BLOCK rows over members and others, both at temperature 1, and the weights of
    their labels: [3, T]."""
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    exists = row < rows
    members = tl.load(members_sum_ptr + row, mask=exists, other=0.0)
    others = tl.load(others_sum_ptr + row, mask=exists, other=0.0)
    first = peak_of_set(tl.load(members_peak_ptr + row, mask=exists, other=0.0), members)
    second = peak_of_set(tl.load(others_peak_ptr + row, mask=exists, other=0.0), others)
    top = tl.where(first > second, first, second)
    top = tl.where(top == -float("inf"), 0.0, top)
    tl.store(numbers_ptr + row, top, mask=exists)
    total = log_add(first - top + members, second - top + others)
    tl.store(numbers_ptr + rows + row, total, mask=exists)
    weight = tl.load(weight_ptr + row, mask=exists, other=0.0)
    tl.store(numbers_ptr + 2 * rows + row, weight, mask=exists)


@triton.jit
def norm_of(
    members_peak_ptr,
    members_sum_ptr,
    others_peak_ptr,
    others_sum_ptr,
    row,
    exists,
    temperature,
):
    """Peak and log-sum-exp of a row's events, peak and sum of its rest at temperature 1, and the
    log-probabilities of the rest and of the most probable shared token."""
    members = tl.load(members_sum_ptr + row, mask=exists, other=0.0)
    others = tl.load(others_sum_ptr + row, mask=exists, other=0.0)
    others_peak = tl.load(others_peak_ptr + row, mask=exists, other=0.0)
    first = peak_of_set(tl.load(members_peak_ptr + row, mask=exists, other=0.0), members)
    second = peak_of_set(others_peak, others) / temperature
    top = tl.where(first > second, first, second)
    top = tl.where(top == -float("inf"), 0.0, top)
    rest = second - top + others / temperature
    total = log_add(first - top + members, rest)
    # 0 where there is no rest, so that its difference to it is 0 as well.
    others = tl.where(others == -float("inf"), 0.0, others)
    return top, total, others_peak, others, rest - total, first - top - total


@kernel(
    do_not_specialize=["chunks"],
    do_not_specialize_on_alignment=[
        "student_members_peak_ptr", "student_members_sum_ptr", "student_others_peak_ptr",
        "student_others_sum_ptr", "teacher_members_peak_ptr", "teacher_members_sum_ptr",
        "teacher_others_peak_ptr", "teacher_others_sum_ptr", "student_row_ptr", "teacher_row_ptr",
    ],
)  # fmt: skip
def single_norms_kernel(
    student_members_peak_ptr,
    student_members_sum_ptr,
    student_others_peak_ptr,
    student_others_sum_ptr,
    teacher_members_peak_ptr,
    teacher_members_sum_ptr,
    teacher_others_peak_ptr,
    teacher_others_sum_ptr,
    student_row_ptr,
    teacher_row_ptr,
    student_column_ptr,
    teacher_column_ptr,
    chunks,
    temperature,
    norms_ptr,
    column_ptr,
    BLOCK: tl.constexpr,
):
    """Normalisers of BLOCK chunks of one token a side, [14, C], and the largest shared columns of
    both rows, [2, C]; ``SingleNorms`` has their order."""
    chunk = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    exists = chunk < chunks
    row = tl.load(student_row_ptr + chunk, mask=exists, other=0)
    peak, total, rest_peak, rest_sum, log_rest, best = norm_of(
        student_members_peak_ptr, student_members_sum_ptr, student_others_peak_ptr,
        student_others_sum_ptr, row, exists, temperature,
    )  # fmt: skip
    out = norms_ptr + chunk
    tl.store(out, peak, mask=exists)
    tl.store(out + chunks, total, mask=exists)
    tl.store(out + 4 * chunks, rest_peak, mask=exists)
    tl.store(out + 5 * chunks, rest_sum, mask=exists)
    tl.store(out + 6 * chunks, tl.exp(log_rest), mask=exists)
    tl.store(out + 7 * chunks, log_rest, mask=exists)
    tl.store(out + 8 * chunks, best, mask=exists)
    column = tl.load(student_column_ptr + row, mask=exists, other=0)
    tl.store(column_ptr + chunk, column, mask=exists)
    row = tl.load(teacher_row_ptr + chunk, mask=exists, other=0)
    peak, total, rest_peak, rest_sum, log_rest, best = norm_of(
        teacher_members_peak_ptr, teacher_members_sum_ptr, teacher_others_peak_ptr,
        teacher_others_sum_ptr, row, exists, temperature,
    )  # fmt: skip
    tl.store(out + 2 * chunks, peak, mask=exists)
    tl.store(out + 3 * chunks, total, mask=exists)
    tl.store(out + 9 * chunks, rest_peak, mask=exists)
    tl.store(out + 10 * chunks, rest_sum, mask=exists)
    tl.store(out + 11 * chunks, tl.exp(log_rest), mask=exists)
    tl.store(out + 12 * chunks, log_rest, mask=exists)
    tl.store(out + 13 * chunks, best, mask=exists)
    column = tl.load(teacher_column_ptr + row, mask=exists, other=0)
    tl.store(column_ptr + chunks + chunk, column, mask=exists)


@kernel(
    do_not_specialize=["chunks"],
    do_not_specialize_on_alignment=["student_column_ptr", "teacher_column_ptr"],
)
def single_agreement_kernel(
    norms_ptr, student_column_ptr, teacher_column_ptr, token_ptr, tokens, chunks, out_ptr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Whether both models have the same most probable event: ``norms`` [14, C], global columns [C],
    and the student's token of each of the teacher's ``tokens``."""
    chunk = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    exists = chunk < chunks
    norm = norms_ptr + chunk
    own_rest = tl.load(norm + 7 * chunks, mask=exists) > tl.load(norm + 8 * chunks, mask=exists)
    its_rest = tl.load(norm + 12 * chunks, mask=exists) > tl.load(norm + 13 * chunks, mask=exists)
    own = tl.load(student_column_ptr + chunk, mask=exists, other=0)
    its = tl.load(teacher_column_ptr + chunk, mask=exists, other=0)
    # Without a shared token that has any mass, no column of the vocabulary comes back.
    its = tl.load(token_ptr + tl.minimum(its, tokens - 1), mask=exists, other=0)
    agrees = tl.where(own_rest | its_rest, own_rest & its_rest, own == its)
    tl.store(out_ptr + chunk, agrees, mask=exists)


@kernel(
    do_not_specialize=["count"],
    do_not_specialize_on_alignment=["norms_ptr", "sum_ptr", "scale_ptr"],
)
def rest_terms_kernel(
    norms_ptr,
    sum_ptr,
    scale_ptr,
    count,
    temperature,
    mixture,
    value_ptr,
    factors_ptr,
    DIRECTION: tl.constexpr,
    IS_LOST: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The rest's part of the value of ``count`` chunks, and the factors of their gradient [3, C'].

    ``norms`` are [14, C']. ``sum`` is that of the slopes of the shared
    tokens, or the teacher's mass on those that the student masks, where it ``IS_LOST``: forward KL
    has minus the rest of the teacher's mass as slopes.
    """
    chunk = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    exists = chunk < count
    log_q = tl.load(norms_ptr + 7 * count + chunk, mask=exists, other=0.0)
    log_p = tl.load(norms_ptr + 12 * count + chunk, mask=exists, other=0.0)
    value, slope = event_terms(log_p, log_q, mixture, DIRECTION)
    total = tl.load(sum_ptr + chunk, mask=exists, other=0.0)
    if IS_LOST:
        total = total - lost_share(log_p)
    total += slope
    weight = 1.0
    if scale_ptr is not None:
        weight = tl.load(scale_ptr + chunk, mask=exists, other=0.0)
    tl.store(value_ptr + chunk, value, mask=exists)
    tl.store(factors_ptr + chunk, total, mask=exists)
    tl.store(factors_ptr + count + chunk, slope - tl.exp(log_q) * total, mask=exists)
    weight = tl.zeros((BLOCK,), tl.float32) + weight / temperature
    tl.store(factors_ptr + 2 * count + chunk, weight, mask=exists)


@kernel(
    do_not_specialize=["singles", "chunks"],
    do_not_specialize_on_alignment=[
        "factor_ptr", "single_rest_ptr", "single_teacher_rest_ptr", "single_agreement_ptr",
        "chain_agreement_ptr",
    ],
)  # fmt: skip
def values_by_chunk_kernel(
    single_ptr,
    single_rest_ptr,
    single_teacher_rest_ptr,
    single_agreement_ptr,
    chain_ptr,
    chain_rest_ptr,
    chain_teacher_rest_ptr,
    chain_agreement_ptr,
    counted_ptr,
    place_ptr,
    factor_ptr,
    factor,
    singles,
    chunks,
    values_ptr,
    usable_ptr,
    BLOCK: tl.constexpr,
):
    """Divergences by their factors, rests and agreement of BLOCK chunks, [4, C], and which are
    compared.

    ``place`` is that of a chunk among the singles and then the chains, -1 for none.
    """
    chunk = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    exists = chunk < chunks
    place = tl.load(place_ptr + chunk, mask=exists, other=-1)
    is_single = (place >= 0) & (place < singles)
    is_chain = place >= singles
    chain = place - singles
    counted = tl.load(counted_ptr + chain, mask=is_chain, other=0) != 0
    tl.store(usable_ptr + chunk, is_single | (is_chain & counted), mask=exists)
    if factor_ptr is not None:
        factor = tl.load(factor_ptr + chunk, mask=exists, other=0.0)
    out = values_ptr + chunk
    value = tl.load(single_ptr + place, mask=is_single, other=0.0)
    value += tl.load(chain_ptr + chain, mask=is_chain, other=0.0)
    tl.store(out, value * factor, mask=exists)
    value = tl.load(single_rest_ptr + place, mask=is_single, other=0.0)
    value += tl.load(chain_rest_ptr + chain, mask=is_chain, other=0.0)
    tl.store(out + chunks, value, mask=exists)
    value = tl.load(single_teacher_rest_ptr + place, mask=is_single, other=0.0)
    value += tl.load(chain_teacher_rest_ptr + chain, mask=is_chain, other=0.0)
    tl.store(out + 2 * chunks, value, mask=exists)
    agrees = tl.load(single_agreement_ptr + place, mask=is_single, other=0) != 0
    agrees = agrees | (tl.load(chain_agreement_ptr + chain, mask=is_chain, other=0) != 0)
    tl.store(out + 3 * chunks, tl.where(agrees, 1.0, 0.0), mask=exists)
