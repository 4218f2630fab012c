"""The order of documents and of sources. D documents, R runs, N blocks; S sources, G rows.

A corpus is read in blocks of documents, and a weighted blend takes each row of a global batch from
a source.

Shuffling has two levels so that documents read together lie together in their files: runs of
neighbouring documents are shuffled and grouped into blocks, and documents are shuffled within a
block. A block is packed as a whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatron_ext.errors import ConfigError


@dataclass(kw_only=True, frozen=True)
class BlockOrder:
    """The documents of each block as a pure function of epoch and block number.

    Raises:
        ConfigError: A value that cannot be used.
    """

    sizes: NDArray[np.int64] = field(repr=False)
    """[D] bytes of each document."""

    seed: int
    """Seed; each epoch has an order of its own."""

    shuffle: bool = True
    """Whether to shuffle; otherwise documents are read in file order."""

    run_documents: int = 64
    """Documents of a run of neighbours."""

    block_bytes: int = 1 << 22
    """Least bytes of a block, except for the last of an epoch."""

    def __post_init__(self) -> None:
        for name, least in (("seed", 0), ("run_documents", 1), ("block_bytes", 1)):
            value = getattr(self, name)
            if value < least:
                raise ConfigError(
                    "the value is too small", got=value, expected=f">= {least}", where=name
                )

    def block_count(self, epoch: int) -> int:
        """N, the number of blocks in an epoch."""
        return len(self._blocks(epoch)[1]) - 1

    def documents(self, epoch: int, block: int) -> NDArray[np.int64]:
        """The documents of a block, in order."""
        runs, bounds = self._blocks(epoch)
        starts = runs[bounds[block] : bounds[block + 1]] * self.run_documents
        numbers: NDArray[np.int64] = (starts[:, None] + np.arange(self.run_documents)).ravel()
        numbers = numbers[numbers < len(self.sizes)]
        return self.generator(epoch, block).permutation(numbers) if self.shuffle else numbers

    def generator(self, epoch: int, block: int) -> np.random.Generator:
        """Random generator of a block."""
        return np.random.default_rng((self.seed, epoch, 1 + block))

    def _blocks(self, epoch: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The runs [R] in the order of an epoch, and the bounds of the blocks in them [N + 1]."""
        if epoch not in self._epoch_cache:
            runs: NDArray[np.int64] = np.arange(len(self._run_bytes))
            if self.shuffle:
                runs = np.random.default_rng((self.seed, epoch, 0)).permutation(runs)
            read = np.cumsum(self._run_bytes[runs])
            # A block ends with the run that takes it over its size.
            bounds = [0]
            while bounds[-1] < len(runs):
                before = int(read[bounds[-1] - 1]) if bounds[-1] else 0
                stop = int(read.searchsorted(before + self.block_bytes)) + 1
                bounds.append(min(stop, len(runs)))
            for other in [*self._epoch_cache][:-1]:
                del self._epoch_cache[other]
            self._epoch_cache[epoch] = runs, np.array(bounds, np.int64)
        return self._epoch_cache[epoch]

    @cached_property
    def _run_bytes(self) -> NDArray[np.int64]:
        return np.add.reduceat(self.sizes, np.arange(0, len(self.sizes), self.run_documents))

    @cached_property
    def _epoch_cache(self) -> dict[int, tuple[NDArray[np.int64], NDArray[np.int64]]]:
        """Cache of the last two epochs asked for: streams end an epoch at different times."""
        return {}


@dataclass(frozen=True, slots=True)
class Position:
    """Position of the next sample in a stream."""

    epoch: int = 0

    block: int = 0
    """Index among the blocks of the stream in the epoch."""

    sample: int = 0
    """Index in the block."""


class Source(NamedTuple):
    """Files that share one weight."""

    weight: float
    paths: tuple[str, ...]


def read_blend(entries: Sequence[str], *, where: str) -> list[Source]:
    """Parse a list of paths, or Megatron's ``weight path weight path``, into sources.

    Args:
        entries: Paths alone, which form one source, or a weight before each path.
        where: Configuration key, for the error.

    Raises:
        ConfigError: Weights and paths do not alternate, or a weight is not positive.
    """
    if not any(_is_number(entry) for entry in entries):
        return [Source(1.0, tuple(entries))]
    weights, paths = entries[::2], entries[1::2]
    alternate = len(weights) == len(paths) and all(map(_is_number, weights))
    if not alternate or any(map(_is_number, paths)):
        raise ConfigError(
            "weights and paths do not alternate",
            got=" ".join(entries),
            expected="a weight before every path, or no weight at all",
            where=where,
        )
    sources = [Source(float(weight), (path,)) for weight, path in zip(weights, paths, strict=True)]
    for source in sources:
        if not 0 < source.weight < float("inf"):
            raise ConfigError(
                "a weight of the blend is not positive", got=source.weight, where=where
            )
    return sources


def _is_number(entry: str) -> bool:
    try:
        float(entry)
    except ValueError:
        return False
    return True


@dataclass(frozen=True)
class Blend:
    """Assigns rows to sources by weight, at all times within one row of the exact share.

    Args:
        weights: [S] positive weights of any sum.
        seed: Seed of the order within a global batch, so that rows change sources.
    """

    weights: tuple[float, ...]
    seed: int

    def sources(
        self, iteration: int, counts: Sequence[int], rows: int
    ) -> tuple[NDArray[np.int64], list[int]]:
        """The source [G] of each row of a global batch, and the counts [S] after it.

        Args:
            iteration: Number of the global batch, from 0.
            counts: [S] rows taken of each source before.
            rows: G.
        """
        shares = np.array(self.weights) / sum(self.weights)
        taken = np.array(counts, np.float64)
        chosen = np.empty(rows, np.int64)
        for row in range(rows):
            chosen[row] = np.argmax(shares * (taken.sum() + 1) - taken)
            taken[chosen[row]] += 1
        order = np.random.default_rng((self.seed, iteration, 7)).permutation(rows)
        return chosen[order], taken.astype(np.int64).tolist()
