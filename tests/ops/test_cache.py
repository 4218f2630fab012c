"""The cache of ``benchmarks/machine_code``: traces whose misses are known, and a plain one."""

from collections import OrderedDict

import numpy as np
import pytest

pytest.importorskip("numba")

from benchmarks.machine_code.cache import GRANULE, SECTOR, Cache, Moved, Trace

WHOLE = np.uint64(2**64 - 1)
SECTORS = GRANULE // SECTOR


def trace(programs, residents=1, **events):
    """Of lists of accesses ``(granule, mask, is_write)``."""
    accesses = [access for program in programs for access in program]
    granule, mask, is_write = zip(*accesses, strict=True)
    return Trace(
        starts=np.cumsum([0, *map(len, programs)]),
        granule=np.array(granule),
        mask=np.array(mask, dtype=np.uint64),
        is_write=np.array(is_write),
        residents=residents,
        **{name: np.array(event) for name, event in events.items()},
    )


def read(*granules):
    return [(granule, WHOLE, False) for granule in granules]


def written(*granules):
    return [(granule, WHOLE, True) for granule in granules]


def test_what_fits_is_read_once_and_what_does_not_each_time():
    twice = trace([read(*range(4), *range(4))])
    assert Cache(8, 4 * GRANULE).run(twice) == Moved(4 * SECTORS, 0)
    # The least recent one is the next that is needed.
    assert Cache(8, 3 * GRANULE).run(twice) == Moved(8 * SECTORS, 0)
    # Back and forth, what came last is still there.
    assert Cache(8, 3 * GRANULE).run(trace([read(0, 1, 2, 3, 3, 2, 1, 0)])).read == 5 * SECTORS
    assert twice.touched == 8 * GRANULE


def test_a_write_goes_to_memory_once_when_it_is_forgotten_and_fetches_nothing():
    cache = Cache(8, 2 * GRANULE)
    assert cache.run(trace([written(0, 0, 1)])) == Moved(0, 0)
    assert cache.run(trace([read(2)])) == Moved(SECTORS, SECTORS)
    assert cache.flush() == Moved(0, SECTORS)
    assert cache.flush() == Moved(0, 0)
    assert Moved(3, 2).bytes == 5 * SECTOR


def test_single_sectors_are_fetched():
    cache = Cache(2, GRANULE)
    assert cache.run(trace([[(0, 0b101, False), (0, 0b111, False)]])) == Moved(3, 0)


def test_programs_take_turns_and_what_one_read_the_next_finds():
    alone = trace([read(0, 1, 2), read(0, 1, 2)])
    assert Cache(3, 2 * GRANULE).run(alone).read == 6 * SECTORS
    together = trace([read(0, 1, 2), read(0, 1, 2)], residents=2)
    assert Cache(3, 2 * GRANULE).run(together).read == 3 * SECTORS


def test_a_program_waits_for_those_that_arrive():
    # The second reads what the first has written once that arrives.
    events = {"arrivals": [[2, 0], [-1, -1]], "waits": [[-1, -1, -1], [0, 0, 1]]}
    programs = [written(0, 1), read(0, 1)]
    assert Cache(2, 2 * GRANULE).run(trace(programs, 2, **events)).read == 0
    assert Cache(2, 2 * GRANULE).run(trace(programs, 2)).read == 0
    backwards = {"arrivals": [[-1, -1], [2, 0]], "waits": [[0, 0, 1], [-1, -1, -1]]}
    assert Cache(2, 2 * GRANULE).run(trace(programs, 2, **backwards)).read == 2 * SECTORS
    with pytest.raises(ValueError, match="wait for one another"):
        Cache(2, 2 * GRANULE).run(trace(programs, 1, **backwards))


def test_a_random_trace_moves_what_a_plain_cache_does():
    generator = np.random.default_rng(0)
    accesses = [
        (int(place), int(mask), bool(write))
        for place, mask, write in zip(
            generator.integers(0, 40, 3000),
            generator.integers(1, 2**63, 3000),
            generator.integers(0, 2, 3000),
            strict=True,
        )
    ]
    cache = Cache(40, 9 * GRANULE)
    moved, left = cache.run(trace([accesses])), cache.flush()
    valid: OrderedDict[int, tuple[int, int]] = OrderedDict()
    fetched = stored = 0
    for place, mask, write in accesses:
        held, dirty = valid.pop(place, (0, 0))
        fetched += 0 if write else (mask & ~held).bit_count()
        valid[place] = held | mask, dirty | (mask if write else 0)
        while sum(each[0].bit_count() for each in valid.values()) > 9 * SECTORS:
            stored += valid.popitem(last=False)[1][1].bit_count()
    stored += sum(dirty.bit_count() for _, dirty in valid.values())
    assert (moved.read, moved.written + left.written) == (fetched, stored)
