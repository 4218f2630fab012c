"""Which documents a rank reads, in an order that can be resumed anywhere."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import Sampler

from megatron_ext.errors import ConfigError


class ResumableSampler(Sampler[int]):
    """What a ``DataLoader`` takes as ``sampler`` over a map-style data set.

    Epochs, each in an order of its own, follow one another and are dealt out to the ranks one by
    one: position ``p`` of the whole is ``rank``'s where ``p % world_size == rank``. So each item is
    on one rank once an epoch. All ranks have equally many: where the items of all epochs do not
    divide among them, the last ranks go on with the first items of the epoch after the last, fewer
    than there are ranks.

    The order is a function of the seed and of how many items were used. A loader asks for items
    ahead of their use, so the training loop says with ``advance`` what it has used.

    Args:
        size: Items of the data set.
        seed: Of the orders.
        shuffle: Otherwise items come in their order.
        rank: The data-parallel rank.
        world_size: Number of ranks.
        epochs: How often each item comes; without end with None.

    Raises:
        ConfigError: A value that cannot be used.
    """

    def __init__(
        self,
        size: int,
        *,
        seed: int = 1234,
        shuffle: bool = True,
        rank: int = 0,
        world_size: int = 1,
        epochs: int | None = None,
    ) -> None:
        for name, value, least in (("size", size, 1), ("seed", seed, 0)):
            if value < least:
                raise ConfigError(f"{name} is too small", got=value, expected=f">= {least}")
        if not 0 <= rank < world_size:
            raise ConfigError("there is no such rank", got=rank, expected=f"0 to {world_size - 1}")
        self._order = {"size": size, "seed": seed, "shuffle": shuffle, "world_size": world_size}
        self._rank = rank
        self._epochs = epochs
        self._used = 0

    def __iter__(self) -> Iterator[int]:
        """Items from the first on that was not used."""
        size, world_size = self._order["size"], self._order["world_size"]
        position = self._used * world_size + self._rank
        left = None if self._epochs is None else len(self)
        while left is None or left:
            epoch, first = divmod(position, size)
            items = self._epoch(epoch)[first::world_size][:left].tolist()
            yield from items
            position += len(items) * world_size
            left = None if left is None else left - len(items)

    def __len__(self) -> int:
        """Items that are left."""
        if self._epochs is None:
            raise TypeError("epochs without end have no length")
        each = -(-self._epochs * self._order["size"] // self._order["world_size"])
        return max(each - self._used, 0)

    def advance(self, count: int) -> None:
        """Note that ``count`` more items were used on this rank."""
        self._used += count

    def state_dict(self) -> dict[str, Any]:
        """Plain values to go on from; the same on all ranks that have used as many items."""
        return {"used": self._used, **self._order}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a state.

        With another number of ranks this goes on exactly where all of them have used as many items
        and that number of items divides among the new ones.

        Raises:
            ConfigError: It is of another order, or the items used do not divide.
        """
        for name in ("size", "seed", "shuffle"):
            if state.get(name) != self._order[name]:
                raise ConfigError(
                    f"the state of the data is of another {name}",
                    got=state.get(name),
                    expected=self._order[name],
                    fix="resume with the settings of the run, or begin anew",
                )
        used, rest = divmod(state["used"] * state["world_size"], self._order["world_size"])
        if rest:
            raise ConfigError(
                "the items that were used do not divide among the ranks",
                got=f"{state['used'] * state['world_size']} items",
                expected=f"a multiple of {self._order['world_size']}",
                fix="resume with the number of ranks of the run",
            )
        self._used = used

    def _epoch(self, epoch: int) -> NDArray[np.int64]:
        size = self._order["size"]
        if not self._order["shuffle"]:
            return np.arange(size)
        return np.random.default_rng((self._order["seed"], epoch)).permutation(size)
