"""Triton kernels of likelihoods, of tokens and of chunks, and of their differences, for which torch
would take two hundred small operations. T rows, C chunks."""

import triton
import triton.language as tl

from megatron_ext.ops.kernel import kernel
from megatron_ext.ops.triton_math import exp_less_one, log_add, lost_share


@kernel(
    do_not_specialize=["rows"],
    do_not_specialize_on_alignment=[
        "token_peak_ptr", "token_sum_ptr", "whole_peak_ptr", "whole_sum_ptr", "members_peak_ptr",
        "members_sum_ptr", "token_ptr", "log_mass_ptr",
    ],
)  # fmt: skip
def token_likelihoods_kernel(
    token_peak_ptr,
    token_sum_ptr,
    whole_peak_ptr,
    whole_sum_ptr,
    members_peak_ptr,
    members_sum_ptr,
    token_ptr,
    vocab_size,
    rows,
    log_prob_ptr,
    log_mass_ptr,
    HAS_MEMBERS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Log-probabilities of BLOCK rows' tokens from merged sums, and of sets of tokens if there are
    any: 0 of a token that is not asked, NaN of one beyond the vocabulary."""
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    exists = row < rows
    token = tl.load(token_ptr + row, mask=exists, other=-1)
    whole = tl.load(whole_peak_ptr + row, mask=exists, other=0.0)
    whole_sum = tl.load(whole_sum_ptr + row, mask=exists, other=0.0)
    # Peaks first: the difference of two large numbers is exact, their sums are not.
    log_prob = tl.load(token_peak_ptr + row, mask=exists, other=0.0) - whole
    log_prob += tl.load(token_sum_ptr + row, mask=exists, other=0.0)
    log_prob = tl.where(token >= vocab_size, float("nan"), log_prob - whole_sum)
    tl.store(log_prob_ptr + row, tl.where(token < 0, 0.0, log_prob), mask=exists)
    log_mass = tl.zeros((BLOCK,), tl.float32)
    if HAS_MEMBERS:
        log_mass = tl.load(members_peak_ptr + row, mask=exists, other=0.0) - whole
        log_mass += tl.load(members_sum_ptr + row, mask=exists, other=0.0)
        log_mass -= whole_sum
    tl.store(log_mass_ptr + row, log_mass, mask=exists)


@triton.jit
def chunk_of_rows(log_prob_ptr, label_ptr, order_ptr, offsets_ptr, chunk, exists):
    """Sum of the log-probabilities of each chunk's rows, and whether each of them has a label, if
    there are labels."""
    begin = tl.load(offsets_ptr + chunk, mask=exists, other=0)
    size = tl.load(offsets_ptr + chunk + 1, mask=exists, other=0) - begin
    total = tl.zeros(chunk.shape, tl.float32)
    is_labelled = exists
    for place in range(0, tl.max(size, axis=0)):
        inside = exists & (place < size)
        row = tl.load(order_ptr + begin + place, mask=inside, other=0)
        total += tl.load(log_prob_ptr + row, mask=inside, other=0.0)
        if label_ptr is not None:
            is_labelled = is_labelled & (tl.load(label_ptr + row, mask=inside, other=0) >= 0)
    return total, is_labelled


@triton.jit
def row_behind(label_ptr, spans_ptr, behind_ptr, row_length, chunk, exists):
    """Row behind each chunk, -1 where there is none: of the same sequence and with a label, unless
    it is given."""
    if behind_ptr is not None:
        row = tl.load(behind_ptr + chunk, mask=exists, other=-1)
    else:
        row = tl.load(spans_ptr + 2 * chunk + 1, mask=exists, other=0)
        within = exists & (row % row_length != 0)
        label = tl.load(label_ptr + row, mask=within, other=-1)
        row = tl.where(label >= 0, row, -1)
    return row


@kernel(
    do_not_specialize=["student_length", "teacher_length", "chunks"],
    do_not_specialize_on_alignment=[
        "student_log_prob_ptr", "student_log_mass_ptr", "student_label_ptr",
        "teacher_log_prob_ptr", "teacher_log_mass_ptr", "teacher_label_ptr",
    ],
)  # fmt: skip
def chunk_likelihoods_kernel(
    student_log_prob_ptr,
    student_log_mass_ptr,
    student_label_ptr,
    student_order_ptr,
    student_offsets_ptr,
    student_spans_ptr,
    student_behind_ptr,
    student_length,
    teacher_log_prob_ptr,
    teacher_log_mass_ptr,
    teacher_label_ptr,
    teacher_order_ptr,
    teacher_offsets_ptr,
    teacher_spans_ptr,
    teacher_behind_ptr,
    teacher_length,
    used_ptr,
    chunks,
    numbers_ptr,
    behind_ptr,
    flags_ptr,
    BLOCK: tl.constexpr,
):
    """Likelihoods of BLOCK chunks under both models, and of what follows them: [4, C], the
    student's row behind a chunk, -1 where ``follows`` is False, and [2, C] ``follows`` and
    ``usable``."""
    chunk = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    exists = chunk < chunks
    own, is_labelled = chunk_of_rows(
        student_log_prob_ptr, student_label_ptr, student_order_ptr, student_offsets_ptr, chunk,
        exists,
    )  # fmt: skip
    its, is_labelled_too = chunk_of_rows(
        teacher_log_prob_ptr, teacher_label_ptr, teacher_order_ptr, teacher_offsets_ptr, chunk,
        exists,
    )  # fmt: skip
    usable = is_labelled & is_labelled_too
    if used_ptr is not None:
        usable = usable & (tl.load(used_ptr + chunk, mask=exists, other=0) != 0)
    row = row_behind(
        student_label_ptr, student_spans_ptr, student_behind_ptr, student_length, chunk, exists
    )
    its_row = row_behind(
        teacher_label_ptr, teacher_spans_ptr, teacher_behind_ptr, teacher_length, chunk, exists
    )
    follows = usable & (row >= 0) & (its_row >= 0)
    out = numbers_ptr + chunk
    tl.store(out, own, mask=exists)
    tl.store(out + chunks, its, mask=exists)
    own_mass = tl.load(student_log_mass_ptr + row, mask=follows, other=0.0)
    tl.store(out + 2 * chunks, own_mass, mask=exists)
    its_mass = tl.load(teacher_log_mass_ptr + its_row, mask=follows, other=0.0)
    tl.store(out + 3 * chunks, its_mass, mask=exists)
    tl.store(behind_ptr + chunk, tl.where(follows, row, -1), mask=exists)
    tl.store(flags_ptr + chunk, follows, mask=exists)
    tl.store(flags_ptr + chunks + chunk, usable, mask=exists)


@kernel(
    do_not_specialize=["rows", "chunks"],
    do_not_specialize_on_alignment=["on_chunk_ptr", "on_boundary_ptr"],
)
def chunk_likelihood_gradients_kernel(
    on_chunk_ptr,
    on_boundary_ptr,
    chunk_ptr,
    behind_ptr,
    rows,
    chunks,
    on_token_ptr,
    on_mass_ptr,
    BLOCK: tl.constexpr,
):
    """Gradients of BLOCK rows' log-probabilities, and of the log-masses behind BLOCK chunks.

    ``on_mass`` holds 0; no two chunks have the same row behind them.
    """
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    chunk = tl.load(chunk_ptr + place, mask=place < rows, other=-1)
    on_token = tl.load(on_chunk_ptr + chunk, mask=chunk >= 0, other=0.0)
    tl.store(on_token_ptr + place, on_token, mask=place < rows)
    if on_boundary_ptr is not None:
        row = tl.load(behind_ptr + place, mask=place < chunks, other=-1)
        on_mass = tl.load(on_boundary_ptr + place, mask=row >= 0, other=0.0)
        tl.store(on_mass_ptr + row, on_mass, mask=row >= 0)


@triton.jit
def log_of_lost(x, lost):
    """``log(1 - exp(x))`` of an ``x`` below 0, with ``lost`` its argument."""
    share = tl.exp(x)
    series = -share * (1 + share * (1 / 2 + share * (1 / 3 + share / 4)))
    return tl.where(share < 0.01, series, tl.log(lost))


@triton.jit
def sign_of(x):
    """-1, 0 or 1; 0 of NaN."""
    return tl.where(x > 0.0, 1.0, tl.where(x < 0.0, -1.0, 0.0))


@triton.jit
def difference_terms(x, y, alpha, DIFFERENCE: tl.constexpr):
    """D of log-probabilities below 0, and its derivative by the second; ``ops/README.md``."""
    if DIFFERENCE == "binary_kl_temp_limit":
        value = (x - y) + x * tl.log(y / x)
        slope = tl.div_rn(x, y) - 1.0
    elif DIFFERENCE == "abs":
        value = tl.abs(x - y)
        slope = sign_of(y - x)
    elif DIFFERENCE == "joschu_k2":
        value = (x - y) * (x - y) / 2
        slope = y - x
    elif DIFFERENCE == "joschu_k3":
        ratio = x - y
        # ``LARGEST_LOG_RATIO``
        inside = tl.where(ratio > 10.0, 10.0, ratio)
        slope = -exp_less_one(inside)
        value = -slope - inside - slope * (ratio - inside)
    else:
        p = tl.exp(x)
        q = tl.exp(y)
        if DIFFERENCE == "abs_exp":
            value = tl.abs(p - q)
            slope = q * sign_of(q - p)
        else:
            lost_p = lost_share(x)
            lost_q = lost_share(y)
            log_p = log_of_lost(x, lost_p)
            log_q = log_of_lost(y, lost_q)
            if DIFFERENCE == "renyi":
                happened = alpha * x + (1 - alpha) * y
                missed = alpha * log_p + (1 - alpha) * log_q
                total = log_add(happened, missed)
                value = total / (alpha - 1)
                slope = tl.exp(missed - total) * (q / lost_q) - tl.exp(happened - total)
            elif DIFFERENCE == "reverse_binary_kl":
                value = q * (y - x) + lost_q * (log_q - log_p)
                slope = q * ((y - x) - (log_q - log_p))
            else:
                # (Q - P) / (1 - Q), also where both are close to 1.
                slope = q * tl.div_rn(lost_p, lost_q) - p
                value = -p * y - lost_p * log_q
                if DIFFERENCE == "binary_kl":
                    value = p * (x - y) + lost_p * (log_p - log_q)
    return value, slope


@kernel(
    do_not_specialize=["chunks"],
    do_not_specialize_on_alignment=["student_ptr", "teacher_ptr", "compared_ptr"],
)
def compare_events_kernel(
    student_ptr,
    teacher_ptr,
    compared_ptr,
    chunks,
    temperature,
    coin,
    alpha,
    numbers_ptr,
    kept_ptr,
    DIFFERENCE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Difference of BLOCK events' log-probabilities, nats of both models, and slope: [4, C]; which
    are kept."""
    chunk = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    exists = chunk < chunks
    own = tl.load(student_ptr + chunk, mask=exists, other=0.0)
    its = tl.load(teacher_ptr + chunk, mask=exists, other=0.0)
    compared = tl.load(compared_ptr + chunk, mask=exists, other=0) != 0
    kept = compared & (own != -float("inf")) & (its != -float("inf"))
    # Rounding can put a certain event above 0, where the difference is flat.
    is_above = own > 0.0
    own = tl.where(is_above, 0.0, own)
    its = tl.where(its > 0.0, 0.0, its)
    left_out = kept == 0
    if DIFFERENCE == "abs" or DIFFERENCE == "abs_exp":
        # 64 units in the last place, see ``binary_divergence``.
        is_equal = tl.abs(its - own) <= 64 * 1.1920928955078125e-07 * (1 - its - own)
        left_out = left_out | is_equal
    x = its - coin
    y = own - coin
    if DIFFERENCE == "binary_kl_temp_limit" or DIFFERENCE == "abs":
        value, slope = difference_terms(x, y, alpha, DIFFERENCE)
    else:
        value, slope = difference_terms(x / temperature, y / temperature, alpha, DIFFERENCE)
        slope = slope / temperature
    out = numbers_ptr + chunk
    tl.store(out, tl.where(left_out, 0.0, value), mask=exists)
    tl.store(out + chunks, -own, mask=exists)
    tl.store(out + 2 * chunks, -its, mask=exists)
    tl.store(out + 3 * chunks, tl.where(left_out | is_above, 0.0, slope), mask=exists)
    tl.store(kept_ptr + chunk, kept, mask=exists)


@kernel(
    do_not_specialize=["chunks"],
    do_not_specialize_on_alignment=["student_ptr", "teacher_ptr", "usable_ptr", "sampled_ptr"],
)
def sampled_signals_kernel(
    student_ptr,
    teacher_ptr,
    usable_ptr,
    sampled_ptr,
    order_ptr,
    offsets_ptr,
    chunks,
    most_signal,
    most_ratio,
    most_in_value,
    most_log_ratio,
    numbers_ptr,
    kept_ptr,
    BLOCK: tl.constexpr,
):
    """Signals of BLOCK chunks: [6, C] loss, nats of both models, ratio, whether it is cut, and
    slope; which are kept."""
    chunk = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    exists = chunk < chunks
    own = tl.load(student_ptr + chunk, mask=exists, other=0.0)
    its = tl.load(teacher_ptr + chunk, mask=exists, other=0.0)
    kept = tl.load(usable_ptr + chunk, mask=exists, other=0) != 0
    kept = kept & (own != -float("inf")) & (its != -float("inf"))
    signal = its - own
    signal = tl.where(signal > most_signal, most_signal, signal)
    signal = tl.where(signal < -most_signal, -most_signal, signal)
    ratio = tl.full((BLOCK,), 1.0, tl.float32)
    if sampled_ptr is not None:
        total, _ = chunk_of_rows(sampled_ptr, None, order_ptr, offsets_ptr, chunk, exists)
        log_ratio = own - total
        log_ratio = tl.where(log_ratio > most_log_ratio, most_log_ratio, log_ratio)
        # NaN where a row's is not known.
        ratio = tl.where(total == total, tl.exp(log_ratio), 1.0)
    weight = tl.where(ratio > most_ratio, most_ratio, ratio)
    near = tl.where(signal > most_in_value, most_in_value, signal)
    out = numbers_ptr + chunk
    tl.store(out, tl.where(kept, exp_less_one(near) - near, 0.0), mask=exists)
    tl.store(out + chunks, -own, mask=exists)
    tl.store(out + 2 * chunks, -its, mask=exists)
    tl.store(out + 3 * chunks, ratio, mask=exists)
    tl.store(out + 4 * chunks, tl.where(ratio > most_ratio, 1.0, 0.0), mask=exists)
    tl.store(out + 5 * chunks, tl.where(kept, -weight * signal, 0.0), mask=exists)
    tl.store(kept_ptr + chunk, kept, mask=exists)
