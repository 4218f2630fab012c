"""Compiled loops that choose: the largest columns of rows, and given tokens against the rest.

T rows, C chunks, V columns, K chosen ones. Numbers are compared by keys, int32 in their order.
"""

from __future__ import annotations

import numpy as np
from numpy import float32, int8, int32, int64, uint32, uintp

from megatron_ext.ops.loop_math import (
    bits_of_float,
    exp,
    float_of_bits,
    loop_part,
    lowest_bit,
    reached,
)
from megatron_ext.ops.row_loops import (
    BLOCK,
    EACH,
    MINUS_INFINITY,
    SUMS,
    add_label_part,
    clear_padding,
    entry_point,
    fill,
    gather_block,
    label_weights,
    largest_place,
    load_block,
    peak_of,
    store_block,
    sum_of_exp,
)

SAMPLED = 2048
"""Keys of a row from which the least of its largest ones is guessed."""

EVERY_KEY = int32(-(2**31))
"""No key is below it."""

WIDEST_DIGIT = 12
"""Bits of a digit: the counts of its values fit into the nearest cache."""

ROUNDING = float32(8 * np.finfo(np.float32).eps)
"""Share of their sum within which two probabilities are equal."""

_ZERO = float32(0)


@loop_part(fastmath=SUMS)
def _count_from(keys, count, least):
    total = 0
    for i in range(count):
        total += 1 if keys[i] >= least else 0
    return total


@loop_part(fastmath=EACH)
def _keys(out, bits, allowed, chooses):
    """The order of numbers that are not negative, of all columns or, if it ``chooses``, the
    ``allowed`` ones."""
    if chooses:
        for i in range(len(allowed)):
            out[i] = bits[uintp(allowed[i])] & int32(0x7FFFFFFF)
        return len(allowed)
    for i in range(len(bits)):
        out[i] = bits[i] & int32(0x7FFFFFFF)
    return len(bits)


@loop_part()
def _key_of_rank(keys, count, rank):
    """The key that ``rank`` keys are not below."""
    least = EVERY_KEY
    if _count_from(keys, count, int32(0)) >= rank:
        least = int32(0)
    for bit in range(30, -1, -1):
        tried = int32(least | (int32(1) << int32(bit)))
        found = _count_from(keys, count, tried)
        if found >= rank:
            least = tried
        if found == rank:
            break
    return least


@loop_part()
def _likely_least(keys, count, rank):
    """A key that hardly more than ``rank`` keys are not below, from some of them."""
    step = count // SAMPLED
    if step < 8:
        return EVERY_KEY
    sample = keys[: SAMPLED * step : step].copy()
    share = rank * SAMPLED / count
    wanted = int(share + 4.0 * np.sqrt(share) + 8.0)
    return _key_of_rank(sample, SAMPLED, wanted) if wanted < SAMPLED else EVERY_KEY


@loop_part()
def _keep_from(kept, places, keys, count, least):
    """Keep keys from ``least`` on, and their places."""
    found, whole = 0, count - count % 32
    for first in range(0, whole, 32):
        bits = reached(keys, first, least)
        while bits:
            i = first + int64(lowest_bit(bits))
            bits &= uint32(bits - uint32(1))
            kept[found], places[found] = keys[i], i
            found += 1
    for i in range(whole, count):
        if keys[i] >= least:
            kept[found], places[found] = keys[i], i
            found += 1
    return found


@loop_part(fastmath=SUMS)
def _sum_of_block(keys, values, count, least):
    total = _ZERO
    for i in range(count):
        if keys[i] < least:
            total += values[i]
    return total


@loop_part()
def _sum_below(keys, values, count, least):
    """Sum of the values whose keys are below ``least``, in fp64."""
    total = 0.0
    for start in range(0, count, BLOCK):
        total += _sum_of_block(keys[start:], values[start:], min(BLOCK, count - start), least)
    return total


@loop_part(fastmath=SUMS)
def _range(keys, count):
    """The largest and the least key."""
    top = bottom = keys[0]
    for i in range(count):
        top = keys[i] if keys[i] > top else top
        bottom = keys[i] if keys[i] < bottom else bottom
    return top, bottom


@loop_part()
def _sort_by_digits(keys, places, count):
    """Sort descending, the lowest digit first; equal keys stay in their order.

    Digits are of the distance from the largest key: keys that lie close together have few.
    """
    ordered, origin = np.empty(count, dtype=np.int32), np.empty(count, dtype=np.int32)
    if count == 0:
        return ordered, origin
    top, bottom = _range(keys, count)
    span, bits = int64(top) - int64(bottom), 1
    while span >> bits:
        bits += 1
    passes = (bits + WIDEST_DIGIT - 1) // WIDEST_DIGIT
    width = (bits + passes - 1) // passes
    mask = (int64(1) << width) - 1
    # A key and its place move as one number, so that a digit has one place to write to.
    pairs, other = np.empty(count, dtype=np.int64), np.empty(count, dtype=np.int64)
    begins = np.zeros((passes, (1 << width) + 1), dtype=np.int32)
    for i in range(count):
        pairs[i] = ((int64(top) - int64(keys[i])) << 32) | int64(places[i])
        for number in range(passes):
            begins[number, ((pairs[i] >> (32 + number * width)) & mask) + 1] += 1
    for number in range(passes):
        begin, shift = begins[number], 32 + number * width
        for digit in range(1 << width):
            begin[digit + 1] += begin[digit]
        for i in range(count):
            digit = (pairs[i] >> shift) & mask
            other[begin[digit]] = pairs[i]
            begin[digit] += 1
        pairs, other = other, pairs
    for i in range(count):
        ordered[i] = int32(int64(top) - ((pairs[i] >> 32) & int64(0xFFFFFFFF)))
        origin[i] = int32(pairs[i] & int64(0xFFFFFFFF))
    return ordered, origin


@loop_part()
def _choose(kept, places, keys, available, count):
    """Keep the ``count`` largest keys and their places, of equals the first; return the least."""
    if count == available:
        for i in range(count):
            kept[i], places[i] = keys[i], i
        return EVERY_KEY
    guess = _likely_least(keys, available, count) if count < available else EVERY_KEY
    found = _keep_from(kept, places, keys, available, guess)
    if found < count:
        found = _keep_from(kept, places, keys, available, EVERY_KEY)
    least = _key_of_rank(kept, found, count)
    above = 0
    for i in range(found):
        above += 1 if kept[i] > least else 0
    ties, taken = count - above, 0
    for i in range(found):
        key = kept[i]
        if key > least or (key == least and ties > 0):
            ties -= 1 if key == least else 0
            kept[taken], places[taken] = key, places[i]
            taken += 1
    return least


@loop_part()
def _sum_beyond(kept, count, keys, available, least):
    """Sum of the values whose keys are not kept."""
    if count == available:
        return 0.0
    tied = 0
    for i in range(available):
        tied += 1 if keys[i] == least else 0
    for i in range(count):
        tied -= 1 if kept[i] == least else 0
    total = _sum_below(keys, keys.view(np.float32), available, least)
    return total + tied * float(float_of_bits(least)) if tied else total


@entry_point
def largest_places(first, stop, values, allowed, excluded, chosen, columns, rest):
    """The largest values of rows ``first`` to ``stop``, descending, of equals the first.

    Args:
        values: fp32 [C, V], not negative.
        allowed: int32 columns to choose from, ascending; all where none is excluded.
        excluded: int32 the other columns, which come last, with the value -1.
        chosen, columns: fp32 and int64 [C, K], written.
        rest: fp32 [C], the sum of the values that are not chosen.
    """
    width, wanted, chooses = values.shape[1], chosen.shape[1], excluded.size > 0
    keys = np.empty(width, dtype=np.int32)
    kept, places = np.empty(width + 1, dtype=np.int32), np.empty(width + 1, dtype=np.int32)
    for row in range(first, stop):
        available = _keys(keys, values[row].view(np.int32), allowed, chooses)
        count = min(wanted, available)
        least = _choose(kept, places, keys, available, count)
        rest[row] = _sum_beyond(kept, count, keys, available, least)
        ordered, origin = _sort_by_digits(kept, places, count)
        # One by one: numba compiles an error message for what is assigned to a slice, for a second.
        for i in range(count):
            chosen[row, i] = float_of_bits(ordered[i])
            columns[row, i] = allowed[origin[i]] if chooses else origin[i]
        for i in range(count, wanted):
            chosen[row, i], columns[row, i] = float32(-1), excluded[i - count]


@loop_part(fastmath=SUMS)
def _differences(a, b, count, signs):
    """Sum of ``|a - b|``, and the signs of differences beyond rounding."""
    total = _ZERO
    for i in range(count):
        apart = a[i] - b[i]
        size = abs(apart)
        total += size
        is_equal = size <= ROUNDING * (a[i] + b[i])
        signs[i] = int8(0) if is_equal else int8(1) if apart > _ZERO else int8(-1)
    return total


@loop_part(fastmath=SUMS)
def _clamped(out, values, first, count):
    """``max(value, 0)`` from place ``first`` on, 0 beyond the end."""
    held = min(max(len(values) - first, 0), count)
    for i in range(held):
        value = values[first + i]
        # NaN stays.
        out[i] = _ZERO if value < _ZERO else value
    for i in range(held, count):
        out[i] = _ZERO


@entry_point
def compare_places(first, stop, a, b, value, signs):
    """``|a - b|`` over the places of rows ``first`` to ``stop``, and the signs for ``a``.

    Args:
        a, b: fp32 [C, Ka] and [C, Kb], descending; what is below 0 is 0, as what is beyond the end.
        value: fp32 [C], written; so is ``signs`` int8 [C, Ka], 0 where two places are equal.
    """
    block, sign = np.empty((2, BLOCK), dtype=np.float32), np.empty(BLOCK, dtype=np.int8)
    for row in range(first, stop):
        total = 0.0
        for start in range(0, max(a.shape[1], b.shape[1]), BLOCK):
            count = min(BLOCK, max(a.shape[1], b.shape[1]) - start)
            _clamped(block[0], a[row], start, count)
            _clamped(block[1], b[row], start, count)
            total += _differences(block[0], block[1], count, sign)
            for i in range(min(max(a.shape[1] - start, 0), count)):
                signs[row, start + i] = sign[i] if a[row, start + i] >= _ZERO else int8(0)
        value[row] = total


@entry_point
def spread_signs(first, stop, columns, signs, weight, out):
    """Add ``weight signs`` to the ``columns`` int64 [C, K] of rows of ``out`` fp32 [C, V]."""
    for row in range(first, stop):
        for i in range(columns.shape[1]):
            out[row, uintp(columns[row, i])] += weight * float32(signs[row, i])


@loop_part(fastmath=EACH)
def _logit_keys(out, values, count):
    """The order of any numbers, in which 0.0 and -0.0 are equal."""
    for i in range(count):
        bits = bits_of_float(values[i])
        # Those of -0 are the least number; those of negative numbers grow with their magnitude.
        bits = int32(0) if bits == EVERY_KEY else bits
        out[i] = int32(bits ^ (int32(bits >> int32(31)) & int32(0x7FFFFFFF)))


@entry_point
def largest_logits(first, stop, rows, allowed, id_of_first, out):
    """Keys of the largest logits of rows ``first`` to ``stop``, descending: ``sort_keys``.

    Args:
        allowed: int32 columns to choose from, ascending.
        id_of_first: Id of column 0.
        out: int64 [T, K], written as far as there are columns.
    """
    available = len(allowed)
    values = np.empty(available, dtype=np.float32)
    keys = np.empty(available, dtype=np.int32)
    kept, places = np.empty(available + 1, np.int32), np.empty(available + 1, np.int32)
    count = min(out.shape[1], available)
    for row in range(first, stop):
        gather_block(values, rows, row, allowed, available)
        _logit_keys(keys, values, available)
        _choose(kept, places, keys, available, count)
        ordered, origin = _sort_by_digits(kept, places, count)
        for i in range(count):
            token = int64(id_of_first) + int64(allowed[origin[i]])
            out[row, i] = (int64(ordered[i]) << 32) | (int64(0xFFFFFFFF) - token)


@entry_point
def selected_logits(first, stop, rows, columns, picked, peak, total, top_column):
    """Logits of selected columns, and peaks and sums of exponentials of all others.

    Args:
        columns: int64 [T, K], each once in a row, -1 for none.
        picked: fp32 [T, K], written, 0 for none; so are ``peak`` and ``total`` [T].
        top_column: int64 [T], written: of the largest logit; or [0].
    """
    values = np.empty(rows.width, dtype=np.float32)
    for row in range(first, stop):
        load_block(values, rows, row, 0, rows.width)
        if top_column.size:
            top_column[row] = largest_place(values, rows.width)
        for i in range(columns.shape[1]):
            column = columns[row, i]
            picked[row, i] = values[column] if column >= 0 else _ZERO
        for i in range(columns.shape[1]):
            if columns[row, i] >= 0:
                values[columns[row, i]] = MINUS_INFINITY
        top, _ = peak_of(values, rows.width)
        peak[row] = top if top != MINUS_INFINITY else _ZERO
        total[row] = sum_of_exp(values, rows.width, peak[row])


@loop_part(fastmath=EACH)
def _weighted_probs(out, values, count, peak, log_sum, weight):
    for i in range(count):
        out[i] = weight * exp(values[i] - peak - log_sum)


@entry_point
def selected_gradient(first, stop, rows, columns, whole, rest, grad, gradient):
    """``selected_tokens.write_selected_gradient`` for rows ``first`` to ``stop``.

    Args:
        columns: As of ``selected_logits``.
        whole, rest: ``Normaliser`` of all columns and of those that are not selected.
        grad: fp32 [T, K + 1], over the temperature. A row of zeros gives zeros, whatever it holds.
        gradient: Rows that are written.
    """
    values, out = np.empty(BLOCK, dtype=np.float32), np.empty(BLOCK, dtype=np.float32)
    picked = np.empty(columns.shape[1], dtype=np.float32)
    for row in range(first, stop):
        # The gradient may take the place of the logits.
        for i in range(columns.shape[1]):
            if columns[row, i] >= 0:
                load_block(picked[i:], rows, row, columns[row, i], 1)
        total, used = _ZERO, False
        for i in range(grad.shape[1]):
            total += grad[row, i]
            used |= grad[row, i] != 0
        of_rest = rest.peak[row] - whole.peak[row] + (rest.log_sum[row] - whole.log_sum[row])
        weight = grad[row, columns.shape[1]] - total * exp(of_rest)
        for start in range(0, rows.width, BLOCK):
            count = min(BLOCK, rows.width - start)
            if used:
                load_block(values, rows, row, start, count)
                _weighted_probs(out, values, count, rest.peak[row], rest.log_sum[row], weight)
            else:
                fill(out, count, _ZERO)
            store_block(gradient, row, start, out, count)
        for i in range(columns.shape[1] if used else 0):
            column = columns[row, i]
            if column >= 0:
                q = exp(picked[i] - whole.peak[row] - whole.log_sum[row])
                out[0] = grad[row, i] - total * q
                store_block(gradient, row, column, out, 1)
        clear_padding(gradient, row, rows.width)


@loop_part(fastmath=SUMS)
def _sum_of_signed(values, signs, count, peak, log_sum):
    total = _ZERO
    for i in range(count):
        total += float32(signs[i]) * exp(values[i] - peak - log_sum)
    return total


@entry_point
def sign_products(first, stop, rows, whole, order, slots, chosen, out):
    """``sum_v q_i[v] s_c[v]`` of the rows at places ``first`` to ``stop``, in ``out`` [T'].

    Args:
        order, slots: As of ``row_loops.slope_products``.
        chosen: Columns int64 [C', K] and signs int8 [C', K] of the chunks.
    """
    columns, signs = chosen
    count = columns.shape[1]
    values = np.empty(count, dtype=np.float32)
    for place in range(first, stop):
        row, chunk = order[place], slots[place]
        gather_block(values, rows, row, columns[chunk], count)
        peak, log_sum = whole.peak[row], whole.log_sum[row]
        out[place] = _sum_of_signed(values, signs[chunk], count, peak, log_sum)


@entry_point
def sign_gradients(first, stop, rows, whole, order, slots, chosen, factors, labels, gradient):
    """``q_i (s_c - centre_i) scale_i`` of the same rows, 0 where ``scale`` is 0, and the gradient
    of their labels.

    Args:
        factors: ``centre`` and ``scale`` [T'] at each place.
        labels: ``LabelPart``
    """
    (columns, signs), (centre, scale) = chosen, factors
    chosen_count = columns.shape[1]
    picked = np.empty(chosen_count, dtype=np.float32)
    plain = np.empty(chosen_count, dtype=np.float32)
    values, out = np.empty(BLOCK, dtype=np.float32), np.empty(BLOCK, dtype=np.float32)
    for place in range(first, stop):
        row, chunk = order[place], slots[place]
        peak, log_sum = whole.peak[row], whole.log_sum[row]
        # The gradient may take the place of the logits.
        gather_block(picked, rows, row, columns[chunk], chosen_count)
        shared, apart = label_weights(labels, row, rows, scale[place])
        if apart != 0:
            gather_block(plain, labels.plain, row, columns[chunk], chosen_count)
        weight = -centre[place] * scale[place] + shared
        for start in range(0, rows.width, BLOCK):
            count = min(BLOCK, rows.width - start)
            if scale[place] == 0:
                fill(out, count, _ZERO)
            else:
                load_block(values, rows, row, start, count)
                _weighted_probs(out, values, count, peak, log_sum, weight)
            add_label_part(out, values, labels, row, start, count, apart)
            store_block(gradient, row, start, out, count)
        for i in range(chosen_count if scale[place] != 0 else 0):
            if signs[chunk, i] != 0:
                q = exp(picked[i] - peak - log_sum)
                slope = (float32(signs[chunk, i]) - centre[place]) * scale[place]
                out[0] = q * (slope + shared)
                if apart != 0:
                    out[0] += apart * exp(
                        plain[i] - labels.whole.peak[row] - labels.whole.log_sum[row]
                    )
                if labels.weight.size and labels.column[row] == columns[chunk, i]:
                    out[0] -= labels.weight[row]
                store_block(gradient, row, columns[chunk, i], out, 1)
        clear_padding(gradient, row, rows.width)
