"""Projected KL of chunks in compiled loops: the equations of ``ops/projected_kl``, chunk by chunk.

T rows, C chunks, D summed columns, R residual rows, X crossing columns, N learned entries. Every
chunk goes through the steps of ``evaluate``; on a shard of several, a collective lies between them.
"""

from __future__ import annotations

import numpy as np
from numpy import float32, uintp

from megatron_ext.ops.divergence_loops import FORWARD, product_of
from megatron_ext.ops.loop_math import FLOOR, exp, log, loop_part
from megatron_ext.ops.projected_kl.column_loops import (
    ONE,
    ZERO,
    add_diagnostics,
    add_exp,
    clear,
    copy,
    forward_of_rows,
    kept_terms,
    mean_at,
    mean_from,
)
from megatron_ext.ops.row_loops import (
    BLOCK,
    EACH,
    SUMS,
    add_softmax,
    clear_padding,
    entry_point,
    fill,
    gather_block,
    load_block,
    log_probs,
    store_block,
    warm,
)

SUM_COLUMNS, SLOPES, VALUES, GRADIENTS = 1, 2, 4, 8

NAN = float32(np.nan)


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
            add_exp(probs[first : first + count], block, count, place == begin)
    if begin == end:
        fill(probs, len(columns), ZERO)
    out, share = work.scratch[chunk - work.start], float32(1.0 / max(end - begin, 1))
    for i in range(len(sums.target)):
        total = ZERO
        for k in range(sums.offsets[i], sums.offsets[i + 1]):
            total += probs[uintp(sums.source[k])] * sums.weight[k]
        out[sums.target[i]] = total * share


@loop_part(fastmath=SUMS)
def _summed_block(p, log_p, work, chunk, first, count):
    """``Q~`` of a block of summed columns, with their P and its logarithms."""
    columns, local = work.columns, chunk - work.start
    q = work.scratch[local, first : first + count]
    mean_at(p, log_p, work.teacher, chunk, columns.home[first : first + count], count)
    for i in range(max(0, min(count, columns.crossing - first))):
        q[i], p[i] = work.crossed[0, local, first + i], work.crossed[1, local, first + i]
        log_p[i] = log(FLOOR if p[i] < FLOOR else p[i])
    return q


@loop_part(fastmath=SUMS)
def _slopes(work, chunk):
    """``dD/dQ`` of summed columns in place of their ``Q~``, and their terms of D."""
    scalars, by_chunk, columns = work.scalars, work.by_chunk, work.columns
    mass = by_chunk.mass[chunk]
    block = np.empty((7, BLOCK), dtype=np.float32)
    p, log_p, log_q, slope, held_slope = block[0], block[1], block[2], block[3], block[4]
    kept = block[5:]
    value = ZERO
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
                clear(p, home, count)
                clear(q, home, count)
            written = held_slope if held else slope
            value = kept_terms(written, p, log_p, q, log_q, count, mass, chunk, work, kept)
        by_chunk.sums[0, chunk] += value
        if scalars.diagnostics:
            add_diagnostics(p, log_p, q, home, count, chunk, by_chunk)
        copy(q, slope, count)


@loop_part(fastmath=SUMS)
def _sum_slots(work, chunk):
    """``W f`` of residual rows."""
    sums, local = work.columns.by_row, chunk - work.start
    slope, out = work.scratch[local], work.residual[local]
    for i in range(len(sums.target)):
        total = ZERO
        for k in range(sums.offsets[i], sums.offsets[i + 1]):
            total += slope[uintp(sums.source[k])] * sums.weight[k]
        out[sums.target[i]] = total


@loop_part(fastmath=EACH)
def _carry(carried, slope, columns, first, count, residual):
    """``W f`` of a block of student columns."""
    partner = columns.partner[first : first + count]
    for i in range(count):
        carried[i] = slope[i] if partner[i] >= 0 else ZERO
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
        return -ONE
    begin, end = work.student.offsets[chunk], work.student.offsets[chunk + 1]
    total = ZERO
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
            q[i] *= (off_centre[i] - (ZERO if partner[i] != -1 else offset)) * scale
    else:
        for i in range(count):
            q[i] *= (off_centre[i] - offset) * scale


@loop_part(fastmath=EACH)
def _add_labels(out, rows, row, first, count, labels):
    """Add ``weight (softmax - onehot)`` of a block of columns at temperature 1."""
    weight = labels.weight[row]
    if weight == ZERO:
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
    block = np.empty((9, BLOCK), dtype=np.float32)
    p, log_p, q, log_q = block[0], block[1], block[2], block[3]
    slope, carried, out, kept = block[4], block[5], block[6], block[7:]
    mass, is_scaled = by_chunk.mass[chunk], by_chunk.is_scaled[chunk]
    grad_scale = by_chunk.grad_scale[chunk]
    scale = float32(scalars.temperature * grad_scale / (max(end - begin, 1) * mass))
    centre = _centre(work, chunk) if step == GRADIENTS else -ONE
    writes = len(work.gradient.values) > 0 and (step == GRADIENTS or is_known)
    # A row's own probabilities are their mean.
    is_alone = end - begin == 1 and not is_scaled
    teacher = work.teacher
    teacher_begin = teacher.offsets[chunk]
    of_rows = is_alone and is_known and teacher.offsets[chunk + 1] - teacher_begin == 1
    of_rows = of_rows and len(by_chunk.threshold) == 0
    shares_softmax = len(work.labels.weight) > 0 and scalars.temperature == ONE and not is_scaled
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
            value = forward_of_rows(
                slope, p, q, out, log_p, log_q, partner, count, normalisers, scalars
            )
        else:
            mean_at(p, log_p, teacher, chunk, partner, count)
            mean_from(q, log_q, work, chunk, first, count)
            if is_alone:
                copy(out, q, count)
            clear(q, partner, count)
            value = kept_terms(slope, p, log_p, q, log_q, count, mass, chunk, work, kept)
        if step == VALUES:
            by_chunk.sums[0, chunk] += value
            if scalars.diagnostics:
                add_diagnostics(p, log_p, q, partner, count, chunk, by_chunk)
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
            offset = ZERO
            if step == GRADIENTS:
                offset = work.dots[0, row] - centre * work.dots[1, row]
            if grad_scale != ZERO and shares_softmax:
                weight = work.labels.weight[row]
                _row_gradient_with_labels(out, carried, count, offset, scale, weight)
                place = work.labels.column[row] - first
                if 0 <= place < count:
                    out[place] -= weight
            else:
                if grad_scale == ZERO:
                    fill(out, count, ZERO)
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
    if grad_scale == ZERO:
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


@loop_part(fastmath=SUMS)
def _add_rest(p, q, columns, count, chunk, by_chunk):
    """Add a block's P and Q~ in ``columns`` below the threshold."""
    threshold = by_chunk.threshold[chunk]
    first, second = ZERO, ZERO
    for i in range(count):
        in_rest = columns[i] >= 0 and p[i] < threshold
        first += p[i] if in_rest else ZERO
        second += q[i] if in_rest else ZERO
    by_chunk.rest[0, chunk] += first
    by_chunk.rest[1, chunk] += second


@entry_point
def add_rests(first, stop, work):
    """P and Q~ of the columns that are compared as one, behind ``SUM_COLUMNS``."""
    columns, student = work.columns, work.student
    block = np.empty((4, BLOCK), dtype=np.float32)
    p, log_p, q, log_q = block[0], block[1], block[2], block[3]
    for chunk in range(first, stop):
        for start in range(0, len(columns.home), BLOCK):
            count = min(BLOCK, len(columns.home) - start)
            summed = _summed_block(p, log_p, work, chunk, start, count)
            home = columns.home[start : start + count]
            _add_rest(p, summed, home, count, chunk, work.by_chunk)
        for start in range(0, student.rows.width, BLOCK):
            count = min(BLOCK, student.rows.width - start)
            partner = columns.partner[start : start + count]
            mean_at(p, log_p, work.teacher, chunk, partner, count)
            mean_from(q, log_q, work, chunk, start, count)
            _add_rest(p, q, partner, count, chunk, work.by_chunk)


@entry_point
def write_labels(first, stop, order, rows, labels, gradient):
    """Cross-entropy's gradient, or 0, of the rows at places ``first`` to ``stop`` of the order."""
    out = np.empty(BLOCK, dtype=np.float32)
    for place in range(first, stop):
        row = order[place]
        for start in range(0, rows.width, BLOCK):
            count = min(BLOCK, rows.width - start)
            fill(out, count, ZERO)
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
            mean_at(block[0], block[1], work.teacher, chunk, columns, count)
            # Not as a slice, for which numba would compile an error message.
            for i in range(count):
                out[chunk - work.start, start + i] = block[0, i]
