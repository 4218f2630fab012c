"""Memory of a launch: accesses are held to its bounds and their alignment."""

import ctypes
from bisect import bisect_right
from collections.abc import Iterable, Iterator

import numpy as np

from tests.ptx.region import WORDS, AccessError, Clock, Region


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

    def _parts(
        self, address: np.ndarray, mask: np.ndarray | None, size: int
    ) -> Iterator[tuple[Region, np.ndarray]]:
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
        if high < region.end:
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

    def _mark(
        self, address: np.ndarray, mask: np.ndarray | None, size: int, is_under_way: bool
    ) -> None:
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
