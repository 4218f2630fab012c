"""Memory of a launch: every access is held to its bounds, its alignment and the barriers."""

import ctypes
from bisect import bisect_right
from collections.abc import Iterable
from typing import Final

import numpy as np

WORDS: Final = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
_MANY: Final = 63
"""In the place of a warp: several."""


class AccessError(RuntimeError):
    """An access that a GPU need not make as it was meant."""


class Clock:
    """Periods between barriers. A tag is 64 times the period, and the warp; 0 is before all."""

    def __init__(self, threads: int) -> None:
        self._warps = np.arange(threads, dtype=np.int32) // 32
        self.period = self.first = 0
        self.tags = self._warps

    def begin(self) -> None:
        """Begin a program."""
        self.wait()
        self.first = self.period

    def wait(self) -> None:
        """Have all threads wait for each other."""
        self.period += 64
        self.tags = self.period + self._warps


class Region:
    """Bytes at an address, and the tags of who wrote and read them last."""

    def __init__(self, base: int, held: np.ndarray, granule: int, clock: Clock, name: str) -> None:
        """``granule``: bytes that share a tag."""
        self.base, self.end, self.name = base, base + len(held), name
        self.held, self._granule, self._clock = held, granule, clock
        self._views = {}
        for size, word in WORDS.items():
            skipped = -base % size
            count = max(0, len(held) - skipped) // size
            words = held[skipped : skipped + count * size].view(word)
            self._views[size] = words, (base + skipped) // size
        granules = (self.end + granule - 1) // granule - base // granule
        self._writer = np.zeros(granules, np.int32)
        self._reader = np.zeros(granules, np.int32)

    def forget(self) -> None:
        """Begin anew: nothing was written, nothing read."""
        self.held.fill(0xFF)
        self._writer.fill(0)
        self._reader.fill(0)

    def read(
        self, address: np.ndarray, size: int, count: int, tags: np.ndarray
    ) -> list[np.ndarray]:
        """``count`` words of ``size`` bytes at each address."""
        granules, mine = self._granules(address, size * count, tags)
        self._compare(self._writer[granules], mine, "reads what was written")
        before = self._reader[granules]
        self._reader[granules] = mine
        others = (before >= self._clock.period) & (before != mine)
        many = others | (self._reader[granules] != mine)
        if many.any():
            self._reader[granules[many]] = self._clock.period + _MANY
        words, first = self._views[size]
        index = (address // size).astype(np.int64) - first
        return [words[index + k] for k in range(count)]

    def write(self, address: np.ndarray, values: list[np.ndarray], tags: np.ndarray) -> None:
        """Write words, one after the other, at each address."""
        size = values[0].dtype.itemsize
        self.check_write(address, size * len(values), tags)
        granules, mine = self._granules(address, size * len(values), tags)
        self._writer[granules] = mine
        words, first = self._views[size]
        index = (address // size).astype(np.int64) - first
        for k, value in enumerate(values):
            words[index + k] = value
            if (words[index + k] != value).any():
                self._settle(words, index + k, value, tags)

    def _settle(
        self, words: np.ndarray, index: np.ndarray, value: np.ndarray, tags: np.ndarray
    ) -> None:
        """Let the last lane of a warp win where others write another value, as they do where a sum
        is fused with a product of one's own; raise AccessError where warps then differ."""
        for tag in np.unique(tags):
            before = words[index]
            mine = tags == tag
            words[index[mine]] = value[mine]
            if (words[index] != before).any():
                raise AccessError(f"warps write different values to one place of {self.name}")

    def check_write(self, address: np.ndarray, size: int, tags: np.ndarray) -> None:
        """Raise AccessError where a write is not ordered with what was read or written before."""
        granules, mine = self._granules(address, size, tags)
        self._compare(self._writer[granules], mine, "writes what was written")
        self._compare(self._reader[granules], mine, "writes what was read")

    def update(self, address: np.ndarray, value: np.ndarray, operation: np.ufunc) -> np.ndarray:
        """What was there before each thread's atomic update, in the order of threads."""
        words, first = self._views[value.dtype.itemsize]
        index = (address // value.dtype.itemsize).astype(np.int64) - first
        before = np.empty_like(value)
        for thread, place in enumerate(index):
            before[thread] = words[place]
            words[place] = operation(words[place], value[thread])
        return before

    def _granules(
        self, address: np.ndarray, size: int, tags: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        start = (address // self._granule).astype(np.int64) - self.base // self._granule
        if size <= self._granule:
            return start, tags
        granules = start[:, None] + np.arange(size // self._granule)
        return granules, np.broadcast_to(tags[:, None], granules.shape)

    def _compare(self, held: np.ndarray, mine: np.ndarray, what: str) -> None:
        clock = self._clock
        bad = (held >= clock.period) & (held != mine)
        if bad.any():
            raise AccessError(f"a warp {what} by another, without a barrier, in {self.name}")
        bad = (held != 0) & (held < clock.first)
        if bad.any():
            raise AccessError(f"a program {what} by another, in {self.name}")


class Memory:
    """Regions by address."""

    def __init__(self, regions: Iterable[Region], clock: Clock) -> None:
        self._regions = sorted(regions, key=lambda region: region.base)
        self._bases = [region.base for region in self._regions]
        self._clock = clock

    def load(self, address: np.ndarray, mask: np.ndarray | None, size: int, count: int) -> list:
        """Words at each address; 0 where the mask has none."""
        if mask is None or mask.all():
            region = self._region(address, size * count)
            if region is not None:
                return region.read(address, size, count, self._clock.tags)
        out = [np.zeros(len(address), WORDS[size]) for _ in range(count)]
        for region, threads in self._parts(address, mask, size * count):
            found = region.read(address[threads], size, count, self._clock.tags[threads])
            for whole, part in zip(out, found, strict=True):
                whole[threads] = part
        return out

    def store(self, address: np.ndarray, mask: np.ndarray | None, values: list) -> None:
        """Store words at each address that the mask has."""
        size = values[0].dtype.itemsize * len(values)
        for region, threads in self._parts(address, mask, size):
            given = [np.broadcast_to(value, address.shape)[threads] for value in values]
            region.write(address[threads], given, self._clock.tags[threads])

    def update(
        self, address: np.ndarray, mask: np.ndarray | None, value: np.ndarray, how: np.ufunc
    ) -> np.ndarray:
        """What an atomic operation finds at each address; 0 where the mask has none."""
        value = np.broadcast_to(value, address.shape)
        out = np.zeros_like(value)
        for region, threads in self._parts(address, mask, value.dtype.itemsize):
            out[threads] = region.update(address[threads], value[threads], how)
        return out

    def check_store(self, address: np.ndarray, mask: np.ndarray | None, size: int) -> None:
        """Raise AccessError where ``store`` would."""
        for region, threads in self._parts(address, mask, size):
            region.check_write(address[threads], size, self._clock.tags[threads])

    def _parts(self, address: np.ndarray, mask: np.ndarray | None, size: int):
        """Regions, with the numbers of the threads whose access is there."""
        threads = np.arange(len(address)) if mask is None else np.flatnonzero(mask)
        while len(threads):
            chosen = address[threads]
            region = self._region(chosen, size)
            if region is not None:
                yield region, threads
                return
            region = self._regions[bisect_right(self._bases, int(chosen[0])) - 1]
            here = (chosen >= region.base) & (chosen < region.end)
            self._region(chosen[here], size)
            yield region, threads[here]
            threads = threads[~here]

    def _region(self, address: np.ndarray, size: int) -> Region | None:
        """The region that holds all of an access, None where it goes to several."""
        low, high = int(address.min()), int(address.max())
        if (address & address.dtype.type(size - 1)).any():
            raise AccessError(f"an access of {size} bytes is not aligned")
        number = bisect_right(self._bases, low) - 1
        if number < 0 or low >= self._regions[number].end:
            raise AccessError(f"an access of {size} bytes at {low:#x} is outside of every tensor")
        region = self._regions[number]
        if high + size <= region.end:
            return region
        if high < region.end or len(address[address < region.end]) == len(address):
            raise AccessError(f"an access of {size} bytes ends behind {region.name}")
        return None


class SharedMemory(Memory):
    """Shared memory of a program, and the copies to it that are under way."""

    def __init__(self, size: int, granule: int, clock: Clock) -> None:
        self._whole = Region(0, np.zeros(size, np.uint8), granule, clock, "shared memory")
        super().__init__([self._whole], clock)
        self._pending = np.zeros(size + 16, np.bool_)
        self.begin()

    def begin(self) -> None:
        """Begin a program: nothing is left of the last."""
        self._whole.forget()
        self._groups: list[list] = [[]]
        self._pending.fill(False)

    def load(self, address: np.ndarray, mask: np.ndarray | None, size: int, count: int) -> list:
        self._refuse_pending(address, mask, size * count)
        return super().load(address, mask, size, count)

    def store(self, address: np.ndarray, mask: np.ndarray | None, values: list) -> None:
        self._refuse_pending(address, mask, values[0].dtype.itemsize * len(values))
        super().store(address, mask, values)

    def copy(self, address: np.ndarray, mask: np.ndarray | None, values: list) -> None:
        """Begin to copy words, which arrive as late as they may."""
        size = values[0].dtype.itemsize * len(values)
        self._refuse_pending(address, mask, size)
        self.check_store(address, mask, size)
        self._mark(address, mask, size, True)
        self._groups[-1].append((address, mask, values))

    def commit(self) -> None:
        """Make a group of the copies since the last."""
        self._groups.append([])

    def arrive(self, left: int) -> None:
        """Wait for all groups but the last ``left``."""
        while len(self._groups) > left + 1:
            for address, mask, values in self._groups.pop(0):
                self._mark(address, mask, values[0].dtype.itemsize * len(values), False)
                super().store(address, mask, values)

    def _mark(self, address: np.ndarray, mask: np.ndarray | None, size: int, is_under_way: bool):
        chosen = address if mask is None else address[mask]
        self._pending[chosen[:, None] + np.arange(size, dtype=np.uint32)] = is_under_way

    def _refuse_pending(self, address: np.ndarray, mask: np.ndarray | None, size: int) -> None:
        if len(self._groups) == 1 and not self._groups[0]:
            return
        chosen = address if mask is None else address[mask]
        for byte in (0, size - 1):
            place = np.minimum(chosen + np.uint32(byte), len(self._pending) - 1)
            if self._pending[place].any():
                raise AccessError("shared memory is used while a copy to it is under way")


def bytes_at(address: int, size: int) -> np.ndarray:
    """Memory of this process."""
    return np.frombuffer((ctypes.c_uint8 * size).from_address(address), np.uint8)
