"""Compiled loops over two distributions: statistics, divergence and gradient.

T rows of one vocabulary, C chunks of two. Equations are those of ``ops/vocab_kl`` and
``ops/matched_divergence``; the terms are those of ``ops/divergence``.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy import float32, uintp

from megatron_ext.ops.loop_math import FLOOR, exp, log, loop_part
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
    largest,
    load_block,
    log_probs,
    peak_of,
    store_block,
    sum_of_exp,
)

FORWARD, REVERSE, JENSEN_SHANNON = 0, 1, 2
DIRECTIONS = {"forward": FORWARD, "reverse": REVERSE, "jensen_shannon": JENSEN_SHANNON}

LOG_TINY = float32(np.log(np.float64(np.finfo(np.float32).tiny)))
TINY = float32(np.finfo(np.float32).tiny)
_ZERO, _ONE = float32(0), float32(1)


@loop_part(fastmath=SUMS)
def _masked(values, count):
    """Number of columns without mass."""
    total = 0
    for i in range(count):
        total += 1 if values[i] == MINUS_INFINITY else 0
    return total


@loop_part(fastmath=SUMS)
def _sum_where(values, other, count, peak):
    """Sum of exponentials where ``other`` has mass."""
    total = _ZERO
    for i in range(count):
        total += exp(values[i] - peak) if other[i] != MINUS_INFINITY else _ZERO
    return total


@loop_part(fastmath=SUMS)
def _statistics(values, width):
    """Finite peak, sum of exponentials, and column of the peak."""
    top, place = peak_of(values, width)
    column = place + first_place(values[place:], width - place, top)
    top = top if top != MINUS_INFINITY else _ZERO
    return top, sum_of_exp(values, width, top), column


@entry_point
def pair_statistics(first, stop, student, teacher, plain, read, found):
    """Statistics of both models' rows ``first`` to ``stop``, as ``pair_statistics_kernel``.

    Args:
        plain: The student's rows at temperature 1, without a width where they are not asked for.
        read: bool [T], or [0] for all; other rows get 0.
        found: ``peak`` and ``total`` fp32 [4, T] and ``column`` int64 [2, T], written.
    """
    peak, total, column = found
    own = np.empty(student.width, dtype=np.float32)
    other = np.empty(student.width, dtype=np.float32)
    for row in range(first, stop):
        for which in range(len(peak)):
            peak[which, row] = total[which, row] = _ZERO
        column[0, row] = column[1, row] = 0
        if (read.size and not read[row]) or not student.width:
            continue
        if plain.width:
            load_block(own, plain, row, 0, plain.width)
            peak[3, row], total[3, row], _ = _statistics(own, plain.width)
        load_block(own, student, row, 0, student.width)
        peak[0, row], total[0, row], column[0, row] = _statistics(own, student.width)
        load_block(other, teacher, row, 0, student.width)
        peak[1, row], total[1, row], column[1, row] = _statistics(other, student.width)
        peak[2, row], total[2, row] = peak[1, row], total[1, row]
        if _masked(own, student.width):
            total[2, row] = _sum_where(other, own, student.width, peak[1, row])


@loop_part(fastmath=EACH)
def probs_and_floors(probs, values, count):
    """Exponentials of log-probabilities, which become finite."""
    for i in range(count):
        probs[i] = exp(values[i])
        values[i] = LOG_TINY if values[i] == MINUS_INFINITY else values[i]


@loop_part(fastmath=SUMS)
def entropy_of(p, log_p, count):
    """Entropy in nats of probabilities with finite logarithms."""
    total = _ZERO
    for i in range(count):
        total -= p[i] * log_p[i]
    return total


@loop_part(fastmath=SUMS)
def forward_terms(slope, p, log_p, q, log_q, count):
    """Sum of the terms of KL(P || Q), and their slopes by log Q."""
    total = _ZERO
    for i in range(count):
        total += p[i] * (log_p[i] - log_q[i])
        # A masked entry of the student has the logarithm of the floor, and no slope.
        slope[i] = _ZERO if (q[i] == _ZERO) & (log_q[i] == LOG_TINY) else -p[i]
    return total


@loop_part(fastmath=SUMS)
def reverse_terms(slope, log_p, q, log_q, count):
    """As ``forward_terms``, of KL(Q || P); the slopes leave out Q."""
    total = _ZERO
    for i in range(count):
        slope[i] = q[i] * (log_q[i] - log_p[i])
        total += slope[i]
    return total


@loop_part(fastmath=SUMS)
def jensen_shannon_terms(slope, p, log_p, q, log_q, count, mixture):
    """As ``forward_terms``, of the Jensen-Shannon divergence."""
    total, rest = _ZERO, _ONE - mixture
    for i in range(count):
        # log(P / M) and log(Q / M) from the smaller of the two ratios, which cannot overflow.
        ratio = log_q[i] - log_p[i]
        below = ratio <= _ZERO
        of_larger = mixture if below else rest
        size = -ratio if below else ratio
        share = log(of_larger + (_ONE - of_larger) * exp(-size))
        over = _ZERO if below else ratio
        under = ratio if below else _ZERO
        slope[i] = q[i] * (under - share) * rest
        total += mixture * p[i] * (-share - over) + slope[i]
    return total


@loop_part(fastmath=SUMS)
def sum_of(values, count):
    """Sum of the values."""
    total = _ZERO
    for i in range(count):
        total += values[i]
    return total


@loop_part(fastmath=EACH)
def centre_each(slope, q, count, centre, weight):
    """``(slope - q centre) weight`` in place of ``slope``: equation 3 of ``ops/vocab_kl``."""
    for i in range(count):
        slope[i] = (slope[i] - q[i] * centre) * weight


class PairWork(NamedTuple):
    """Two models' rows, and what is known of them."""

    student: FlatRows
    teacher: FlatRows
    own: Normaliser
    other: Normaliser
    centre: Any
    """fp32 [T], the sum of slopes over all shards."""

    weight: Any
    """fp32 [T], D's gradient times the temperature."""

    direction: int
    mixture: float32
    plain: FlatRows
    """The student's rows at temperature 1."""

    plain_lse: Normaliser
    label: Any
    """int64 [T], the label's column, -1 for none; [0] without labels."""

    label_weight: Any
    gradient: FlatRows
    """Rows that receive the gradient; without values, none does."""


@entry_point
def divergence_rows(first, stop, work, sums):
    """D, the sum of its slope and the teacher's entropy fp32 [3, T], and the gradient, of rows."""
    width = work.student.width
    block = np.empty((5, BLOCK), dtype=np.float32)
    p, log_p, q, log_q, slope = block[0], block[1], block[2], block[3], block[4]
    writes = len(work.gradient.values) > 0
    for row in range(first, stop):
        weight = work.weight[row]
        label_weight = work.label_weight[row] if len(work.label) else _ZERO
        used = weight != _ZERO or label_weight != _ZERO
        for start in range(0, width, BLOCK):
            count = min(BLOCK, width - start)
            if used:
                load_block(log_p, work.teacher, row, start, count)
                log_probs(log_p, count, work.other.peak[row], work.other.log_sum[row])
                probs_and_floors(p, log_p, count)
                load_block(log_q, work.student, row, start, count)
                log_probs(log_q, count, work.own.peak[row], work.own.log_sum[row])
                probs_and_floors(q, log_q, count)
                if work.direction == FORWARD:
                    value = forward_terms(slope, p, log_p, q, log_q, count)
                elif work.direction == REVERSE:
                    value = reverse_terms(slope, log_p, q, log_q, count)
                else:
                    value = jensen_shannon_terms(slope, p, log_p, q, log_q, count, work.mixture)
                sums[0, row] += value
                sums[1, row] += sum_of(slope, count)
                sums[2, row] += entropy_of(p, log_p, count)
            if not writes:
                continue
            if weight != _ZERO:
                centre_each(slope, q, count, work.centre[row], weight)
            else:
                fill(slope, count, _ZERO)
            if label_weight != _ZERO:
                load_block(log_q, work.plain, row, start, count)
                peak, log_sum = work.plain_lse.peak[row], work.plain_lse.log_sum[row]
                add_softmax(slope, log_q, count, peak, log_sum, label_weight)
                place = work.label[row] - start
                if 0 <= place < count:
                    slope[place] -= label_weight
            store_block(work.gradient, row, start, slope, count)
        if writes:
            clear_padding(work.gradient, row, width)


@loop_part(fastmath=EACH)
def _log_ratios(out, p, q, count):
    """``log(q / p)`` of probabilities, none below the smallest normal number."""
    for i in range(count):
        upper = TINY if q[i] < TINY else q[i]
        lower = TINY if p[i] < TINY else p[i]
        value = upper / lower
        out[i] = log(TINY if value < TINY else value)


@loop_part(fastmath=EACH)
def _over_floor(q):
    """``q / max(q, FLOOR)``."""
    return q * (_ONE / FLOOR) if q < FLOOR else _ONE


@loop_part(fastmath=SUMS)
def _forward_values(slope, p, q, ratio, count):
    """Sum of the terms of KL(P || Q), and their slopes by Q, 0 where Q is."""
    total = _ZERO
    for i in range(count):
        total -= p[i] * ratio[i]
        slope[i] = -p[i] / (FLOOR if q[i] < FLOOR else q[i]) if q[i] != _ZERO else _ZERO
    return total


@loop_part(fastmath=SUMS)
def _reverse_values(slope, q, ratio, count):
    """As ``_forward_values``, of KL(Q || P)."""
    total = _ZERO
    for i in range(count):
        total += q[i] * ratio[i]
        slope[i] = (ratio[i] + _ONE) * _over_floor(q[i])
    return total


@loop_part(fastmath=SUMS)
def _jensen_shannon_values(slope, p, q, ratio, count, mixture):
    """As ``_forward_values``, of the Jensen-Shannon divergence."""
    total, rest = _ZERO, _ONE - mixture
    for i in range(count):
        # log(P / M) and log(Q / M) from the smaller of the two ratios, which cannot overflow.
        below = ratio[i] <= _ZERO
        of_larger = mixture if below else rest
        share = log(of_larger + (_ONE - of_larger) * exp(-abs(ratio[i])))
        over = _ZERO if below else ratio[i]
        under = ratio[i] if below else _ZERO
        of_q = (under - share) * rest
        total += mixture * p[i] * (-share - over) + q[i] * of_q
        slope[i] = of_q * _over_floor(q[i])
    return total


@loop_part(fastmath=EACH)
def _matched(out, probs, columns, count, mass):
    for i in range(count):
        column = columns[i]
        value = probs[uintp(column if column > 0 else 0)]
        out[i] = value if column >= 0 else _ZERO
    if mass != _ONE:
        for i in range(count):
            out[i] /= mass


@loop_part(fastmath=SUMS)
def _keep_best(best, column, values, first, count):
    top = largest(values, count)
    if top > best:
        return top, first + first_place(values, count, top)
    return best, column


@loop_part(fastmath=SUMS)
def product_of(x, y, count):
    """Sum of products."""
    total = _ZERO
    for i in range(count):
        total += x[i] * y[i]
    return total


@loop_part(fastmath=EACH)
def add_each(out, values, count):
    """Add in place."""
    for i in range(count):
        out[i] += values[i]


class MatchedWork(NamedTuple):
    """Distributions of chunks over two vocabularies, and pairs of their columns."""

    p: Any
    """fp32 [C, Vt] teacher."""

    q: Any
    """fp32 [C, Vs] student."""

    column: Any
    """int32 [Vs]: teacher column of each student column, -1 for none."""

    own: Any
    """int32 [Vs]: the student column itself, -1 where it has no match."""

    mass: Any
    """fp32 [2, C]: student's and teacher's masses that both are divided by."""

    direction: int
    mixture: float32


@entry_point
def matched_terms(first, stop, work, slope, sums, best, column):
    """Divergence over matched columns of chunks ``first`` to ``stop``, and its slope by Q.

    Args:
        slope: fp32 [C, Vs], written.
        sums: fp32 [2, C]: D, and the mean of the slope under Q; added to.
        best: fp32 [2, C] largest P and Q, and int64 ``column`` [2, C], their student columns.
    """
    width = work.q.shape[1]
    block = np.empty((3, BLOCK), dtype=np.float32)
    p, q, ratio = block[0], block[1], block[2]
    for chunk in range(first, stop):
        best[0, chunk] = best[1, chunk] = MINUS_INFINITY
        for start in range(0, width, BLOCK):
            count = min(BLOCK, width - start)
            part = slope[chunk, start : start + count]
            _matched(
                p, work.p[chunk], work.column[start : start + count], count, work.mass[1, chunk]
            )
            _matched(q, work.q[chunk], work.own[start : start + count], count, work.mass[0, chunk])
            for which, values in ((0, p), (1, q)):
                best[which, chunk], column[which, chunk] = _keep_best(
                    best[which, chunk], column[which, chunk], values, start, count
                )
            _log_ratios(ratio, p, q, count)
            if work.direction == FORWARD:
                value = _forward_values(part, p, q, ratio, count)
            elif work.direction == REVERSE:
                value = _reverse_values(part, q, ratio, count)
            else:
                value = _jensen_shannon_values(part, p, q, ratio, count, work.mixture)
            sums[0, chunk] += value
            sums[1, chunk] += product_of(part, q, count)


@entry_point
def centre_slopes(first, stop, slope, own, centre, factor, outside):
    """``(slope - centre) factor`` of matched columns, ``outside`` of others, in place.

    Args:
        own: int32 [Vs], negative without a match.
        centre, factor, outside: fp32 [C].
    """
    for chunk in range(first, stop):
        part = slope[chunk]
        less, times, other = centre[chunk], factor[chunk], outside[chunk]
        for i in range(len(part)):
            part[i] = (part[i] - less) * times if own[i] >= 0 else other
