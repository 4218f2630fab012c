"""Weighted blends: the source of each row of a global batch. S sources, G rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatron_ext.errors import ConfigError


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
