"""One vocabulary in another order, cut into equally wide intervals. V tokens, Vp with padding."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import ArrayLike, NDArray

from megatron_ext.errors import ProjectionError

Ids = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class VocabularyOrder:
    """A permutation of the rows of a head. An *id* is the tokenizer's, a *place* the new row.

    Padding stays where megatron-core has it, behind all tokens, and every padding row is its own
    place: whatever knows of padding by ``place >= vocab_size`` is right in either order.

    Raises:
        ProjectionError: No permutation, tokens among the padding, or ranks that do not divide it.
    """

    ids: Ids
    """[Vp] the id at each place; read-only."""

    vocab_size: int
    """V"""

    rank_count: int
    """Tensor-parallel ranks; each owns ``width`` places in a row."""

    places: Ids = field(init=False)
    """[Vp] the place of each id: the inverse of ``ids``; read-only."""

    def __post_init__(self) -> None:
        ids = np.asarray(self.ids, dtype=np.int64).copy()
        size = len(ids)
        if self.rank_count < 1 or size % self.rank_count:
            raise ProjectionError(
                "a padded vocabulary does not divide over its ranks",
                got=f"{size} rows over {self.rank_count}",
                fix="pad it as megatron-core does, to a multiple of the tensor-parallel size",
            )
        places = np.full(size, -1, dtype=np.int64)
        if ids.size and ids.min() >= 0 and ids.max() < size:
            places[ids] = np.arange(size)
        padding = np.arange(self.vocab_size, size)
        if (places < 0).any() or not np.array_equal(ids[self.vocab_size :], padding):
            raise ProjectionError(
                "the order of a vocabulary is no permutation that leaves its padding in place",
                got=f"{size} rows, {int((places < 0).sum())} of them missing",
                expected=f"the ids below {self.vocab_size}, each once, and then the padding",
            )
        for name, array in (("ids", ids), ("places", places)):
            array.setflags(write=False)
            object.__setattr__(self, name, array)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, VocabularyOrder):
            return NotImplemented
        return (self.vocab_size, self.rank_count) == (
            other.vocab_size,
            other.rank_count,
        ) and np.array_equal(self.ids, other.ids)

    @classmethod
    def by_rank(
        cls, rank: ArrayLike, key: ArrayLike, *, padded_size: int, rank_count: int
    ) -> VocabularyOrder:
        """Tokens by their rank, on a rank by their key, and of equal keys by their id.

        Args:
            rank: [V]; as many tokens on each as ``capacities`` says.
            key: [V]
        """
        ranks, keys = np.asarray(rank), np.asarray(key)
        order = np.lexsort((np.arange(len(ranks)), keys, ranks))
        ids = np.concatenate([order, np.arange(len(ranks), padded_size)])
        return cls(ids=ids, vocab_size=len(ranks), rank_count=rank_count)

    @property
    def width(self) -> int:
        """Places on each rank, padding included."""
        return len(self.ids) // self.rank_count

    def rank_of(self, ids: ArrayLike) -> Ids:
        """The rank that holds each of ``ids``."""
        ranks: Ids = self.places[np.asarray(ids)] // max(self.width, 1)
        return ranks


def capacities(vocab_size: int, padded_size: int, rank_count: int) -> Ids:
    """[ranks] how many tokens each rank holds, since all padding is at the end."""
    width = padded_size // rank_count
    return np.clip(vocab_size - width * np.arange(rank_count), 0, width)
