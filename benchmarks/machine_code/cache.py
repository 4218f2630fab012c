"""A GPU's second cache as an address trace sees it, and the order in which programs touch it.

Memory is in granules of 64 sectors of 32 bytes. An access is a granule and a mask of its sectors;
sectors are found or fetched one by one, and forgotten by granules, the one that was touched least
recently first. A whole sector that is written is not fetched, and goes to memory when it is
forgotten. Programs run in turn, one granule each, as many at once as the GPU holds; one that waits
for others keeps its place.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

SECTOR: Final = 32
GRANULE: Final = 64 * SECTOR
"""Bytes."""

H200_CACHE: Final = 50 * 10**6
"""Bytes of the second cache of an H100 or H200, by the data sheet."""

Ints = NDArray[np.int64]
Masks = NDArray[np.uint64]


class Moved(NamedTuple):
    """Sectors that came from memory and that went there."""

    read: int
    written: int

    @property
    def bytes(self) -> int:
        """Both."""
        return SECTOR * (self.read + self.written)


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """Accesses [N] of the programs [P] of a launch, in the order in which they are started."""

    starts: Ints
    """[P + 1]: program p makes accesses ``starts[p]:starts[p + 1]``."""

    granule: Ints
    mask: Masks
    is_write: NDArray[np.bool_]

    residents: int
    """Programs that run at once."""

    arrivals: Ints | None = None
    """[P, 2]: the access before which a program adds 1 to a counter, and the counter, or -1."""

    waits: Ints | None = None
    """[P, 3]: the access before which it waits, for which counter, and for what number."""

    @property
    def touched(self) -> int:
        """Bytes of all accesses, as if there were no cache."""
        return SECTOR * int(np.bitwise_count(self.mask).sum())


class Cache:
    """A cache over memory of ``granules``; it keeps its content from one launch to the next."""

    def __init__(self, granules: int, capacity: int = H200_CACHE) -> None:
        self.valid, self.dirty = (np.zeros(granules, dtype=np.uint64) for _ in range(2))
        # A ring through one place more than there are granules: after it the most recent one,
        # before it the one to go.
        self.newer, self.older = (np.full(granules + 1, -1, dtype=np.int64) for _ in range(2))
        self.newer[-1] = self.older[-1] = granules
        self.sectors = np.zeros(1, dtype=np.int64)
        self.capacity = capacity // SECTOR

    def run(self, trace: Trace) -> Moved:
        """What a launch moves.

        Raises:
            ValueError: Its programs wait for one another for ever.
        """
        programs = len(trace.starts) - 1
        nothing = np.full((programs, 3), -1, dtype=np.int64)
        arrivals = nothing[:, :2] if trace.arrivals is None else trace.arrivals
        waits = nothing if trace.waits is None else trace.waits
        counters = np.zeros(1 + max(arrivals[:, 1].max(initial=0), 0), dtype=np.int64)
        read, written = _run(
            trace.starts,
            trace.granule,
            trace.mask,
            trace.is_write,
            np.int64(trace.residents),
            arrivals,
            waits,
            counters,
            self.valid,
            self.dirty,
            self.newer,
            self.older,
            self.sectors,
            np.int64(self.capacity),
        )
        if read < 0:
            raise ValueError("the programs of a launch wait for one another")
        return Moved(int(read), int(written))

    def flush(self) -> Moved:
        """Write what is not in memory yet."""
        written = int(np.bitwise_count(self.dirty).sum())
        self.dirty[:] = 0
        return Moved(0, written)


_jit: Any = njit(cache=True)


@_jit
def _count(mask: Any) -> Any:
    """Bits of a mask."""
    one, two, four = (
        np.uint64(0x5555555555555555),
        np.uint64(0x3333333333333333),
        np.uint64(0x0F0F0F0F0F0F0F0F),
    )
    mask = mask - ((mask >> np.uint64(1)) & one)
    mask = (mask & two) + ((mask >> np.uint64(2)) & two)
    mask = (mask + (mask >> np.uint64(4))) & four
    return np.int64((mask * np.uint64(0x0101010101010101)) >> np.uint64(56))


@_jit
def _touch(
    place: Any,
    mask: Any,
    is_write: Any,
    valid: Any,
    dirty: Any,
    newer: Any,
    older: Any,
    sectors: Any,
    capacity: Any,
) -> Any:
    """Sectors that one access reads from memory and writes there."""
    ring = len(valid)
    new = mask & ~valid[place]
    missing = _count(new)
    sectors[0] += missing
    valid[place] |= mask
    if is_write:
        dirty[place] |= mask
    if newer[place] >= 0:
        older[newer[place]] = older[place]
        newer[older[place]] = newer[place]
    newest = older[ring]
    older[place], newer[place] = newest, ring
    newer[newest] = place
    older[ring] = place
    written = 0
    while sectors[0] > capacity:
        oldest = newer[ring]
        newer[ring] = newer[oldest]
        older[newer[oldest]] = ring
        newer[oldest] = -1
        sectors[0] -= _count(valid[oldest])
        written += _count(dirty[oldest])
        valid[oldest] = np.uint64(0)
        dirty[oldest] = np.uint64(0)
    return (0 if is_write else missing), written


@_jit
def _run(
    starts: Any,
    granule: Any,
    mask: Any,
    is_write: Any,
    residents: Any,
    arrivals: Any,
    waits: Any,
    counters: Any,
    valid: Any,
    dirty: Any,
    newer: Any,
    older: Any,
    sectors: Any,
    capacity: Any,
) -> Any:
    programs = len(starts) - 1
    count = min(residents, programs)
    running = np.arange(count)
    places = starts[:count].copy()
    has_arrived = np.zeros(count, dtype=np.bool_)
    following, left = count, count
    read, written = 0, 0
    while left:
        has_moved = False
        for slot in range(count):
            program = running[slot]
            if program < 0:
                continue
            at = places[slot] - starts[program]
            if at == arrivals[program, 0] and not has_arrived[slot]:
                counters[arrivals[program, 1]] += 1
                has_arrived[slot] = True
                has_moved = True
            if at == waits[program, 0] and counters[waits[program, 1]] < waits[program, 2]:
                continue
            has_moved = True
            if places[slot] < starts[program + 1]:
                place = places[slot]
                found = _touch(
                    granule[place],
                    mask[place],
                    is_write[place],
                    valid,
                    dirty,
                    newer,
                    older,
                    sectors,
                    capacity,
                )
                read += found[0]
                written += found[1]
                places[slot] += 1
            elif following < programs:
                running[slot] = following
                has_arrived[slot] = False
                places[slot] = starts[following]
                following += 1
            else:
                running[slot] = -1
                left -= 1
        if not has_moved:
            return -1, -1
    return read, written
