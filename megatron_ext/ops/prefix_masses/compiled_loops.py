"""Compiled loops of the starts' masses, for a CPU."""

from __future__ import annotations

import numpy as np
from numpy import float32

from megatron_ext.ops.loop_math import exp, loop_part
from megatron_ext.ops.row_loops import EACH, entry_point, load_block, log_probs

_BLOCK = 2048
"""Columns whose probabilities are in the first cache until they are added up."""


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
