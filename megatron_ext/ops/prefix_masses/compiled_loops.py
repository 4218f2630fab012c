"""Compiled loops of the starts' masses and their logarithms, for a CPU."""

from __future__ import annotations

import numpy as np
from numpy import float32

from megatron_ext.ops.loop_math import exp, log, loop_part
from megatron_ext.ops.row_loops import EACH, MINUS_INFINITY, entry_point, load_block, log_probs

_BLOCK = 2048
"""Columns whose probabilities are in the first cache until they are added up."""

_SMALLEST = np.finfo(np.float32).tiny


@loop_part(fastmath=EACH)
def _exponentials(values, count):
    for i in range(count):
        values[i] = exp(values[i])


@entry_point
def column_masses(first, stop, rows, row_of, whole, target, out):
    """Probabilities of a row's columns added up by ``target``, in ``out`` [S, slots] of zeros.

    Args:
        row_of: int64 [S] row of each start.
        whole: ``Normaliser`` of all rows.
        target: int64 [V] slot of each column.
    """
    values = np.empty(_BLOCK, float32)
    for start in range(first, stop):
        row, sums = row_of[start], out[start]
        for begin in range(0, rows.width, _BLOCK):
            count = min(_BLOCK, rows.width - begin)
            load_block(values, rows, row, begin, count)
            log_probs(values, count, whole.peak[row], whole.log_sum[row])
            _exponentials(values, count)
            for i in range(count):
                sums[target[begin + i]] += values[i]


@loop_part(fastmath=EACH)
def _logarithms(values, count):
    for i in range(count):
        values[i] = MINUS_INFINITY if values[i] < _SMALLEST else log(values[i])


@entry_point
def log_masses(first, stop, masses):
    """Logarithms in the place of masses [S, slots]; of less than the smallest normal number -inf.

    torch takes ten times as long for the logarithm of 0, which most slots may hold.
    """
    for start in range(first, stop):
        row = masses[start]
        for begin in range(0, len(row), _BLOCK):
            _logarithms(row[begin : begin + _BLOCK], min(_BLOCK, len(row) - begin))
