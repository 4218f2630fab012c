"""Triton kernels of a few tokens of each row beside all others, for which torch would take some
two hundred small operations. T rows, K tokens, C chunks."""

import triton
import triton.language as tl

from megatron_ext.ops.kernel import kernel
from megatron_ext.ops.triton_math import event_terms, log_add


@kernel(do_not_specialize_on_alignment=["token_ptr", "label_ptr", "column_ptr"])
def ask_tokens_kernel(
    logits_ptr,
    token_ptr,
    label_ptr,
    row_stride,
    token_stride,
    start,
    width,
    vocab_size,
    words,
    tokens,
    asked_ptr,
    column_ptr,
    place_ptr,
    picked_ptr,
    of_row_ptr,
    bits_ptr,
    HAS_LABELS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Tokens of a row, K and, with labels, one more: the label if it is none of them. Their columns
    of this rank, from ``start`` on, their logits, and their bits among those of the row.

    ``place`` is that of the label, K if it is none of the tokens.
    """
    row = tl.program_id(0).to(tl.int64)
    entry = tl.arange(0, BLOCK)
    token = tl.load(token_ptr + row * token_stride + entry, mask=entry < tokens, other=-1)
    entries = tokens
    if HAS_LABELS:
        label = tl.load(label_ptr + row)
        place = tl.min(tl.where((token == label) & (label >= 0), entry, tokens), axis=0)
        is_apart = (place == tokens) & (label < vocab_size)
        token = tl.where(entry == tokens, tl.where(is_apart, label, -1), token)
        tl.store(place_ptr + row, place.to(tl.int64))
        entries += 1
    exists = entry < entries
    local = token - start
    is_here = exists & (token >= 0) & (local >= 0) & (local < width)
    at = row * entries + entry
    tl.store(asked_ptr + at, token, mask=exists)
    tl.store(column_ptr + at, tl.where(is_here, local, -1), mask=exists)
    picked = tl.load(logits_ptr + row * row_stride + local, mask=is_here, other=0.0)
    tl.store(picked_ptr + at, picked.to(tl.float32), mask=exists)
    tl.store(of_row_ptr + row, (row + 1).to(tl.int32))
    # Each column comes once, and the order in which bits are set does not matter.
    local = tl.where(is_here, local, 0)
    bit = tl.full((BLOCK,), 1, tl.int32) << (local % 32).to(tl.int32)
    tl.atomic_or(bits_ptr + (row + 1) * words + local // 32, bit, mask=is_here)


@kernel(
    do_not_specialize=["rows"],
    do_not_specialize_on_alignment=["peak_ptr", "log_sum_ptr", "label_ptr"],
)
def token_log_probs_kernel(
    picked_ptr,
    peak_ptr,
    log_sum_ptr,
    asked_ptr,
    label_ptr,
    place_ptr,
    vocab_size,
    rows,
    entries,
    log_prob_ptr,
    whole_ptr,
    loss_ptr,
    HAS_LABELS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Log-probabilities of a row's tokens and of all others together from merged numbers; peak and
    logarithm of the row's sum, [2, T]; the label's cross-entropy."""
    row = tl.program_id(0).to(tl.int64)
    entry = tl.arange(0, BLOCK)
    exists = entry < entries
    token = tl.load(asked_ptr + row * entries + entry, mask=exists, other=-1)
    picked = tl.load(picked_ptr + row * entries + entry, mask=exists, other=0.0)
    picked = tl.where(exists & (token >= 0), picked, -float("inf"))
    peak = tl.load(peak_ptr + row)
    log_sum = tl.load(log_sum_ptr + row)
    top = tl.max(picked, axis=0)
    rest = peak + log_sum
    top = tl.where(rest > top, rest, top)
    top = tl.where(top == -float("inf"), 0.0, top)
    # Peaks first: the difference of two large numbers is exact, their sums are not.
    picked = picked - top
    of_rest = (peak - top) + log_sum
    log_total = tl.log(tl.sum(tl.exp(picked), axis=0) + tl.exp(of_rest))
    out = log_prob_ptr + row * (entries + 1)
    log_prob = picked - log_total
    tl.store(out + entry, log_prob, mask=exists)
    tl.store(out + entries, of_rest - log_total)
    tl.store(whole_ptr + row, top)
    tl.store(whole_ptr + rows + row, log_total)
    if HAS_LABELS:
        label = tl.load(label_ptr + row)
        at_place = entry == tl.load(place_ptr + row)
        loss = -tl.sum(tl.where(at_place, log_prob, 0.0), axis=0)
        loss = tl.where(label >= vocab_size, float("nan"), loss)
        tl.store(loss_ptr + row, tl.where(label < 0, 0.0, loss))


@kernel(
    do_not_specialize=["rows"],
    do_not_specialize_on_alignment=["on_ptr", "peak_ptr", "log_sum_ptr", "label_ptr", "weight_ptr"],
)
def token_gradients_kernel(
    log_prob_ptr,
    on_ptr,
    peak_ptr,
    log_sum_ptr,
    label_ptr,
    place_ptr,
    weight_ptr,
    weight,
    rows,
    entries,
    row_ptr,
    value_ptr,
    rests_ptr,
    of_row_ptr,
    HAS_LABELS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Gradients of a row's selected logits from those of its log-probabilities and of its label's
    cross-entropy, and [3, T] peak, log-sum-exp and gradient of the others'."""
    row = tl.program_id(0).to(tl.int64)
    entry = tl.arange(0, BLOCK)
    at = row * (entries + 1) + entry
    log_prob = tl.load(log_prob_ptr + at, mask=entry <= entries, other=-float("inf"))
    on = tl.load(on_ptr + at, mask=entry <= entries, other=0.0)
    if HAS_LABELS:
        if weight_ptr is not None:
            weight = tl.load(weight_ptr)
        is_label = (entry == tl.load(place_ptr + row)) & (tl.load(label_ptr + row) >= 0)
        on = tl.where(is_label, on - weight, on)
    # What is not there gets nothing.
    on = tl.where(log_prob == -float("inf"), 0.0, on)
    gradient = on - tl.exp(log_prob) * tl.sum(on, axis=0)
    is_used = tl.max(tl.where(on != 0.0, 1, 0), axis=0) > 0
    gradient = tl.where(is_used, gradient, 0.0)
    exists = entry < entries
    tl.store(row_ptr + row * entries + entry, tl.zeros((BLOCK,), tl.int64) + row, mask=exists)
    tl.store(value_ptr + row * entries + entry, gradient, mask=exists)
    tl.store(rests_ptr + row, tl.load(peak_ptr + row))
    tl.store(rests_ptr + rows + row, tl.load(log_sum_ptr + row))
    # 0 of an empty rest, whose sum is not read then.
    of_rest = tl.sum(tl.where(entry == entries, gradient, 0.0), axis=0)
    tl.store(rests_ptr + 2 * rows + row, of_rest)
    tl.store(of_row_ptr + row, (row + 1).to(tl.int32))


@kernel(do_not_specialize_on_alignment=["token_ptr"])
def tokens_of_chunks_kernel(
    token_ptr,
    partner_ptr,
    student_spans_ptr,
    teacher_spans_ptr,
    tokens,
    out_ptr,
    BLOCK: tl.constexpr,
):
    """Tokens of a chunk's first teacher row, or their partners, at its first student row."""
    chunk = tl.program_id(0).to(tl.int64)
    row = tl.load(student_spans_ptr + 2 * chunk)
    its_row = tl.load(teacher_spans_ptr + 2 * chunk)
    entry = tl.arange(0, BLOCK)
    token = tl.load(token_ptr + its_row * tokens + entry, mask=entry < tokens, other=-1)
    if partner_ptr is not None:
        token = tl.load(partner_ptr + token, mask=token >= 0, other=-1)
    tl.store(out_ptr + row * tokens + entry, token, mask=entry < tokens)


@triton.jit
def renormalised(log_prob, inside, count):
    """Log-probabilities among ``count`` entries, uniform where none has mass, and whether one
    has."""
    top = tl.max(tl.where(inside, log_prob, -float("inf")), axis=0)
    # NaN is mass, which a maximum leaves out: it must show.
    has_mass = tl.max(tl.where(inside & (log_prob != -float("inf")), 1, 0), axis=0) > 0
    log_prob = tl.where(has_mass, log_prob - tl.where(top == -float("inf"), 0.0, top), 0.0)
    total = tl.sum(tl.where(inside, tl.exp(log_prob), 0.0), axis=0)
    return tl.where(inside, log_prob - tl.log(total), -float("inf")), has_mass


@triton.jit
def first_of_largest(values, entry, inside, BLOCK: tl.constexpr):
    """Place of the largest value, the first of equals."""
    values = tl.where(inside, values, -float("inf"))
    is_largest = inside & (values == tl.max(values, axis=0))
    return tl.min(tl.where(is_largest, entry, BLOCK), axis=0)


@triton.jit
def compared_terms(log_p, log_q, mixture, DIRECTION: tl.constexpr):
    """``event_terms``; the slopes of the reverse KL leave out Q, which the softmax takes out."""
    value, slope = event_terms(log_p, log_q, mixture, DIRECTION)
    if DIRECTION == "reverse":
        slope = value
    return value, slope


@kernel(do_not_specialize=["chunks"], do_not_specialize_on_alignment=["teacher_ptr"])
def compare_selected_kernel(
    student_ptr,
    teacher_ptr,
    student_spans_ptr,
    teacher_spans_ptr,
    chunks,
    tokens,
    mixture,
    values_ptr,
    slope_ptr,
    agrees_ptr,
    HAS_LABEL: tl.constexpr,
    RENORMALISES: tl.constexpr,
    DIRECTION: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Divergence of a chunk over the tokens of its first rows and the rest, and the teacher's mass
    in the rest, [2, C]; its slopes; whether both models have the same most probable token.

    The student's rows have one entry more if they have a label apart, which belongs to the rest.
    """
    chunk = tl.program_id(0).to(tl.int64)
    entry = tl.arange(0, BLOCK)
    entries = tokens + 1
    if HAS_LABEL:
        entries += 1
    own = student_ptr + tl.load(student_spans_ptr + 2 * chunk) * entries
    its = teacher_ptr + tl.load(teacher_spans_ptr + 2 * chunk) * (tokens + 1)
    rest = tl.load(own + entries - 1)
    joined = rest
    if HAS_LABEL:
        label = tl.load(own + tokens)
        joined = log_add(label, rest)
    inside = entry < tokens
    log_q = tl.load(own + entry, mask=inside, other=-float("inf"))
    log_p = tl.load(its + entry, mask=entry <= tokens, other=-float("inf"))
    same = first_of_largest(log_q, entry, inside, BLOCK) == first_of_largest(
        log_p, entry, inside, BLOCK
    )
    tl.store(agrees_ptr + chunk, same)
    tl.store(values_ptr + chunks + chunk, tl.exp(tl.load(its + tokens)))
    if RENORMALISES:
        log_p, _ = renormalised(log_p, inside, tokens)
        log_q, has_mass = renormalised(log_q, inside, tokens)
        value, slope = compared_terms(log_p, log_q, mixture, DIRECTION)
        value = tl.where(inside, value, 0.0)
        slope = tl.where(inside, slope, 0.0)
        slope = tl.where(has_mass, slope - tl.exp(log_q) * tl.sum(slope, axis=0), 0.0)
        of_rest = 0.0
    else:
        log_q = tl.where(entry == tokens, joined, log_q)
        value, slope = compared_terms(log_p, log_q, mixture, DIRECTION)
        value = tl.where(entry <= tokens, value, 0.0)
        of_rest = tl.sum(tl.where(entry == tokens, slope, 0.0), axis=0)
    tl.store(values_ptr + chunk, tl.sum(value, axis=0))
    out = slope_ptr + chunk * entries
    tl.store(out + entry, slope, mask=inside)
    has_rest = joined != -float("inf")
    # The shares of nothing would be NaN.
    joined = tl.where(has_rest, joined, 0.0)
    if HAS_LABEL:
        tl.store(out + tokens, tl.where(has_rest, of_rest * tl.exp(label - joined), 0.0))
    tl.store(out + entries - 1, tl.where(has_rest, of_rest * tl.exp(rest - joined), 0.0))


@kernel(do_not_specialize_on_alignment=["arrives_ptr"])
def slopes_of_rows_kernel(
    slope_ptr,
    arrives_ptr,
    student_spans_ptr,
    entries,
    out_ptr,
    BLOCK: tl.constexpr,
):
    """A chunk's slopes by what arrives for it, at its first student row."""
    chunk = tl.program_id(0).to(tl.int64)
    row = tl.load(student_spans_ptr + 2 * chunk)
    entry = tl.arange(0, BLOCK)
    slope = tl.load(slope_ptr + chunk * entries + entry, mask=entry < entries, other=0.0)
    arrives = tl.load(arrives_ptr + chunk)
    out = tl.where(arrives == 0.0, 0.0, slope * arrives)
    tl.store(out_ptr + row * entries + entry, out, mask=entry < entries)
