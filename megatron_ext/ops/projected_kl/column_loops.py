"""Means of blocks of columns, and their terms of D, in compiled loops. README, equations 2 to 8.

T rows, C chunks, D summed columns, R residual rows, X crossing columns, N learned entries.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy import float32

from megatron_ext.ops.divergence_loops import FORWARD, REVERSE, entropy_of
from megatron_ext.ops.loop_math import FLOOR, exp, log, loop_part
from megatron_ext.ops.row_loops import (
    EACH,
    MINUS_INFINITY,
    SUMS,
    FlatRows,
    fill,
    gather_block,
    largest,
    load_block,
    log_probs,
)

LOG_FLOOR = float32(np.log(np.float64(FLOOR)))
ZERO, ONE = float32(0), float32(1)
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
    """fp32 [2, C]: P and Q~ of all other columns, from ``add_rests``."""

    rest_slope: Any
    """fp32 [C]: ``dD/dQ`` of these."""


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
def add_exp(total, values, count, is_first):
    if is_first:
        for i in range(count):
            total[i] = exp(values[i])
    else:
        for i in range(count):
            total[i] += exp(values[i])


@loop_part(fastmath=EACH)
def copy(out, values, count):
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
def mean_at(mean, log_mean, side, chunk, columns, count):
    """Mean probabilities of a chunk at ``columns``, 0 at negative ones, and their logarithms."""
    begin, end = side.offsets[chunk], side.offsets[chunk + 1]
    if begin == end:
        fill(mean, count, ZERO)
        fill(log_mean, count, MINUS_INFINITY)
    for place in range(begin, end):
        row = side.order[place]
        gather_block(log_mean, side.rows, row, columns, count)
        _keep(log_mean, columns, count)
        log_probs(log_mean, count, side.peak[row], side.log_sum[row])
        add_exp(mean, log_mean, count, place == begin)
    _finish_mean(mean, log_mean, count, end - begin)


@loop_part(fastmath=SUMS)
def mean_from(mean, log_mean, work, chunk, first, count):
    """Mean ``q'`` of a chunk in ``count`` columns from ``first`` on, and their logarithms."""
    side = work.student
    begin, end = side.offsets[chunk], side.offsets[chunk + 1]
    if begin == end:
        fill(mean, count, ZERO)
        fill(log_mean, count, MINUS_INFINITY)
    for place in range(begin, end):
        row = side.order[place]
        load_block(log_mean, side.rows, row, first, count)
        peak, log_sum = work.carried_peak[row], work.carried_log_sum[row]
        log_probs(log_mean, count, peak, log_sum)
        add_exp(mean, log_mean, count, place == begin)
    _finish_mean(mean, log_mean, count, end - begin)


@loop_part(fastmath=SUMS)
def _forward(slope, p, log_p, q, log_q, count, mass, log_mass):
    total = ZERO
    for i in range(count):
        total += p[i] * (log_p[i] - (log_q[i] - log_mass))
        slope[i] = -(p[i] / (FLOOR if q[i] < FLOOR else q[i])) * mass
    return total


@loop_part(fastmath=SUMS)
def _reverse(slope, log_p, q, log_q, count, mass, log_mass):
    total = ZERO
    for i in range(count):
        slope[i] = log_q[i] - log_mass - log_p[i]
        total += q[i] / mass * slope[i]
    return total


@loop_part(fastmath=SUMS)
def _jensen_shannon(slope, p, log_p, q, log_q, count, mass, log_mass, mixture):
    total = ZERO
    other = ONE - mixture
    for i in range(count):
        share = q[i] / mass
        mixed = mixture * p[i] + other * share
        log_mix = log(FLOOR if mixed < FLOOR else mixed)
        slope[i] = (log_q[i] - log_mass - log_mix) * other
        total += mixture * p[i] * (log_p[i] - log_mix) + share * slope[i]
    return total


@loop_part(fastmath=SUMS)
def forward_of_rows(slope, p, q, out, teacher_logits, logits, partner, count, normalisers, scalars):
    """The forward direction of one row on either side, as the functions above in one loop.

    Args:
        p, q: Written; 0 where there is no partner. ``out`` is q everywhere.
        teacher_logits: Those of the partners, which become the logarithms of ``p``.
        normalisers: Of the teacher's row and the student's, and ``mass``.
    """
    teacher_peak, teacher_sum, peak, log_sum, mass = normalisers
    log_mass = log(mass)
    total = ZERO
    for i in range(count):
        direct = partner[i] >= 0
        log_p = teacher_logits[i] - teacher_peak - teacher_sum
        log_q = logits[i] - peak - log_sum
        p[i] = exp(log_p) if direct else ZERO
        out[i] = exp(log_q)
        q[i] = out[i] if direct else ZERO
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
def clear(values, columns, count):
    for i in range(count):
        values[i] = values[i] if columns[i] >= 0 else ZERO


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
        kept[i] = ZERO if p[i] < threshold else values[i]


@loop_part(fastmath=EACH)
def _spread(slope, p, count, threshold, of_rest):
    """The slope of the rest in its columns."""
    for i in range(count):
        slope[i] = of_rest if p[i] < threshold else slope[i]


@loop_part(fastmath=SUMS)
def kept_terms(slope, p, log_p, q, log_q, count, mass, chunk, work, kept):
    """``_terms`` of the columns that are compared by themselves; ``slope`` of all."""
    by_chunk, kept_p, kept_q = work.by_chunk, p, q
    pools = len(by_chunk.threshold) > 0
    if pools:
        kept_p, kept_q = kept[0], kept[1]
        _pool(kept_p, p, p, count, by_chunk.threshold[chunk])
        _pool(kept_q, q, p, count, by_chunk.threshold[chunk])
    value = _terms(slope, kept_p, log_p, kept_q, log_q, count, mass, work.scalars)
    if pools:
        _spread(slope, p, count, by_chunk.threshold[chunk], by_chunk.rest_slope[chunk])
    return value


@loop_part(fastmath=SUMS)
def add_diagnostics(p, log_p, q, columns, count, chunk, by_chunk):
    """Add a block's entropy, and keep its largest P and Q~."""
    by_chunk.sums[1, chunk] += entropy_of(p, log_p, count)
    by_chunk.best[0, chunk], by_chunk.column[0, chunk] = _keep_best(
        by_chunk.best[0, chunk], by_chunk.column[0, chunk], p, columns, count
    )
    by_chunk.best[1, chunk], by_chunk.column[1, chunk] = _keep_best(
        by_chunk.best[1, chunk], by_chunk.column[1, chunk], q, columns, count
    )
