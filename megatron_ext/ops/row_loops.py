"""Reading, summing and writing rows of logits in compiled loops, and what compiles and runs them.

Logits are a flat array and the distance of its rows, fp32 or bf16 in uint16: compiled code knows
only that the columns of a row are neighbours.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numba import njit
from numba.core.caching import FunctionCache
from numba.extending import overload
from numpy import float32, int32, uint16, uint32, uintp

from megatron_ext.ops.loop_math import bits_of_float, exp, float_of_bits

SUMS = {"contract", "reassoc", "nsz"}
"""Flags of loops whose sums may be reordered; infinities and NaN are what they are."""


class _CacheOfFolder(FunctionCache):
    """Machine code that is stale when any file of loops has changed.

    numba looks at the file of the function alone, and not at those of functions that it calls.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__(function)
        self._cache_file._source_stamp = _digest()


@cache
def _digest() -> str:
    files = sorted(Path(__file__).parent.rglob("*loop*.py"))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


def entry_point(function: Callable[..., None]) -> Callable[..., None]:
    """``function`` as machine code, which lets other threads run, kept for the next process."""
    compiled = njit(nogil=True, fastmath=SUMS)(function)
    # Where no folder can be written to, it is compiled in every process.
    with contextlib.suppress(RuntimeError):
        compiled._cache = _CacheOfFolder(function)
    return compiled


def in_threads(run: Callable[[int, int], object], count: int) -> None:
    """Call ``run(first, stop)`` for parts of ``range(count)``, side by side.

    Args:
        run: Calls an entry point.
    """
    parts = min(torch.get_num_threads(), count)
    if parts <= 1:
        if count:
            run(0, count)
        return
    ends = [count * part // parts for part in range(parts + 1)]
    # All results are read, so that no error is lost.
    list(_pool(parts).map(run, ends[:-1], ends[1:]))


@cache
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, thread_name_prefix="compiled-loop")


BLOCK = 1024
"""Columns whose intermediate values are held at once."""

MINUS_INFINITY = float32(-np.inf)
_FAR = float32(np.exp(-40.0))
"""Share of the members from which on their exponentials have all their digits."""


class FlatRows(NamedTuple):
    """Rows ``values[row * stride:row * stride + width]``."""

    values: Any
    stride: int
    width: int


def flat_rows(logits: torch.Tensor, width: int | None = None) -> FlatRows:
    """Rows of logits [T, Vp] in fp32 or bf16, whose columns are neighbours, up to ``width``."""
    rows, stride = len(logits), logits.stride(0)
    width = logits.shape[1] if width is None else width
    length = (rows - 1) * stride + logits.shape[1] if rows else 0
    flat = logits.detach().as_strided((length,), (1,))
    if logits.dtype == torch.bfloat16:
        return FlatRows(flat.view(torch.int16).numpy().view(np.uint16), stride, width)
    return FlatRows(flat.numpy(), stride, width)


def _read(row, column):
    raise NotImplementedError


@overload(_read, inline="always")
def _read_compiled(row, column):
    if row.dtype.name == "uint16":
        return lambda row, column: float_of_bits(int32(uint32(row[column]) << uint32(16)))
    return lambda row, column: row[column]


def _write(row, column, value):
    raise NotImplementedError


@overload(_write, inline="always")
def _write_compiled(row, column, value):
    if row.dtype.name == "uint16":

        def rounded(row, column, value):
            bits = uint32(bits_of_float(value))
            # To nearest, ties to even; NaN keeps a bit of its fraction.
            near = (bits + uint32(0x7FFF) + ((bits >> uint32(16)) & uint32(1))) >> uint32(16)
            row[column] = uint16(near) if value == value else uint16(0x7FC0)

        return rounded

    def stored(row, column, value):
        row[column] = value

    return stored


@njit(fastmath=SUMS)
def load_block(out, rows, row, first, count):
    """Columns ``first`` to ``first + count`` of a row, in fp32."""
    start = row * rows.stride + first
    part = rows.values[start : start + count]
    for i in range(count):
        out[i] = _read(part, i)


@njit(fastmath=SUMS)
def gather_block(out, rows, row, columns, count):
    """The columns of a row that ``columns`` names, in fp32; column 0 for negative ones."""
    start = row * rows.stride
    part = rows.values[start : start + rows.width]
    for i in range(count):
        column = columns[i]
        out[i] = _read(part, uintp(column if column > 0 else 0))


@njit(fastmath=SUMS)
def store_block(rows, row, first, values, count):
    """Write ``values`` to a row from column ``first`` on, rounded once."""
    start = row * rows.stride + first
    part = rows.values[start : start + count]
    for i in range(count):
        _write(part, i, values[i])


@njit(fastmath=SUMS)
def largest(values, count):
    """The largest value, NaN above all; -inf for none."""
    # As integers of the same order: the largest of fp32 numbers has no vector instruction with NaN.
    top = int32(-2139095041)
    for i in range(count):
        bits = bits_of_float(values[i])
        key = int32(bits ^ (int32(bits >> int32(31)) & int32(0x7FFFFFFF)))
        top = key if key > top else top
    return float_of_bits(int32(top ^ (int32(top >> int32(31)) & int32(0x7FFFFFFF))))


@njit(fastmath=SUMS)
def warm(rows, row):
    """Read a row in order, so that gathers from it find it in the cache."""
    start = row * rows.stride
    part = rows.values[start : start + rows.width]
    total = float32(0)
    for i in range(0, rows.width, 16):
        total += _read(part, i)
    return total


@njit(fastmath=SUMS)
def _sum_of_exp(values, count, peak):
    total = float32(0)
    for i in range(count):
        total += exp(values[i] - peak)
    return total


@njit(fastmath=SUMS)
def _sums_of_exp(values, members, count, peak):
    total = inside = float32(0)
    for i in range(count):
        value = exp(values[i] - peak)
        total += value
        inside += value if members[i] else float32(0)
    return total, inside


@njit(fastmath=SUMS)
def _keep_members(values, members, count):
    for i in range(count):
        values[i] = values[i] if members[i] else MINUS_INFINITY


@njit(fastmath=SUMS)
def _scale(values, count, inverse):
    for i in range(count):
        values[i] *= inverse


@njit(fastmath=SUMS)
def _first_place(values, count, wanted):
    for i in range(count):
        # As torch, the first NaN is the largest of all.
        if values[i] == wanted or values[i] != values[i]:
            return i
    return 0


@entry_point
def row_statistics(first, stop, rows, inverse, members, read, with_column, peak, total, column):
    """Peaks, sums of exponentials and places of the peaks of rows ``first`` to ``stop``.

    Args:
        inverse: 1 / tau.
        members: bool [width], or [0] where all are.
        read: bool [T], or [0] for all; other rows get 0.
        peak: fp32 [2, T], written; so are ``total`` [2, T] and ``column`` int64 [T].
    """
    values = np.empty(rows.width, dtype=np.float32)
    for row in range(first, stop):
        peak[0, row] = peak[1, row] = total[0, row] = total[1, row] = float32(0)
        column[row] = 0
        if (read.size and not read[row]) or not rows.width:
            continue
        load_block(values, rows, row, 0, rows.width)
        if inverse != float32(1):
            _scale(values, rows.width, inverse)
        top = largest(values, rows.width)
        if with_column:
            column[row] = _first_place(values, rows.width, top)
        top = top if top != MINUS_INFINITY else float32(0)
        peak[0, row] = peak[1, row] = top
        if not members.size:
            total[0, row] = total[1, row] = _sum_of_exp(values, rows.width, top)
            continue
        whole, inside = _sums_of_exp(values, members, rows.width, top)
        total[0, row], total[1, row] = whole, inside
        if inside > _FAR * whole:
            continue
        # Beside those of the other columns, exponentials would lose their digits.
        _keep_members(values, members, rows.width)
        best = largest(values, rows.width)
        best = best if best != MINUS_INFINITY else float32(0)
        peak[1, row] = best
        total[1, row] = _sum_of_exp(values, rows.width, best)
