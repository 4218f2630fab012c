"""Triton kernels that look up the chosen columns of chains, and their gradients.

T rows, N chosen columns and R rows of chains, S steps, C singles, W words of 32 columns.
"""

import triton.language as tl

from megatron_ext.ops.kernel import kernel

IMPOSSIBLE = tl.constexpr(-1e9)
"""Log-mass of an impossible event, as in ``chain_masses.py``."""


@kernel(do_not_specialize=["rows"], do_not_specialize_on_alignment=["read_ptr"])
def split_begin_kernel(
    read_ptr, base, word_ptr, rows, words, of_row_ptr, bits_ptr, BLOCK: tl.constexpr
):
    """What rows of no chunk and the first row of bits hold: ``RowSplit`` says what.

    ``read`` are rows to read of no chunk; where there is none, all rows get ``base``.
    """
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    found = tl.zeros((BLOCK,), tl.int32) + base
    if read_ptr is not None:
        found = tl.load(read_ptr + place, mask=place < rows, other=0).to(tl.int32) - 2
    tl.store(of_row_ptr + place, found, mask=place < rows)
    is_word = place < words
    tl.store(bits_ptr + place, tl.load(word_ptr + place, mask=is_word, other=0), mask=is_word)


@kernel(
    do_not_specialize=["start", "steps", "ends", "completions", "singles"],
    do_not_specialize_on_alignment=[
        "step_row_ptr", "last_row_ptr", "step_label_ptr", "completion_ptr", "chain_ptr",
        "single_row_ptr", "peak_ptr", "total_ptr",
    ],
)  # fmt: skip
def split_entries_kernel(
    logits_ptr,
    row_stride,
    step_row_ptr,
    last_row_ptr,
    step_label_ptr,
    completion_ptr,
    chain_ptr,
    single_row_ptr,
    start,
    width,
    steps,
    ends,
    completions,
    singles,
    words,
    of_row_ptr,
    bits_ptr,
    row_ptr,
    column_ptr,
    local_ptr,
    place_ptr,
    at_row_ptr,
    peak_ptr,
    total_ptr,
    BLOCK: tl.constexpr,
):
    """Rows of BLOCK steps and ends of chains, and of singles, and chosen columns: their logits, and
    their bits among those of their row. ``start`` is this rank's first column."""
    entry = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_single = entry < singles
    row = tl.load(single_row_ptr + entry, mask=is_single, other=0)
    tl.store(of_row_ptr + row, tl.zeros((BLOCK,), tl.int32), mask=is_single)

    is_step = entry < steps
    is_end = (entry >= steps) & (entry < steps + ends)
    row = tl.load(step_row_ptr + entry, mask=is_step, other=0)
    row = tl.where(is_end, tl.load(last_row_ptr + entry - steps, mask=is_end, other=0), row)
    tl.store(row_ptr + entry, row, mask=is_step | is_end)
    tl.store(of_row_ptr + row, entry + 1, mask=is_step | is_end)

    is_completion = (entry >= steps) & (entry < steps + completions)
    exists = is_step | is_completion
    chain = tl.load(chain_ptr + entry - steps, mask=is_completion, other=0)
    place = tl.where(is_completion, chain + steps, entry)
    at_row = tl.load(step_row_ptr + entry, mask=is_step, other=0)
    last = tl.load(last_row_ptr + chain, mask=is_completion, other=0)
    at_row = tl.where(is_completion, last, at_row)
    column = tl.load(step_label_ptr + entry, mask=is_step, other=-1)
    completion = tl.load(completion_ptr + entry - steps, mask=is_completion, other=-1)
    column = tl.where(is_completion, completion, column)
    local = column - start
    is_here = (local >= 0) & (local < width)
    tl.store(column_ptr + entry, column, mask=exists)
    tl.store(local_ptr + entry, tl.where(is_here, local, -1), mask=exists)
    tl.store(place_ptr + entry, place, mask=exists)
    tl.store(at_row_ptr + entry, at_row, mask=exists)
    picked = tl.load(logits_ptr + at_row * row_stride + local, mask=exists & is_here, other=0.0)
    tl.store(peak_ptr + entry, picked.to(tl.float32), mask=exists)
    tl.store(total_ptr + entry, tl.where(is_here, 1.0, 0.0), mask=exists)
    # Each column comes once in a row, and the order in which bits are set does not matter.
    local = tl.where(is_here, local, 0)
    bit = tl.full((BLOCK,), 1, tl.int32) << (local % 32).to(tl.int32)
    word = bits_ptr + (place.to(tl.int64) + 1) * words + local // 32
    tl.atomic_or(word, bit, mask=exists & is_here)


@kernel(
    do_not_specialize=["steps", "rows"],
    do_not_specialize_on_alignment=[
        "peak_ptr", "log_sum_ptr", "others_peak_ptr", "others_sum_ptr",
    ],
)  # fmt: skip
def chosen_logits_kernel(
    peak_ptr,
    log_sum_ptr,
    others_peak_ptr,
    others_sum_ptr,
    row_ptr,
    edge_ptr,
    steps,
    rows,
    chosen_ptr,
    rest_ptr,
    rests_ptr,
    BLOCK: tl.constexpr,
):
    """Logits of a row's chosen columns and of its rest, relative to the largest; a program for each
    of the R rows. ``rests`` [3, T] get the peak and the sum of the rest, 0 where there is none."""
    number = tl.program_id(0)
    is_whole = number >= steps
    edges = edge_ptr + number - steps
    begin = tl.where(is_whole, steps + tl.load(edges, mask=is_whole, other=0), number)
    end = tl.where(is_whole, steps + tl.load(edges + 1, mask=is_whole, other=0), number + 1)
    row = tl.load(row_ptr + number)
    others_peak = tl.load(others_peak_ptr + row)
    others = tl.load(others_sum_ptr + row)
    top = tl.where(others == -float("inf"), -float("inf"), others_peak)
    for first in range(begin, end, BLOCK):
        entry = first + tl.arange(0, BLOCK)
        exists = entry < end
        logits = tl.load(peak_ptr + entry, mask=exists, other=-float("inf"))
        logits += tl.load(log_sum_ptr + entry, mask=exists, other=0.0)
        top = tl.maximum(top, tl.max(logits, axis=0))
    top = tl.where(top == -float("inf"), 0.0, top)
    for first in range(begin, end, BLOCK):
        entry = first + tl.arange(0, BLOCK)
        exists = entry < end
        logits = tl.load(peak_ptr + entry, mask=exists, other=-float("inf"))
        logits += tl.load(log_sum_ptr + entry, mask=exists, other=0.0)
        # A comparison that NaN fails keeps NaN.
        chosen = tl.where(logits - top < IMPOSSIBLE, IMPOSSIBLE, logits - top)
        tl.store(chosen_ptr + entry, chosen, mask=exists)
    rest = others_peak - top + others
    tl.store(rest_ptr + number, tl.where(rest < IMPOSSIBLE, IMPOSSIBLE, rest))
    if rests_ptr is not None:
        tl.store(rests_ptr + row, others_peak)
        tl.store(rests_ptr + rows + row, tl.where(others == -float("inf"), 0.0, others))


@kernel(
    do_not_specialize=["entries", "ends", "rows"],
    do_not_specialize_on_alignment=["peak_ptr", "log_sum_ptr", "label_ptr"],
)
def chain_gradients_kernel(
    chosen_gradient_ptr,
    rest_gradient_ptr,
    peak_ptr,
    log_sum_ptr,
    row_ptr,
    at_row_ptr,
    column_ptr,
    label_ptr,
    tokens_ptr,
    entries,
    ends,
    rows,
    rests_ptr,
    value_ptr,
    BLOCK: tl.constexpr,
):
    """Gradients of BLOCK chosen logits, those of their labels' cross-entropy included, and of the
    rests of as many of the R rows, ``ends``: in the last plane of ``rests`` [3, T]. ``tokens``
    [3, T] are the rows' peaks and sums and the weights of their labels."""
    entry = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_row = entry < ends
    row = tl.load(row_ptr + entry, mask=is_row, other=0)
    of_rest = tl.load(rest_gradient_ptr + entry, mask=is_row, other=0.0)
    tl.store(rests_ptr + 2 * rows.to(tl.int64) + row, of_rest, mask=is_row)
    exists = entry < entries
    value = tl.load(chosen_gradient_ptr + entry, mask=exists, other=0.0)
    if tokens_ptr is not None:
        row = tl.load(at_row_ptr + entry, mask=exists, other=0)
        peak = tl.load(peak_ptr + entry, mask=exists, other=0.0)
        log_prob = peak - tl.load(tokens_ptr + row, mask=exists, other=0.0)
        log_prob += tl.load(log_sum_ptr + entry, mask=exists, other=0.0)
        log_prob -= tl.load(tokens_ptr + rows + row, mask=exists, other=0.0)
        weight = tl.load(tokens_ptr + 2 * rows + row, mask=exists, other=0.0)
        column = tl.load(column_ptr + entry, mask=exists, other=-1)
        hit = column == tl.load(label_ptr + row, mask=exists, other=-2)
        token = (tl.exp(log_prob) - tl.where(hit, 1.0, 0.0)) * weight
        value += tl.where(weight == 0.0, 0.0, token)
    tl.store(value_ptr + entry, value, mask=exists)
