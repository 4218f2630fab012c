"""Data of a training loop of one's own: batches of packed samples, and an order of documents."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import Sampler

from megatron_ext.data.aligner import PackedSample
from megatron_ext.data.batch import CrossTokenizerBatch
from megatron_ext.data.block_order import Position
from megatron_ext.data.packed_dataset import PackedTextDataset
from megatron_ext.data.row_streams import RowStreams
from megatron_ext.errors import ConfigError


class PackedBatches:
    """What a training loop iterates over.

    Each data-parallel rank reads the stream of its number in ``RowStreams`` with as many streams as
    ranks, and cuts batches from it: blocks are dealt out to the ranks in turn, each sample is on
    one rank once an epoch, and workers change nothing of it. One epoch follows the other without
    end, and a batch may hold samples of two, so that every rank always has a next batch and a
    training loop ends by its steps.

    With ``epochs`` the stream ends, and the last batch may be smaller. How many samples a block
    gives is known when it is packed, so several ranks end at different batches then; a loop whose
    ranks meet in each step would hang. That is refused unless ``ends_unevenly`` says that the loop
    can do with it.

    ``state_dict`` says which samples were handed out, whatever workers have read ahead.

    Args:
        dataset: The blocks.
        batch_size: Rows of a batch.
        rank: The data-parallel rank.
        world_size: Number of ranks.
        epochs: How often the corpus is read; without end with None.
        ends_unevenly: Allow ``epochs`` with several ranks.
        num_workers: Worker processes; 0 for none.
        loader_options: What a ``DataLoader`` takes besides: ``prefetch_factor``,
            ``multiprocessing_context``, ``persistent_workers``, ``timeout``.

    Attributes:
        dropped_bytes: Bytes of the blocks begun since this was made or resumed that are in no
            sample.

    Raises:
        ConfigError: A value that cannot be used, or a rank has no block.
    """

    def __init__(
        self,
        dataset: PackedTextDataset,
        batch_size: int,
        *,
        rank: int = 0,
        world_size: int = 1,
        epochs: int | None = None,
        ends_unevenly: bool = False,
        num_workers: int = 0,
        pin_memory: bool = False,
        **loader_options: Any,
    ) -> None:
        _check(batch_size, rank, world_size, dataset.block_count(0))
        if epochs is not None and world_size > 1 and not ends_unevenly:
            raise ConfigError(
                "ranks that read whole epochs end at different batches",
                got=f"epochs={epochs} on {world_size} ranks",
                fix="leave epochs out and end by steps, or set ends_unevenly where ranks agree on"
                " whether each has a batch",
            )
        self.dataset = dataset
        self.batch_size = batch_size
        self.dropped_bytes = 0
        self._rank, self._world_size, self._epochs = rank, world_size, epochs
        self._pins = pin_memory
        self._loader_options = {"num_workers": num_workers, **loader_options}
        self._position = Position()

    def __iter__(self) -> Iterator[CrossTokenizerBatch]:
        """Batches from where the last one that was handed out ended."""
        stream, start = self._rank, self._position
        streams = RowStreams(
            self.dataset,
            stream_count=self._world_size,
            streams=[stream],
            epochs=self._epochs,
            **self._loader_options,
        )
        streams.load_positions({stream: start})
        dropped_before = self.dropped_bytes
        samples: list[PackedSample] = []
        try:
            while streams.has_sample(stream):
                samples.append(streams.take(stream))
                self.dropped_bytes = dropped_before + streams.dropped_bytes
                if len(samples) == self.batch_size:
                    self._position = streams.positions[stream]
                    yield self._batch(samples)
                    samples = []
            self.dropped_bytes = dropped_before + streams.dropped_bytes
            if streams.positions[stream] == Position():
                raise streams.nothing_fits()
            if samples:
                self._position = streams.positions[stream]
                yield self._batch(samples)
        finally:
            streams.close()

    def state_dict(self) -> dict[str, Any]:
        """Plain values to go on from: behind the last batch that was handed out."""
        return {**asdict(self._position), **self._settings()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a state; the number of workers and the size of a batch may be others.

        Raises:
            ConfigError: It is of other data, another order, or another number of ranks.
        """
        for name, value in self._settings().items():
            if state.get(name) != value:
                raise ConfigError(
                    f"the state of the data is of another {name}",
                    got=state.get(name),
                    expected=value,
                    fix="resume with the settings of the run, or begin anew",
                )
        self._position = Position(*(state[name] for name in ("epoch", "block", "sample")))

    def _settings(self) -> dict[str, Any]:
        settings = {"rank": self._rank, "world_size": self._world_size}
        return settings | self.dataset.identity

    def _batch(self, samples: list[PackedSample]) -> CrossTokenizerBatch:
        batch = self.dataset.collator(samples)
        return batch.pin_memory() if self._pins else batch


def _check(batch_size: int, rank: int, world_size: int, block_count: int) -> None:
    if batch_size < 1:
        raise ConfigError("a batch has no row", got=batch_size, expected=">= 1", where="batch_size")
    if not 0 <= rank < world_size:
        raise ConfigError(
            "there is no such rank", got=rank, expected=f"0 to {world_size - 1}", where="rank"
        )
    if block_count < world_size:
        raise ConfigError(
            "there are fewer blocks of documents than ranks",
            got=f"{block_count} for {world_size} ranks",
            fix="lower block_bytes or run_documents",
        )


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
