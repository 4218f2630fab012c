"""Equal runs of two sequences of symbols, in order. N and M symbols, R runs.

Symbols are numbers: code points, for texts. Runs are found from anchors, which occur once in each
sequence; between anchors from shorter anchors; between those by a bounded search for the fewest
edits, so that the whole is near-linear. A short run counts only where the text around it is the
same text normalised differently: unlike texts share short runs by chance.

The search is the greedy algorithm of Myers, "An O(ND) Difference Algorithm and Its Variations"
(1986), run from the front in stages: a stage ends at a long run or when its edits are used up.
"""

from __future__ import annotations

import unicodedata
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megatron_ext.alignment.byte_alignment import ByteEnds
from megatron_ext.alignment.control_pairs import NO_CLASS
from megatron_ext.alignment.spelling import Tokens

Run = tuple[int, int, int]

MAX_EDITS = 48
"""Insertions and deletions of one stage."""
LONG_RUN = 16
"""Equal symbols in a row after which a stage ends: both sides are in step again."""
LEAST_SHARE = 0.6
"""Least share of equal symbols in a stage that uses up its edits; below it, symbols are equal by
chance, and the search ends."""


def edit_path(first: NDArray[np.uint32], second: NDArray[np.uint32]) -> Iterator[Run]:
    """Runs (start in the first, start in the second, length) of equal symbols, ascending."""
    # A stage sees no more than it can reach.
    reach = 2 * MAX_EDITS * LONG_RUN
    i = j = 0
    while i < len(first) and j < len(second):
        runs, x, y, is_good = _stage(first[i : i + reach].tolist(), second[j : j + reach].tolist())
        if not is_good:
            return
        for start, other_start, length in runs:
            yield i + start, j + other_start, length
        i, j = i + x, j + y


def _stage(first: list[int], second: list[int]) -> tuple[list[Run], int, int, bool]:
    """Runs of one stage, where it ends in both rows, and whether the search goes on."""
    furthest = {1: 0}
    trace: list[dict[int, int]] = []
    best = (0, 0, 0, 0)
    for edits in range(MAX_EDITS + 1):
        trace.append(dict(furthest))
        for diagonal in range(-edits, edits + 1, 2):
            down = diagonal == -edits or (
                diagonal != edits and furthest[diagonal - 1] < furthest[diagonal + 1]
            )
            x = furthest[diagonal + 1] if down else furthest[diagonal - 1] + 1
            y = x - diagonal
            start = x
            while x < len(first) and y < len(second) and first[x] == second[y]:
                x, y = x + 1, y + 1
            furthest[diagonal] = x
            inside = x <= len(first) and y <= len(second)
            if inside and x + y > best[0]:
                best = (x + y, x, y, edits)
            at_end = x >= len(first) and y >= len(second)
            if inside and (at_end or x - start >= LONG_RUN):
                return _runs(trace, x, y, edits), x, y, x + y > 0
    total, x, y, edits = best
    return _runs(trace, x, y, edits), x, y, total > 0 and total - edits >= LEAST_SHARE * total


def _runs(trace: list[dict[int, int]], x: int, y: int, edits: int) -> list[Run]:
    """The equal runs on the way to (x, y)."""
    runs: list[Run] = []
    for edit in range(edits, -1, -1):
        furthest, diagonal = trace[edit], x - y
        down = diagonal == -edit or (
            diagonal != edit and furthest[diagonal - 1] < furthest[diagonal + 1]
        )
        start = furthest[diagonal + 1] if down else furthest[diagonal - 1] + 1
        if edit == 0:
            start = 0
        if x > start:
            runs.append((start, start - diagonal, x - start))
        if edit:
            x, y = (start, start - diagonal - 1) if down else (start - 1, start - diagonal)
    return runs[::-1]


Symbols = NDArray[np.uint32]

ANCHOR_LENGTHS = (32, 8)
CERTAIN_RUN = 8
"""Length from which a run counts whatever surrounds it."""
MAX_CODE_POINT = 0x10FFFF
_MANY = 4096
_MIXER = np.uint64(0x9E3779B97F4A7C15)
_EIGHTH = np.uint64(1 << 61)


def match_symbols(first: Symbols, second: Symbols) -> list[Run]:
    """Runs of equal symbols, ascending in both rows, without those that are equal by chance."""
    runs = _joined(_matched(first, second, 0, len(first), 0, len(second), ANCHOR_LENGTHS))
    return _joined(_certain(runs, first, second))


def _matched(
    first: Symbols,
    second: Symbols,
    i: int,
    i_stop: int,
    j: int,
    j_stop: int,
    anchor_lengths: Sequence[int],
) -> Iterator[Run]:
    """Runs in ``first[i:i_stop]`` and ``second[j:j_stop]``."""
    size = common_prefix(first[i:i_stop], second[j:j_stop])
    if size:
        yield i, j, size
        i, j = i + size, j + size
    size = common_prefix(first[i:i_stop][::-1], second[j:j_stop][::-1])
    i_stop, j_stop = i_stop - size, j_stop - size
    if i < i_stop and j < j_stop:
        if anchor_lengths:
            anchors = _anchors(first[i:i_stop], second[j:j_stop], anchor_lengths[0])
            for run in [(x + i, y + j, length) for x, y, length in anchors]:
                yield from _matched(first, second, i, run[0], j, run[1], anchor_lengths[1:])
                yield run
                i, j = run[0] + run[2], run[1] + run[2]
            yield from _matched(first, second, i, i_stop, j, j_stop, anchor_lengths[1:])
        else:
            for x, y, length in edit_path(first[i:i_stop], second[j:j_stop]):
                yield i + x, j + y, length
    if size:
        yield i_stop, j_stop, size


def common_prefix(first: Symbols, second: Symbols) -> int:
    """Length of the common prefix, in time proportional to it."""
    limit = min(len(first), len(second))
    done, block = 0, 64
    while done < limit:
        unequal = first[done : min(done + block, limit)] != second[done : min(done + block, limit)]
        if unequal.any():
            return done + int(np.argmax(unequal))
        done += block
        block *= 2
    return limit


def _anchors(first: Symbols, second: Symbols, length: int) -> list[Run]:
    """The heaviest chain of runs whose stretches of ``length`` occur once in each row."""
    if min(len(first), len(second)) < 2 * length:
        return []
    first_hashes, first_at = _once(_hashes(first, length))
    second_hashes, second_at = _once(_hashes(second, length))
    _, at, second_index = np.intersect1d(
        first_hashes, second_hashes, assume_unique=True, return_indices=True
    )
    i, j = first_at[at], second_at[second_index]
    order = np.argsort(i)
    i, j = i[order], j[order]
    apart: list[Run] = []
    i_done = j_done = 0
    for x, y, size in heaviest_chain(_stretches(i, j, length)):
        skipped = max(i_done - x, j_done - y, 0)
        x, y, size = x + skipped, y + skipped, size - skipped
        # Equal hashes are equal stretches but for a collision.
        if size > 0 and np.array_equal(first[x : x + size], second[y : y + size]):
            apart.append((x, y, size))
            i_done, j_done = x + size, y + size
    return apart


def _stretches(i: NDArray[np.intp], j: NDArray[np.intp], length: int) -> list[Run]:
    """Runs of equal stretches of ``length``, with overlapping stretches of one shift joined."""
    if not len(i):
        return []
    is_start = np.append(True, (np.diff(i) > length) | (np.diff(i) != np.diff(j)))
    starts = np.flatnonzero(is_start)
    stops = np.append(starts[1:], len(i)) - 1
    sizes = i[stops] - i[starts] + length
    return list(zip(i[starts].tolist(), j[starts].tolist(), sizes.tolist(), strict=True))


def _hashes(row: Symbols, length: int) -> NDArray[np.uint64]:
    """Rolling hash of each stretch of ``length`` symbols."""
    count = len(row) - length + 1
    hashes = np.zeros(count, dtype=np.uint64)
    for offset in range(length):
        hashes *= _MIXER
        hashes += row[offset : offset + count]
    return hashes


def _once(hashes: NDArray[np.uint64]) -> tuple[NDArray[np.uint64], NDArray[np.intp]]:
    """The hashes that occur once, ascending, and where; an eighth is sampled of very many."""
    at: NDArray[np.intp] = np.arange(len(hashes))
    if len(hashes) > _MANY:
        at = np.flatnonzero(hashes * _MIXER < _EIGHTH)
    order = at[np.argsort(hashes[at])]
    ordered = hashes[order]
    differs = np.ones(len(ordered) + 1, dtype=np.bool_)
    np.not_equal(ordered[1:], ordered[:-1], out=differs[1:-1])
    is_single = differs[1:] & differs[:-1]
    return ordered[is_single], order[is_single]


def heaviest_chain(runs: Sequence[Run]) -> list[Run]:
    """The subset of runs, ascending in both rows, that has the most symbols."""
    # Ends of the best chains, ascending both in the second row and in weight.
    ends: list[int] = []
    weights: list[int] = []
    chains: list[int] = []
    before: list[int] = []
    for index, (_, j, size) in enumerate(runs):
        at = bisect_left(ends, j)
        weight = size + (weights[at - 1] if at else 0)
        before.append(chains[at - 1] if at else -1)
        stop = at
        while stop < len(ends) and weights[stop] <= weight:
            stop += 1
        if at < stop or at == len(ends) or ends[at] > j:
            ends[at:stop], weights[at:stop], chains[at:stop] = [j], [weight], [index]
    chain: list[Run] = []
    index = chains[-1] if chains else -1
    while index >= 0:
        chain.append(runs[index])
        index = before[index]
    return chain[::-1]


def _joined(runs: Iterable[Run]) -> list[Run]:
    joined: list[Run] = []
    for i, j, length in runs:
        if joined and joined[-1][0] + joined[-1][2] == i and joined[-1][1] + joined[-1][2] == j:
            joined[-1] = (*joined[-1][:2], joined[-1][2] + length)
        else:
            joined.append((i, j, length))
    return joined


def _certain(runs: Sequence[Run], first: Symbols, second: Symbols) -> Iterator[Run]:
    """Long runs, and short ones between stretches of the same text, differently normalised."""
    stops = [(0, 0), *((i + length, j + length) for i, j, length in runs)]
    starts = [*((i, j) for i, j, _ in runs), (len(first), len(second))]
    for index, (i, j, length) in enumerate(runs):
        if length >= CERTAIN_RUN or all(
            _is_rewritten(
                first[stops[gap][0] : starts[gap][0]], second[stops[gap][1] : starts[gap][1]]
            )
            for gap in (index, index + 1)
        ):
            yield i, j, length


def _is_rewritten(first: Symbols, second: Symbols) -> bool:
    """Whether two stretches differ in normalisation, case, space or control tokens alone."""
    if max(len(first), len(second)) > 8 * CERTAIN_RUN:
        return False
    return _folded(first) == _folded(second)


def _folded(row: Symbols) -> str:
    text = "".join(chr(symbol) for symbol in row.tolist() if symbol <= MAX_CODE_POINT)
    folded = unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", text).casefold())
    return "".join(folded.split())


Ranges = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class SymbolRow:
    """Characters of a text and, where inserted, control tokens."""

    values: Symbols
    """[M] code points; a byte that is not UTF-8 is a lone surrogate, and a control token is the
    number of its class past the last code point."""

    widths: NDArray[np.int64]
    """[M] bytes of each; a control token has none."""

    @classmethod
    def of(cls, text: bytes) -> SymbolRow:
        """The characters of a text."""
        decoded = text.decode(errors="surrogateescape")
        values = np.frombuffer(decoded.encode("utf-32-le", "surrogatepass"), np.uint32)
        widths = 1 + (values >= 0x80) + (values >= 0x800).astype(np.int64) + (values >= 0x10000)
        widths[(values >= 0xDC80) & (values <= 0xDCFF)] = 1
        return cls(values, widths)

    @property
    def byte_count(self) -> int:
        """Bytes of the text."""
        return int(self.widths.sum())

    def with_control(
        self, tokens: Tokens, classes: NDArray[np.int32]
    ) -> tuple[SymbolRow, ByteEnds]:
        """The row with the control tokens that have a class, and the tokens' ends with it.

        Such a token then covers one byte, so that it differs from its neighbours. One that stands
        within a character is left out.

        Args:
            tokens: T tokens that decode to the text.
            classes: [V] class of each id.
        """
        starts = np.concatenate([np.zeros(1, np.int64), np.cumsum(self.widths)])
        begins = np.concatenate([np.zeros(1, np.int64), tokens.ends[:-1]])[: len(tokens.ends)]
        kind = classes[tokens.ids]
        is_written = (tokens.ends == begins) & (kind != NO_CLASS)
        places = starts.searchsorted(tokens.ends[is_written])
        stands_between = starts[places] == tokens.ends[is_written]
        is_written[np.flatnonzero(is_written)[~stands_between]] = False
        symbols = (kind[is_written].astype(np.int64) + MAX_CODE_POINT + 1).astype(np.uint32)
        places = places[stands_between]
        row = SymbolRow(np.insert(self.values, places, symbols), np.insert(self.widths, places, 0))
        return row, tokens.ends + np.cumsum(is_written)

    def ranges(self, runs: Sequence[Run], side: int, *, control_width: int = 0) -> Ranges:
        """[R, 2] bytes of each run; ``side`` 0 is the run's first row, 1 its second."""
        widths = np.where(self.values > MAX_CODE_POINT, control_width, self.widths)
        offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(widths)])
        table = np.array(runs, dtype=np.int64).reshape(-1, 3)
        return np.stack([offsets[table[:, side]], offsets[table[:, side] + table[:, 2]]], axis=1)
