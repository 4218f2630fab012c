"""Compiled loops of the partition KL: statistics of members and others, and chunks of one token.

T rows, C chunks, R rows of chains, N chosen columns, X columns of other ranks.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy import float32

from megatron_ext.ops.divergence_loops import (
    FORWARD,
    REVERSE,
    add_each,
    centre_each,
    forward_terms,
    jensen_shannon_terms,
    probs_and_floors,
    reverse_terms,
    sum_of,
)
from megatron_ext.ops.loop_math import exp, loop_part
from megatron_ext.ops.row_loops import (
    BLOCK,
    EACH,
    MINUS_INFINITY,
    SUMS,
    FlatRows,
    Normaliser,
    add_softmax,
    clear_padding,
    entry_point,
    fill,
    first_place,
    gather_block,
    largest_place,
    load_block,
    log_probs,
    peak_of,
    store_block,
    sum_of_exp,
)

_ZERO = float32(0)


class Split(NamedTuple):
    """Members of each row."""

    of_row: Any
    """int32 [T]: 0 for the shared tokens, r + 1 for those of chain row r, -1 for none."""

    shared: Any
    """bool [Vp]"""

    pointers: Any
    """int64 [R + 1] into ``local``."""

    local: Any
    """int64 [N] chosen columns, -1 where another rank has them."""


@loop_part(fastmath=EACH)
def _where(out, values, members, wanted, count):
    for i in range(count):
        out[i] = values[i] if members[i] == wanted else MINUS_INFINITY


@loop_part(fastmath=EACH)
def _masked_members(values, members, count):
    total = 0
    for i in range(count):
        total += 1 if members[i] & (values[i] == MINUS_INFINITY) else 0
    return total


@loop_part(fastmath=SUMS)
def _sums(values, count):
    top, _ = peak_of(values, count)
    top = top if top != MINUS_INFINITY else _ZERO
    return top, sum_of_exp(values, count, top)


@entry_point
def split_statistics(first, stop, rows, plain, split, sums, column, is_masked, top_column):
    """Statistics of rows ``first`` to ``stop``, as ``split_statistics_kernel``.

    Args:
        rows: Logits at the temperature of the members; ``plain``: at 1.
        sums: fp32 [3, 2, T], written: members, others, and members at temperature 1.
        column: int64 [T], of the largest member; ``is_masked`` bool [T].
        top_column: int64 [T], of the largest logit, or [0].
    """
    width = rows.width
    values, kept = np.empty(width, dtype=np.float32), np.empty(width, dtype=np.float32)
    own = np.zeros(width, dtype=np.bool_)
    for row in range(first, stop):
        number = split.of_row[row]
        if number < -1:
            continue
        members = split.shared[:width] if number == 0 else own
        if number > 0:
            for entry in range(split.pointers[number - 1], split.pointers[number]):
                place = split.local[entry]
                if 0 <= place < width:
                    own[place] = True
        load_block(values, plain, row, 0, width)
        is_masked[row] = _masked_members(values, members, width) > 0
        if top_column.size:
            top_column[row] = largest_place(values, width)
        _where(kept, values, members, False, width)
        sums[1, 0, row], sums[1, 1, row] = _sums(kept, width)
        _where(kept, values, members, True, width)
        if rows.temperature != float32(1):
            sums[2, 0, row], sums[2, 1, row] = _sums(kept, width)
            load_block(values, rows, row, 0, width)
            _where(kept, values, members, True, width)
        top, start = peak_of(kept, width)
        column[row] = start + first_place(kept[start:], width - start, top)
        top = top if top != MINUS_INFINITY else _ZERO
        sums[0, 0, row], sums[0, 1, row] = top, sum_of_exp(kept, width, top)
        if number > 0:
            for entry in range(split.pointers[number - 1], split.pointers[number]):
                place = split.local[entry]
                if 0 <= place < width:
                    own[place] = False


class SingleWork(NamedTuple):
    """Both models' rows at chunks of one token a side."""

    student: FlatRows
    plain: FlatRows
    """The student's rows at temperature 1."""

    teacher: FlatRows
    student_row: Any
    """int64 [C]"""

    teacher_row: Any
    own: Normaliser
    """[C] of the student's events at the temperature, as ``other`` of the teacher's."""

    other: Normaliser
    rest: Normaliser
    """[C] of the student's columns that are not shared, at temperature 1."""

    partner: Any
    """int32 [Vps] local teacher column, ``-2 - x`` for column x of ``arrived``, -1 for none."""

    arrived: Any
    """fp32 [C, X] teacher's logits from other ranks, over the temperature."""

    direction: int
    mixture: float32
    label: Any
    """int64 [T], [0] without labels."""

    label_weight: Any
    whole: Normaliser
    """[T] over all columns at temperature 1."""


@loop_part(fastmath=EACH)
def _place_arrived(out, partner, arrived, count):
    for i in range(count):
        if partner[i] <= -2:
            out[i] = arrived[-2 - partner[i]]


@loop_part(fastmath=EACH)
def _keep_shared(values, partner, count):
    for i in range(count):
        values[i] = values[i] if partner[i] != -1 else MINUS_INFINITY


@loop_part(fastmath=SUMS)
def _terms(slope, block, work, chunk, start, count):
    """Sum of the terms of shared columns; ``slope``, and q in ``block[2]``."""
    p, log_p, q, log_q = block[0], block[1], block[2], block[3]
    partner = work.partner[start : start + count]
    gather_block(log_p, work.teacher, work.teacher_row[chunk], partner, count)
    if work.arrived.shape[1]:
        _place_arrived(log_p, partner, work.arrived[chunk], count)
    _keep_shared(log_p, partner, count)
    log_probs(log_p, count, work.other.peak[chunk], work.other.log_sum[chunk])
    probs_and_floors(p, log_p, count)
    load_block(log_q, work.student, work.student_row[chunk], start, count)
    _keep_shared(log_q, partner, count)
    log_probs(log_q, count, work.own.peak[chunk], work.own.log_sum[chunk])
    probs_and_floors(q, log_q, count)
    if work.direction == FORWARD:
        return forward_terms(slope, p, log_p, q, log_q, count)
    if work.direction == REVERSE:
        value = reverse_terms(slope, log_p, q, log_q, count)
        add_each(slope, q, count)
        return value
    return jensen_shannon_terms(slope, p, log_p, q, log_q, count, work.mixture)


@entry_point
def single_sums(first, stop, work, sums):
    """Sums fp32 [2, C] of D's terms and slopes over shared columns; added to."""
    block, slope = np.empty((4, BLOCK), dtype=np.float32), np.empty(BLOCK, dtype=np.float32)
    for chunk in range(first, stop):
        for start in range(0, work.student.width, BLOCK):
            count = min(BLOCK, work.student.width - start)
            sums[0, chunk] += _terms(slope, block, work, chunk, start, count)
            sums[1, chunk] += sum_of(slope, count)


@loop_part(fastmath=EACH)
def _add_rest(out, values, partner, count, peak, log_sum, weight):
    """The rest's logit over tau has the softmax of its own columns, over tau, as derivative."""
    for i in range(count):
        share = weight * exp(values[i] - peak - log_sum)
        out[i] += share if partner[i] == -1 else _ZERO


@entry_point
def single_gradients(first, stop, work, factors, gradient):
    """The gradient of the chunks' rows, with that of their labels.

    Args:
        factors: fp32 [3, C]: sum of all slopes, dD / d of the rest's logit, ``grad_scale`` / tau.
    """
    block, slope = np.empty((4, BLOCK), dtype=np.float32), np.empty(BLOCK, dtype=np.float32)
    plain = np.empty(BLOCK, dtype=np.float32)
    for chunk in range(first, stop):
        row, weight = work.student_row[chunk], factors[2, chunk]
        label_weight = work.label_weight[row] if len(work.label) else _ZERO
        for start in range(0, work.student.width, BLOCK):
            count = min(BLOCK, work.student.width - start)
            partner = work.partner[start : start + count]
            load_block(plain, work.plain, row, start, count)
            if weight != _ZERO:
                _terms(slope, block, work, chunk, start, count)
                centre_each(slope, block[2], count, factors[0, chunk], weight)
                peak, log_sum = work.rest.peak[chunk], work.rest.log_sum[chunk]
                part = weight * factors[1, chunk]
                _add_rest(slope, plain, partner, count, peak, log_sum, part)
            else:
                fill(slope, count, _ZERO)
            if label_weight != _ZERO:
                peak, log_sum = work.whole.peak[row], work.whole.log_sum[row]
                add_softmax(slope, plain, count, peak, log_sum, label_weight)
                place = work.label[row] - start
                if 0 <= place < count:
                    slope[place] -= label_weight
            store_block(gradient, row, start, slope, count)
        clear_padding(gradient, row, work.student.width)
