"""Projected KL of chunks in compiled loops: the equations of ``ops/projected_kl``, chunk by chunk.

T rows, C chunks, D summed columns, R residual rows, X crossing columns, N learned entries. Every
chunk goes through the steps of ``evaluate``; on a shard of several, a collective lies between them.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy import float32, uintp

from megatron_ext.ops.divergence_loops import FORWARD, REVERSE, entropy_of, product_of
from megatron_ext.ops.loop_math import FLOOR, exp, log, loop_part
from megatron_ext.ops.row_loops import (
    BLOCK,
    EACH,
    MINUS_INFINITY,
    SUMS,
    FlatRows,
    add_softmax,
    clear_padding,
    entry_point,
    fill,
    gather_block,
    largest,
    load_block,
    log_probs,
    store_block,
    warm,
)

SUM_COLUMNS, REST, SLOPES, VALUES, GRADIENTS = 1, 2, 4, 8, 16

LOG_FLOOR = float32(np.log(np.float64(FLOOR)))
_ZERO, _ONE = float32(0), float32(1)
NAN = float32(np.nan)
_NO_COLUMN = np.int32(2**31 - 1)


class Side(NamedTuple):
    """One model's rows, those of each chunk, and their normalisers."""

    rows: FlatRows
    order: Any
    offsets: Any
    peak: Any
    """fp32 [T]"""

    log_sum: Any


class Sums(NamedTuple):
    """Sums over entries: that of ``target[i]`` over ``offsets[i]`` to ``offsets[i + 1]``."""

    offsets: Any
    target: Any
    source: Any
    weight: Any


class Columns(NamedTuple):
    """The columns of a plan."""

    partner: Any
    home: Any
    crossing: int
    by_column: Sums
    by_row: Sums
    residual: Any
    """int32 [R]: student column of each residual row, ascending."""

    residual_of_block: Any
    """int32: the first residual row at or behind the start of each block, and R."""

    row_mass: Any


class Scalars(NamedTuple):
    """Options of the comparison."""

    temperature: float32

    direction: int
    mixture: float32
    diagnostics: bool
    with_dots: bool
    """Whether any gradient is wanted."""


class ByChunk(NamedTuple):
    """Inputs of chunks, and what is known of them at the end."""

    mass: Any
    is_scaled: Any
    grad_scale: Any
    sums: Any
    """fp32 [2, C]: D and the entropy of P; these add up over shards."""

    best: Any
    """fp32 [2, C]: largest P and Q~ of this shard."""

    column: Any
    """int32 [2, C]: their columns."""

    threshold: Any
    """fp32 [C]: least P of a column that is compared by itself; [0]: every column is."""

    rest: Any
    """fp32 [2, C]: P and Q~ of all other columns, added up by step ``REST``."""


class Labels(NamedTuple):
    """Labels of the student's rows, [0] without any, and the normalisers at temperature 1."""

    column: Any
    weight: Any
    peak: Any
    log_sum: Any


class Work(NamedTuple):
    """Everything that chunks are evaluated from, and what they are written to."""

    start: int
    """Chunk of the first row of ``scratch``, ``residual`` and ``crossed``."""

    student: Side
    carried_peak: Any
    """fp32 [T] of mapped columns."""

    carried_log_sum: Any
    teacher: Side
    columns: Columns
    crossed: Any
    """fp32 [2, C', X]: ``Q~`` and P of the crossing columns over all shards."""

    scratch: Any
    """fp32 [C', D]"""

    residual: Any
    """fp32 [C', R]"""

    scalars: Scalars
    by_chunk: ByChunk
    dots: Any
    """fp32 [2, T], zero before ``VALUES``."""

    labels: Labels
    plain: FlatRows
    """The student's rows at temperature 1."""

    gradient: FlatRows
    """Rows that receive the gradient; without values, none does."""

    learned: Any
    """int32 [2, N]: student column and slot of each entry, -1 for a column without one."""


@loop_part(fastmath=EACH)
def _add_exp(total, values, count, is_first):
    if is_first:
        for i in range(count):
            total[i] = exp(values[i])
    else:
        for i in range(count):
            total[i] += exp(values[i])


@loop_part(fastmath=EACH)
def _copy(out, values, count):
    for i in range(count):
        out[i] = values[i]


@loop_part(fastmath=EACH)
def _keep(values, columns, count):
    for i in range(count):
        values[i] = values[i] if columns[i] >= 0 else MINUS_INFINITY


@loop_part(fastmath=EACH)
def _finish_mean(mean, log_mean, count, rows):
    """Divide by the number of rows; logarithms of the means, of a single row as they are."""
    if rows > 1:
        share = float32(1.0 / rows)
        for i in range(count):
            mean[i] *= share
            log_mean[i] = log(FLOOR if mean[i] < FLOOR else mean[i])
    for i in range(count):
        # A comparison that NaN fails keeps NaN.
        log_mean[i] = LOG_FLOOR if log_mean[i] < LOG_FLOOR else log_mean[i]


@loop_part(fastmath=SUMS)
def _mean_at(mean, log_mean, side, chunk, columns, count):
    """Mean probabilities of a chunk at ``columns``, 0 at negative ones, and their logarithms."""
    begin, end = side.offsets[chunk], side.offsets[chunk + 1]
    if begin == end:
        fill(mean, count, _ZERO)
        fill(log_mean, count, MINUS_INFINITY)
    for place in range(begin, end):
        row = side.order[place]
        gather_block(log_mean, side.rows, row, columns, count)
        _keep(log_mean, columns, count)
        log_probs(log_mean, count, side.peak[row], side.log_sum[row])
        _add_exp(mean, log_mean, count, place == begin)
    _finish_mean(mean, log_mean, count, end - begin)


@loop_part(fastmath=SUMS)
def _mean_from(mean, log_mean, work, chunk, first, count):
    """Mean ``q'`` of a chunk in ``count`` columns from ``first`` on, and their logarithms."""
    side = work.student
    begin, end = side.offsets[chunk], side.offsets[chunk + 1]
    if begin == end:
        fill(mean, count, _ZERO)
        fill(log_mean, count, MINUS_INFINITY)
    for place in range(begin, end):
        row = side.order[place]
        load_block(log_mean, side.rows, row, first, count)
        peak, log_sum = work.carried_peak[row], work.carried_log_sum[row]
        log_probs(log_mean, count, peak, log_sum)
        _add_exp(mean, log_mean, count, place == begin)
    _finish_mean(mean, log_mean, count, end - begin)


@loop_part(fastmath=SUMS)
def _forward(slope, p, log_p, q, log_q, count, mass, log_mass):
    total = _ZERO
    for i in range(count):
        total += p[i] * (log_p[i] - (log_q[i] - log_mass))
        slope[i] = -(p[i] / (FLOOR if q[i] < FLOOR else q[i])) * mass
    return total


@loop_part(fastmath=SUMS)
def _reverse(slope, log_p, q, log_q, count, mass, log_mass):
    total = _ZERO
    for i in range(count):
        slope[i] = log_q[i] - log_mass - log_p[i]
        total += q[i] / mass * slope[i]
    return total


@loop_part(fastmath=SUMS)
def _jensen_shannon(slope, p, log_p, q, log_q, count, mass, log_mass, mixture):
    total = _ZERO
    other = _ONE - mixture
    for i in range(count):
        share = q[i] / mass
        mixed = mixture * p[i] + other * share
        log_mix = log(FLOOR if mixed < FLOOR else mixed)
        slope[i] = (log_q[i] - log_mass - log_mix) * other
        total += mixture * p[i] * (log_p[i] - log_mix) + share * slope[i]
    return total


@loop_part(fastmath=SUMS)
def _forward_of_rows(
    slope, p, q, out, teacher_logits, logits, partner, count, normalisers, scalars
):
    """The forward direction of one row on either side, as the functions above in one loop.

    Args:
        p, q: Written; 0 where there is no partner. ``out`` is q everywhere.
        teacher_logits: Those of the partners, which become the logarithms of ``p``.
        normalisers: Of the teacher's row and the student's, and ``mass``.
    """
    teacher_peak, teacher_sum, peak, log_sum, mass = normalisers
    log_mass = log(mass)
    total = _ZERO
    for i in range(count):
        direct = partner[i] >= 0
        log_p = teacher_logits[i] - teacher_peak - teacher_sum
        log_q = logits[i] - peak - log_sum
        p[i] = exp(log_p) if direct else _ZERO
        out[i] = exp(log_q)
        q[i] = out[i] if direct else _ZERO
        log_p = LOG_FLOOR if log_p < LOG_FLOOR else log_p
        teacher_logits[i] = log_p
        log_q = LOG_FLOOR if log_q < LOG_FLOOR else log_q
        total += p[i] * (log_p - (log_q - log_mass))
        slope[i] = -(p[i] / (FLOOR if q[i] < FLOOR else q[i])) * mass
    return total


@loop_part(fastmath=SUMS)
def _keep_best(best, column, values, columns, count):
    """The larger of ``best`` and the values at columns that count, the first column of equals."""
    top = largest(values, count)
    if top < best:
        return best, column
    column = column if top == best else _NO_COLUMN
    for i in range(count):
        if values[i] == top and 0 <= columns[i] < column:
            column = columns[i]
    return (top, column) if column != _NO_COLUMN else (best, column)


@loop_part(fastmath=EACH)
def _clear(values, columns, count):
    for i in range(count):
        values[i] = values[i] if columns[i] >= 0 else _ZERO


@loop_part(fastmath=SUMS)
def _terms(slope, p, log_p, q, log_q, count, mass, scalars):
    """Sum of the terms of D; ``slope`` of each column."""
    log_mass = log(mass)
    if scalars.direction == FORWARD:
        return _forward(slope, p, log_p, q, log_q, count, mass, log_mass)
    if scalars.direction == REVERSE:
        return _reverse(slope, log_p, q, log_q, count, mass, log_mass)
    return _jensen_shannon(slope, p, log_p, q, log_q, count, mass, log_mass, scalars.mixture)


@loop_part(fastmath=EACH)
def _pool(kept, values, p, count, threshold):
    """Values of the columns that are compared by themselves, and 0, whose terms are 0."""
    for i in range(count):
        kept[i] = _ZERO if p[i] < threshold else values[i]


@loop_part(fastmath=EACH)
def _spread(slope, p, count, threshold, of_rest):
    """The slope of the rest in its columns."""
    for i in range(count):
        slope[i] = of_rest if p[i] < threshold else slope[i]


@loop_part(fastmath=SUMS)
def _kept_terms(slope, p, log_p, q, log_q, count, mass, chunk, work):
    """``_terms`` of the columns that are compared by themselves; ``slope`` of all."""
    by_chunk, scalars = work.by_chunk, work.scalars
    if len(by_chunk.threshold) == 0:
        return _terms(slope, p, log_p, q, log_q, count, mass, scalars)
    threshold = by_chunk.threshold[chunk]
    kept = np.empty((2, BLOCK), dtype=np.float32)
    _pool(kept[0], p, p, count, threshold)
    _pool(kept[1], q, p, count, threshold)
    value = _terms(slope, kept[0], log_p, kept[1], log_q, count, mass, scalars)
    for side in range(2):
        kept[side, 0] = by_chunk.rest[side, chunk]
        kept[side, 1] = log(FLOOR if kept[side, 0] < FLOOR else kept[side, 0])
    rest, other = kept[0], kept[1]
    _terms(rest[2:], rest[:1], rest[1:2], other[:1], other[1:2], 1, mass, scalars)
    _spread(slope, p, count, threshold, rest[2])
    return value


@loop_part(fastmath=SUMS)
def _add_rest(p, q, columns, count, chunk, by_chunk):
    """Add a block's P and Q~ in ``columns`` below the threshold."""
    threshold = by_chunk.threshold[chunk]
    first, second = _ZERO, _ZERO
    for i in range(count):
        in_rest = columns[i] >= 0 and p[i] < threshold
        first += p[i] if in_rest else _ZERO
        second += q[i] if in_rest else _ZERO
    by_chunk.rest[0, chunk] += first
    by_chunk.rest[1, chunk] += second


@loop_part(fastmath=SUMS)
def _count(p, log_p, q, columns, count, chunk, by_chunk):
    """Add a block's entropy, and keep its largest P and Q~."""
    by_chunk.sums[1, chunk] += entropy_of(p, log_p, count)
    by_chunk.best[0, chunk], by_chunk.column[0, chunk] = _keep_best(
        by_chunk.best[0, chunk], by_chunk.column[0, chunk], p, columns, count
    )
    by_chunk.best[1, chunk], by_chunk.column[1, chunk] = _keep_best(
        by_chunk.best[1, chunk], by_chunk.column[1, chunk], q, columns, count
    )


@loop_part(fastmath=SUMS)
def _sum_columns(work, chunk):
    """``Q~`` of summed columns (README, 2); the sources of their entries are residual rows."""
    side, sums, columns = work.student, work.columns.by_column, work.columns.residual
    begin, end = side.offsets[chunk], side.offsets[chunk + 1]
    probs = np.empty(len(columns), dtype=np.float32)
    block = np.empty(BLOCK, dtype=np.float32)
    for place in range(begin, end):
        row = side.order[place]
        peak, log_sum = work.carried_peak[row], work.carried_log_sum[row]
        for first in range(0, len(columns), BLOCK):
            count = min(BLOCK, len(columns) - first)
            gather_block(block, side.rows, row, columns[first : first + count], count)
            log_probs(block, count, peak, log_sum)
            _add_exp(probs[first : first + count], block, count, place == begin)
    if begin == end:
        fill(probs, len(columns), _ZERO)
    out, share = work.scratch[chunk - work.start], float32(1.0 / max(end - begin, 1))
    for i in range(len(sums.target)):
        total = _ZERO
        for k in range(sums.offsets[i], sums.offsets[i + 1]):
            total += probs[uintp(sums.source[k])] * sums.weight[k]
        out[sums.target[i]] = total * share


@loop_part(fastmath=SUMS)
def _summed_block(p, log_p, work, chunk, first, count):
    """``Q~`` of a block of summed columns, with their P and its logarithms."""
    columns, local = work.columns, chunk - work.start
    q = work.scratch[local, first : first + count]
    _mean_at(p, log_p, work.teacher, chunk, columns.home[first : first + count], count)
    for i in range(max(0, min(count, columns.crossing - first))):
        q[i], p[i] = work.crossed[0, local, first + i], work.crossed[1, local, first + i]
        log_p[i] = log(FLOOR if p[i] < FLOOR else p[i])
    return q


@loop_part(fastmath=SUMS)
def _rest(work, chunk):
    """P and Q~ of the columns that are compared as one."""
    columns, student = work.columns, work.student
    block = np.empty((4, BLOCK), dtype=np.float32)
    p, log_p, q, log_q = block[0], block[1], block[2], block[3]
    for first in range(0, len(columns.home), BLOCK):
        count = min(BLOCK, len(columns.home) - first)
        summed = _summed_block(p, log_p, work, chunk, first, count)
        home = columns.home[first : first + count]
        _add_rest(p, summed, home, count, chunk, work.by_chunk)
    for first in range(0, student.rows.width, BLOCK):
        count = min(BLOCK, student.rows.width - first)
        partner = columns.partner[first : first + count]
        _mean_at(p, log_p, work.teacher, chunk, partner, count)
        _mean_from(q, log_q, work, chunk, first, count)
        _add_rest(p, q, partner, count, chunk, work.by_chunk)


@loop_part(fastmath=SUMS)
def _slopes(work, chunk):
    """``dD/dQ`` of summed columns in place of their ``Q~``, and their terms of D."""
    scalars, by_chunk, columns = work.scalars, work.by_chunk, work.columns
    mass = by_chunk.mass[chunk]
    block = np.empty((5, BLOCK), dtype=np.float32)
    p, log_p, log_q, slope, held_slope = block[0], block[1], block[2], block[3], block[4]
    value = _ZERO
    for first in range(0, len(columns.home), BLOCK):
        count = min(BLOCK, len(columns.home) - first)
        home = columns.home[first : first + count]
        q = _summed_block(p, log_p, work, chunk, first, count)
        for i in range(count):
            log_q[i] = log(FLOOR if q[i] < FLOOR else q[i])
        crosses = columns.crossing > first
        for held in range(1 + crosses):
            # The slope of a crossing column is wanted on all shards, its terms where it is held.
            if held or not crosses:
                _clear(p, home, count)
                _clear(q, home, count)
            written = held_slope if held else slope
            value = _kept_terms(written, p, log_p, q, log_q, count, mass, chunk, work)
        by_chunk.sums[0, chunk] += value
        if scalars.diagnostics:
            _count(p, log_p, q, home, count, chunk, by_chunk)
        _copy(q, slope, count)


@loop_part(fastmath=SUMS)
def _sum_slots(work, chunk):
    """``W f`` of residual rows."""
    sums, local = work.columns.by_row, chunk - work.start
    slope, out = work.scratch[local], work.residual[local]
    for i in range(len(sums.target)):
        total = _ZERO
        for k in range(sums.offsets[i], sums.offsets[i + 1]):
            total += slope[uintp(sums.source[k])] * sums.weight[k]
        out[sums.target[i]] = total


@loop_part(fastmath=EACH)
def _carry(carried, slope, columns, first, count, residual):
    """``W f`` of a block of student columns."""
    partner = columns.partner[first : first + count]
    for i in range(count):
        carried[i] = slope[i] if partner[i] >= 0 else _ZERO
    block = first // BLOCK
    for i in range(columns.residual_of_block[block], columns.residual_of_block[block + 1]):
        carried[uintp(columns.residual[i] - first)] = residual[i]


@loop_part(fastmath=EACH)
def _row_probs(out, work, row, first, count, is_scaled):
    """``q_i`` of a block, mapped columns of scaled chunks under their own normaliser."""
    load_block(out, work.student.rows, row, first, count)
    peak, log_sum = work.student.peak[row], work.student.log_sum[row]
    if is_scaled:
        partner = work.columns.partner[first : first + count]
        carried_peak, carried_sum = work.carried_peak[row], work.carried_log_sum[row]
        for i in range(count):
            mapped = partner[i] != -1
            shift, less = (carried_peak, carried_sum) if mapped else (peak, log_sum)
            out[i] = exp(out[i] - shift - less)
    else:
        log_probs(out, count, peak, log_sum)
        for i in range(count):
            out[i] = exp(out[i])


@loop_part(fastmath=SUMS)
def _centre(work, chunk):
    """``sum_u Q_c[u] f[u]``, from the products of the chunk's rows with ``W f``."""
    if work.scalars.direction == FORWARD:
        return -_ONE
    begin, end = work.student.offsets[chunk], work.student.offsets[chunk + 1]
    total = _ZERO
    for place in range(begin, end):
        total += work.dots[0, work.student.order[place]]
    return float32(total / (max(end - begin, 1) * work.by_chunk.mass[chunk]))


@loop_part(fastmath=EACH)
def _off_centre(carried, row_mass, count, centre):
    for i in range(count):
        carried[i] -= centre * row_mass[i]


@loop_part(fastmath=EACH)
def _row_gradient_with_labels(q, off_centre, count, offset, scale, weight):
    """Equation 13 with the softmax of the cross-entropy, which is ``q`` at temperature 1."""
    for i in range(count):
        q[i] *= (off_centre[i] - offset) * scale + weight


@loop_part(fastmath=EACH)
def _row_gradient(q, off_centre, partner, count, offset, scale, is_scaled):
    """Equation 13 in place of ``q``; mapped columns of scaled chunks have no offset."""
    if is_scaled:
        for i in range(count):
            q[i] *= (off_centre[i] - (_ZERO if partner[i] != -1 else offset)) * scale
    else:
        for i in range(count):
            q[i] *= (off_centre[i] - offset) * scale


@loop_part(fastmath=EACH)
def _add_labels(out, rows, row, first, count, labels):
    """Add ``weight (softmax - onehot)`` of a block of columns at temperature 1."""
    weight = labels.weight[row]
    if weight == _ZERO:
        return
    values = np.empty(count, dtype=np.float32)
    load_block(values, rows, row, first, count)
    add_softmax(out, values, count, labels.peak[row], labels.log_sum[row], weight)
    place = labels.column[row] - first
    if 0 <= place < count:
        out[place] -= weight


@loop_part(fastmath=SUMS)
def _sweep(step, work, chunk):
    """Direct pairs' terms of D, and the gradient of every student column.

    Step ``VALUES``: the terms; for chunks whose gradient is known by then (forward, one student
    row) the gradient, for others each row's products of q with ``W f`` and ``W 1``. Step
    ``GRADIENTS``: the gradient of these others.
    """
    student, columns, scalars, by_chunk = (
        work.student,
        work.columns,
        work.scalars,
        work.by_chunk,
    )
    begin, end = student.offsets[chunk], student.offsets[chunk + 1]
    is_known = end - begin == 1 and scalars.direction == FORWARD
    if step == GRADIENTS and (end == begin or is_known):
        return
    block = np.empty((7, BLOCK), dtype=np.float32)
    p, log_p, q, log_q = block[0], block[1], block[2], block[3]
    slope, carried, out = block[4], block[5], block[6]
    mass, is_scaled = by_chunk.mass[chunk], by_chunk.is_scaled[chunk]
    grad_scale = by_chunk.grad_scale[chunk]
    scale = float32(scalars.temperature * grad_scale / (max(end - begin, 1) * mass))
    centre = _centre(work, chunk) if step == GRADIENTS else -_ONE
    writes = len(work.gradient.values) > 0 and (step == GRADIENTS or is_known)
    # A row's own probabilities are their mean.
    is_alone = end - begin == 1 and not is_scaled
    teacher = work.teacher
    teacher_begin = teacher.offsets[chunk]
    of_rows = is_alone and is_known and teacher.offsets[chunk + 1] - teacher_begin == 1
    of_rows = of_rows and len(by_chunk.threshold) == 0
    shares_softmax = len(work.labels.weight) > 0 and scalars.temperature == _ONE and not is_scaled
    residual = work.residual[chunk - work.start]
    for first in range(0, student.rows.width, BLOCK):
        count = min(BLOCK, student.rows.width - first)
        partner = columns.partner[first : first + count]
        row_mass = columns.row_mass[first : first + count]
        if of_rows:
            row, other = student.order[begin], teacher.order[teacher_begin]
            gather_block(log_p, teacher.rows, other, partner, count)
            load_block(log_q, student.rows, row, first, count)
            normalisers = (
                teacher.peak[other],
                teacher.log_sum[other],
                student.peak[row],
                student.log_sum[row],
                mass,
            )
            value = _forward_of_rows(
                slope, p, q, out, log_p, log_q, partner, count, normalisers, scalars
            )
        else:
            _mean_at(p, log_p, teacher, chunk, partner, count)
            _mean_from(q, log_q, work, chunk, first, count)
            if is_alone:
                _copy(out, q, count)
            _clear(q, partner, count)
            value = _kept_terms(slope, p, log_p, q, log_q, count, mass, chunk, work)
        if step == VALUES:
            by_chunk.sums[0, chunk] += value
            if scalars.diagnostics:
                _count(p, log_p, q, partner, count, chunk, by_chunk)
        if not scalars.with_dots:
            continue
        _carry(carried, slope, columns, first, count, residual)
        if writes:
            _off_centre(carried, row_mass, count, centre)
        for place in range(begin, end):
            row = student.order[place]
            if not is_alone:
                _row_probs(out, work, row, first, count, is_scaled)
            if not writes:
                if step == VALUES:
                    work.dots[0, row] += product_of(out, carried, count)
                    work.dots[1, row] += product_of(out, row_mass, count)
                continue
            offset = _ZERO
            if step == GRADIENTS:
                offset = work.dots[0, row] - centre * work.dots[1, row]
            if grad_scale != _ZERO and shares_softmax:
                weight = work.labels.weight[row]
                _row_gradient_with_labels(out, carried, count, offset, scale, weight)
                place = work.labels.column[row] - first
                if 0 <= place < count:
                    out[place] -= weight
            else:
                if grad_scale == _ZERO:
                    fill(out, count, _ZERO)
                else:
                    _row_gradient(out, carried, partner, count, offset, scale, is_scaled)
                if len(work.labels.weight):
                    _add_labels(out, work.plain, row, first, count, work.labels)
            store_block(work.gradient, row, first, out, count)
    if writes:
        for place in range(begin, end):
            clear_padding(work.gradient, student.order[place], student.rows.width)


@loop_part(fastmath=SUMS)
def _add_entries(total, work, chunk):
    """Add the chunk's part of the learned entries' gradient (README, 11), without ``tau^2``."""
    side, grad_scale = work.student, work.by_chunk.grad_scale[chunk]
    if grad_scale == _ZERO:
        return
    begin, end = side.offsets[chunk], side.offsets[chunk + 1]
    centre = _centre(work, chunk)
    factor = float32(grad_scale / (max(end - begin, 1) * work.by_chunk.mass[chunk]))
    scratch = work.scratch[chunk - work.start]
    block = np.empty(BLOCK, dtype=np.float32)
    for first in range(0, len(total), BLOCK):
        count = min(BLOCK, len(total) - first)
        for place in range(begin, end):
            row = side.order[place]
            gather_block(block, side.rows, row, work.learned[0, first : first + count], count)
            peak, log_sum = work.carried_peak[row], work.carried_log_sum[row]
            log_probs(block, count, peak, log_sum)
            for i in range(count):
                slot = work.learned[1, first + i]
                slope = scratch[slot] if slot >= 0 else NAN
                total[first + i] += (slope - centre) * factor * exp(block[i])


@entry_point
def evaluate(first, stop, steps, work, entries):
    """Take chunks ``first`` to ``stop`` through ``steps``, a sum of the constants above.

    Args:
        entries: fp32 [N] of this call alone, to which the learned entries' gradient is added.
    """
    for chunk in range(first, stop):
        for side in (work.student, work.teacher):
            for place in range(side.offsets[chunk], side.offsets[chunk + 1]):
                warm(side.rows, side.order[place])
        if steps & SUM_COLUMNS:
            _sum_columns(work, chunk)
        if steps & REST:
            _rest(work, chunk)
        if steps & SLOPES:
            _slopes(work, chunk)
            if work.scalars.with_dots:
                _sum_slots(work, chunk)
        for step in (VALUES, GRADIENTS):
            if not steps & step:
                continue
            if step == GRADIENTS and len(entries):
                _add_entries(entries, work, chunk)
            if step == VALUES or len(work.gradient.values):
                _sweep(step, work, chunk)


@entry_point
def write_labels(first, stop, order, rows, labels, gradient):
    """Cross-entropy's gradient, or 0, of the rows at places ``first`` to ``stop`` of the order."""
    out = np.empty(BLOCK, dtype=np.float32)
    for place in range(first, stop):
        row = order[place]
        for start in range(0, rows.width, BLOCK):
            count = min(BLOCK, rows.width - start)
            fill(out, count, _ZERO)
            if len(labels.weight):
                _add_labels(out, rows, row, start, count, labels)
            store_block(gradient, row, start, out, count)
        clear_padding(gradient, row, rows.width)


@entry_point
def crossing_means(first, stop, work, out):
    """P of the crossing columns that this shard holds, 0 of others, to ``out`` [C', X]."""
    home, crossing = work.columns.home, work.columns.crossing
    block = np.empty((2, BLOCK), dtype=np.float32)
    for chunk in range(first, stop):
        for start in range(0, crossing, BLOCK):
            count = min(BLOCK, crossing - start)
            columns = home[start : start + count]
            _mean_at(block[0], block[1], work.teacher, chunk, columns, count)
            # Not as a slice, for which numba would compile an error message.
            for i in range(count):
                out[chunk - work.start, start + i] = block[0, i]
