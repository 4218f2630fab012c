"""Reading, summing and writing rows of logits in compiled loops, and what compiles and runs them.

Logits are a flat array and the distance of its rows, fp32 or bf16 in uint16: compiled code knows
only that the columns of a row are neighbours.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
import torch
from numba import njit
from numba.core.caching import FunctionCache, NullCache
from numba.extending import overload
from numpy import float32, int32, uint16, uint32, uintp

from megatron_ext.distributed.vocab_parallel import LogSumExp
from megatron_ext.ops.loop_math import bits_of_float, exp, float_of_bits, loop_part

SUMS = {"contract", "reassoc", "nsz"}
"""Flags of loops whose sums may be reordered; infinities and NaN are what they are."""

EACH = {"nsz"}
"""Flags of loops whose elements do not depend on where a block begins."""


_LONGEST_COMPILATION_S = 120.0


class _CacheOfFolder(FunctionCache):
    """Machine code that is stale when any file of loops has changed, compiled by one process.

    numba looks at the file of the function alone, and not at those of functions that it calls. Of
    the ranks of a machine that miss the same code, one compiles it and the others wait for it.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__(function)
        self._cache_file._source_stamp = _digest()
        self._name = function.__name__
        self._lock: IO[bytes] | None = None

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        found = super().load_overload(sig, target_context)
        if found is None and self._lock is None:
            with contextlib.suppress(OSError):
                self._lock = _locked(Path(self.cache_path, f"{self._name}.lock"))
            found = super().load_overload(sig, target_context)
            if found is not None:
                self._unlock()
        if found is None:
            _tell_of_compiling("once on this machine")
        return found

    def save_overload(self, sig: Any, data: Any) -> None:
        super().save_overload(sig, data)
        self._unlock()

    def _unlock(self) -> None:
        if self._lock is not None:
            self._lock.close()
            self._lock = None


class _NoCache(NullCache):
    """No folder can be written to: every process compiles."""

    def load_overload(self, sig: Any, target_context: Any) -> None:
        _tell_of_compiling("in every process: set NUMBA_CACHE_DIR to a folder that can keep them")


@cache
def _tell_of_compiling(how_often: str) -> None:
    """Say on standard error that compiling begins, once a process."""
    # Behind a bar that may be drawn.
    sys.stderr.write(f"\nmegatron-ext compiles loops for this processor: seconds, {how_often}\n")


def _locked(path: Path) -> IO[bytes]:
    """A file that this process alone has, or that another has kept for too long."""
    path.parent.mkdir(parents=True, exist_ok=True)
    file = path.open("wb")
    deadline = time.monotonic() + _LONGEST_COMPILATION_S
    while time.monotonic() < deadline:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            time.sleep(0.1)
    return file


@cache
def _digest() -> str:
    files = sorted(Path(__file__).parent.rglob("*loop*.py"))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


def entry_point(function: Callable[..., None]) -> Callable[..., None]:
    """``function`` as machine code, which lets other threads run, kept for the next process."""
    compiled = njit(nogil=True, fastmath=SUMS)(function)
    try:
        compiled._cache = _CacheOfFolder(function)
    except RuntimeError:
        compiled._cache = _NoCache()
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


# Threads do not come along.
os.register_at_fork(after_in_child=_pool.cache_clear)


BLOCK = 1024
"""Columns whose intermediate values are held at once."""

MINUS_INFINITY = float32(-np.inf)
_FAR = float32(np.exp(-40.0))
"""Share of the members from which on their exponentials have all their digits."""


class FlatRows(NamedTuple):
    """Rows ``values[row * stride:row * stride + width]``, over a temperature as they are read."""

    values: Any
    stride: int
    width: int
    temperature: float32


def flat_rows(logits: torch.Tensor, width: int | None = None, temperature: float = 1.0) -> FlatRows:
    """Rows of logits [T, Vp] in fp32 or bf16, whose columns are neighbours, up to ``width``."""
    rows, stride = len(logits), logits.stride(0)
    width = logits.shape[1] if width is None else width
    length = (rows - 1) * stride + logits.shape[1] if rows else 0
    flat = logits.detach().as_strided((length,), (1,))
    if logits.dtype == torch.bfloat16:
        values = flat.view(torch.int16).numpy().view(np.uint16)
    else:
        values = flat.numpy()
    return FlatRows(values, stride, width, np.float32(temperature))


class Normaliser(NamedTuple):
    """Log-sum-exp of each row, fp32 [T]."""

    peak: Any
    log_sum: Any


def normaliser(lse: LogSumExp) -> Normaliser:
    """The same numbers for compiled code."""
    return Normaliser(lse.peak.float().numpy(), lse.log_sum.float().numpy())


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


@loop_part(fastmath=EACH)
def _divide(values, count, temperature):
    for i in range(count):
        values[i] /= temperature


@loop_part(fastmath=EACH)
def load_block(out, rows, row, first, count):
    """Columns ``first`` to ``first + count`` of a row over the temperature, in fp32."""
    start = row * rows.stride + first
    part = rows.values[start : start + count]
    for i in range(count):
        out[i] = _read(part, i)
    if rows.temperature != float32(1):
        _divide(out, count, rows.temperature)


@loop_part(fastmath=EACH)
def gather_block(out, rows, row, columns, count):
    """As ``load_block``, of the columns that ``columns`` names; column 0 for negative ones."""
    start = row * rows.stride
    part = rows.values[start : start + rows.width]
    for i in range(count):
        column = columns[i]
        out[i] = _read(part, uintp(column if column > 0 else 0))
    if rows.temperature != float32(1):
        _divide(out, count, rows.temperature)


@loop_part(fastmath=EACH)
def store_block(rows, row, first, values, count):
    """Write ``values`` to a row from column ``first`` on, rounded once."""
    start = row * rows.stride + first
    part = rows.values[start : start + count]
    for i in range(count):
        _write(part, i, values[i])


@loop_part(fastmath=SUMS)
def largest(values, count):
    """The largest value, NaN above all; -inf for none."""
    # As integers of the same order: the largest of fp32 numbers has no vector instruction with NaN.
    top = int32(-2139095041)
    for i in range(count):
        bits = bits_of_float(values[i])
        key = int32(bits ^ (int32(bits >> int32(31)) & int32(0x7FFFFFFF)))
        top = key if key > top else top
    return float_of_bits(int32(top ^ (int32(top >> int32(31)) & int32(0x7FFFFFFF))))


@loop_part(fastmath=SUMS)
def warm(rows, row):
    """Read a row in order, so that gathers from it find it in the cache."""
    start = row * rows.stride
    part = rows.values[start : start + rows.width]
    total = float32(0)
    for i in range(0, rows.width, 16):
        total += _read(part, i)
    return total


@loop_part(fastmath=SUMS)
def sum_of_exp(values, count, peak):
    """Sum of ``exp(value - peak)``."""
    total = float32(0)
    for i in range(count):
        total += exp(values[i] - peak)
    return total


@loop_part(fastmath=SUMS)
def _sums_of_exp(values, members, count, peak):
    total = inside = float32(0)
    for i in range(count):
        value = exp(values[i] - peak)
        total += value
        inside += value if members[i] else float32(0)
    return total, inside


@loop_part(fastmath=EACH)
def _keep_members(values, members, count):
    for i in range(count):
        values[i] = values[i] if members[i] else MINUS_INFINITY


@loop_part(fastmath=SUMS)
def first_place(values, count, wanted):
    """The first place of a value, or of NaN."""
    for i in range(count):
        # As in torch, the first NaN is the largest of all.
        if values[i] == wanted or values[i] != values[i]:
            return i
    return 0


@loop_part(fastmath=SUMS)
def peak_of(values, count):
    """The largest value, and the start of the first block that has it."""
    top, place = MINUS_INFINITY, 0
    for first in range(0, count, BLOCK):
        best = largest(values[first : first + BLOCK], min(BLOCK, count - first))
        # NaN, once found, stays.
        if top == top and not best <= top:
            top, place = best, first
    return top, place


@loop_part(fastmath=SUMS)
def largest_place(values, count):
    """The first place of the largest value."""
    top, start = peak_of(values, count)
    return start + first_place(values[start:], count - start, top)


@entry_point
def row_statistics(first, stop, rows, members, read, with_column, peak, total, column):
    """Peaks, sums of exponentials and places of the peaks of rows ``first`` to ``stop``.

    Args:
        members: bool [width], or [0] where all are.
        read: bool [T], or [0] for all; other rows get 0.
        peak: fp32 [2, T], written; so are ``total`` [2, T] and ``column`` int64 [T].
    """
    # A row fits into the cache of a core.
    values = np.empty(rows.width, dtype=np.float32)
    for row in range(first, stop):
        peak[0, row] = peak[1, row] = total[0, row] = total[1, row] = float32(0)
        column[row] = 0
        if (read.size and not read[row]) or not rows.width:
            continue
        load_block(values, rows, row, 0, rows.width)
        top, place = peak_of(values, rows.width)
        if with_column:
            column[row] = place + first_place(values[place:], rows.width - place, top)
        top = top if top != MINUS_INFINITY else float32(0)
        peak[0, row] = peak[1, row] = top
        if not members.size:
            total[0, row] = total[1, row] = sum_of_exp(values, rows.width, top)
            continue
        total[0, row], total[1, row] = _sums_of_exp(values, members, rows.width, top)
        if total[1, row] > _FAR * total[0, row]:
            continue
        # Beside those of the other columns, exponentials would lose their digits.
        _keep_members(values, members, rows.width)
        top, _ = peak_of(values, rows.width)
        top = top if top != MINUS_INFINITY else float32(0)
        peak[1, row] = top
        total[1, row] = sum_of_exp(values, rows.width, top)


@loop_part(fastmath=EACH)
def log_probs(values, count, peak, log_sum):
    """Logits of a row to log-probabilities, in place."""
    for i in range(count):
        values[i] = values[i] - peak - log_sum


@loop_part(fastmath=EACH)
def fill(values, count, value):
    """Write ``value`` everywhere."""
    for i in range(count):
        values[i] = value


@loop_part()
def clear_padding(gradient, row, width):
    """Write 0 behind the first ``width`` columns of a row."""
    start = row * gradient.stride
    gradient.values[start + width : start + gradient.width] = 0


@loop_part(fastmath=EACH)
def _add_shares(out, values, members, count, peak, log_sum, weight):
    for i in range(count):
        share = exp(values[i] - peak - log_sum)
        out[i] += weight * share if members[i] else float32(0)


@loop_part(fastmath=EACH)
def _scaled_probs(out, values, count, peak, log_sum, weight):
    for i in range(count):
        out[i] = weight * exp(values[i] - peak - log_sum)


@entry_point
def token_gradient(first, stop, rows, whole, members, arrives, written, gradient):
    """Equation 3 of ``ops/token_likelihood`` for rows ``first`` to ``stop``.

    Args:
        whole: ``Normaliser`` over all columns.
        members: The set's columns bool [width], [0] without a set, and its ``Normaliser``.
        arrives: Column int64 [T] of each token, -1 for none, and fp32 [T] gradients of its
            log-probability and of the set's log-mass, both over tau.
        written: bool [T], rows that are written; [0]: all.
        gradient: Rows that are written, 0 without an upstream gradient.
    """
    is_member, inside = members
    column, on_token, on_mass = arrives
    values, out = np.empty(BLOCK, dtype=np.float32), np.empty(BLOCK, dtype=np.float32)
    for row in range(first, stop):
        if written.size and not written[row]:
            continue
        total = on_token[row] + on_mass[row]
        unused = on_token[row] == 0 and on_mass[row] == 0
        for start in range(0, rows.width, BLOCK):
            count = min(BLOCK, rows.width - start)
            if unused:
                fill(out, count, float32(0))
            else:
                load_block(values, rows, row, start, count)
                peak, log_sum = whole.peak[row], whole.log_sum[row]
                _scaled_probs(out, values, count, peak, log_sum, -total)
                if is_member.size and on_mass[row] != 0:
                    peak, log_sum = inside.peak[row], inside.log_sum[row]
                    part = is_member[start : start + count]
                    _add_shares(out, values, part, count, peak, log_sum, on_mass[row])
                place = column[row] - start
                if 0 <= place < count:
                    out[place] += on_token[row]
            store_block(gradient, row, start, out, count)
        clear_padding(gradient, row, rows.width)


@loop_part(fastmath=EACH)
def add_softmax(out, values, count, peak, log_sum, weight):
    """Add ``weight softmax`` of logits whose log-sum-exp is known."""
    for i in range(count):
        out[i] += weight * exp(values[i] - peak - log_sum)


@entry_point
def chunk_means(first, stop, start, rows, whole, order, offsets, out):
    """Mean softmax of chunks ``first`` to ``stop`` in ``out`` fp32 [C', Vp], 0 in padding.

    Args:
        start: Chunk of the first row of ``out``.
        order, offsets: Fields of ``ChunkRows``.
    """
    values = np.empty(BLOCK, dtype=np.float32)
    for chunk in range(first, stop):
        begin, end = offsets[chunk], offsets[chunk + 1]
        target = out[chunk - start]
        fill(target, len(target), float32(0))
        share = float32(1.0 / max(end - begin, 1))
        for place in range(begin, end):
            row = order[place]
            peak, log_sum = whole.peak[row], whole.log_sum[row]
            for column in range(0, rows.width, BLOCK):
                count = min(BLOCK, rows.width - column)
                load_block(values, rows, row, column, count)
                part = target[column : column + count]
                add_softmax(part, values, count, peak, log_sum, share)


@loop_part(fastmath=SUMS)
def _dot_with_probs(values, slope, count, peak, log_sum):
    total = float32(0)
    for i in range(count):
        total += slope[i] * exp(values[i] - peak - log_sum)
    return total


@entry_point
def slope_products(first, stop, rows, whole, order, slots, slope, out):
    """``sum_v q_i[v] slope_c[v]`` of the rows at places ``first`` to ``stop``, in ``out`` [T'].

    Args:
        slots: int64 [T'] row of ``slope`` [C', Vp] of each place.
    """
    values = np.empty(BLOCK, dtype=np.float32)
    for place in range(first, stop):
        row, of_chunk = order[place], slope[slots[place]]
        peak, log_sum = whole.peak[row], whole.log_sum[row]
        total = float32(0)
        for column in range(0, rows.width, BLOCK):
            count = min(BLOCK, rows.width - column)
            load_block(values, rows, row, column, count)
            part = of_chunk[column : column + count]
            total += _dot_with_probs(values, part, count, peak, log_sum)
        out[place] = total


class LabelPart(NamedTuple):
    """Cross-entropy of rows' labels, whose gradient is written with that of their chunks."""

    column: Any
    """int64 [T], -1 where another rank has the label; [0] without labels."""

    weight: Any
    """fp32 [T] upstream gradient, 0 where there is no label."""

    plain: FlatRows
    """The rows at temperature 1."""

    whole: Normaliser
    """Of these."""


@loop_part()
def label_weights(labels, row, rows, scale):
    """A row's weight in both parts of its gradient that hold probabilities: with the chunk's, whose
    temperature is 1, and of its own; the two are the label's weight."""
    weight = labels.weight[row] if labels.weight.size else float32(0)
    is_shared = scale != 0 and rows.temperature == labels.plain.temperature
    return (weight, float32(0)) if is_shared else (float32(0), weight)


@loop_part()
def add_label_part(out, values, labels, row, start, count, apart):
    """Add the gradient of a row's label to a block from column ``start`` on, but for probabilities
    that are in it: those of weight ``apart`` are added.

    Args:
        values: Memory for a block.
    """
    if apart != 0:
        load_block(values, labels.plain, row, start, count)
        add_softmax(out, values, count, labels.whole.peak[row], labels.whole.log_sum[row], apart)
    if labels.weight.size:
        place = labels.column[row] - start
        if 0 <= place < count:
            out[place] -= labels.weight[row]


@loop_part(fastmath=EACH)
def _centred(values, slope, count, peak, log_sum, centre, scale, shared):
    for i in range(count):
        q = exp(values[i] - peak - log_sum)
        values[i] = q * ((slope[i] - centre) * scale + shared)


@entry_point
def slope_gradients(first, stop, rows, whole, order, slots, slope, factors, labels, gradient):
    """``q_i (slope_c - centre_i) scale_i`` of the same rows, 0 where ``scale`` is 0, and the
    gradient of their labels.

    Args:
        factors: ``centre`` and ``scale`` [T'] at each place.
        labels: ``LabelPart``
    """
    centre, scale = factors
    values, plain = np.empty(BLOCK, dtype=np.float32), np.empty(BLOCK, dtype=np.float32)
    for place in range(first, stop):
        row, of_chunk = order[place], slope[slots[place]]
        peak, log_sum = whole.peak[row], whole.log_sum[row]
        shared, apart = label_weights(labels, row, rows, scale[place])
        for column in range(0, rows.width, BLOCK):
            count = min(BLOCK, rows.width - column)
            if scale[place] == 0:
                fill(values, count, float32(0))
            else:
                load_block(values, rows, row, column, count)
                part = of_chunk[column : column + count]
                _centred(values, part, count, peak, log_sum, centre[place], scale[place], shared)
            add_label_part(values, plain, labels, row, column, count, apart)
            store_block(gradient, row, column, values, count)
        clear_padding(gradient, row, rows.width)
