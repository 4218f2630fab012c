"""Bytes of one storage, and who wrote and read them last: accesses are held to the barriers."""

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
