"""Batches of packed samples and a resumable sampler, for training loops of one's own."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import Sampler

from megatron_ext.data.aligner import PackedSample
from megatron_ext.data.batch import CrossTokenizerBatch
from megatron_ext.data.packed_dataset import PackedTextDataset
from megatron_ext.data.reading_order import Position
from megatron_ext.data.row_streams import RowStreams
from megatron_ext.errors import ConfigError


class PackedBatches:
    """Endless, resumable iterable of batches for a training loop.

    Each data-parallel rank reads one of ``world_size`` streams of ``RowStreams``: blocks are dealt
    round-robin to the ranks, and each sample is on one rank once an epoch, whatever the workers.
    Epochs follow one another without end, and a batch may span two, so that every rank always has
    a next batch and the training loop ends by its steps.

    With ``epochs`` the stream ends, and the last batch may be smaller. The number of samples of a
    block is known only once it is packed, so ranks end at different batches, and a loop with
    collectives in each step would hang; ``ends_unevenly`` declares that the loop allows for it.

    ``state_dict`` covers the samples that were yielded, whatever workers have read ahead.

    Args:
        dataset: The blocks.
        batch_size: Rows of a batch.
        rank: The data-parallel rank.
        world_size: Number of ranks.
        epochs: Number of epochs; None for no end.
        ends_unevenly: Allow ``epochs`` with several ranks.
        num_workers: Worker processes; 0 for none.
        loader_options: Other ``DataLoader`` arguments: ``prefetch_factor``,
            ``multiprocessing_context``, ``persistent_workers``, ``timeout``.

    Attributes:
        dropped_bytes: Bytes, in blocks begun since construction or resumption, that are in no
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
        """Batches from the end of the last one yielded."""
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
        """Plain values to resume from, after the last batch yielded."""
        return {**asdict(self._position), **self._settings()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from a state; the number of workers and the batch size may differ.

        Raises:
            ConfigError: The state is of other data, another order, or another number of ranks.
        """
        _check_state(state, self._settings())
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
    _check_rank(rank, world_size)
    if block_count < world_size:
        raise ConfigError(
            "there are fewer blocks of documents than ranks",
            got=f"{block_count} for {world_size} ranks",
            fix="lower block_bytes or run_documents",
        )


def _check_rank(rank: int, world_size: int) -> None:
    if not 0 <= rank < world_size:
        raise ConfigError(
            "there is no such rank", got=rank, expected=f"0 to {world_size - 1}", where="rank"
        )


def _check_state(state: dict[str, Any], expected: dict[str, Any]) -> None:
    """Check that a state is of data with these settings."""
    for name, value in expected.items():
        if state.get(name) != value:
            raise ConfigError(
                f"the state of the data is of another {name}",
                got=state.get(name),
                expected=value,
                fix="resume with the settings of the run, or begin anew",
            )


class ResumableSampler(Sampler[int]):
    """Resumable ``sampler`` of a ``DataLoader`` over a map-style data set.

    The epochs, each in its own order, are concatenated and dealt round-robin: position ``p`` is
    ``rank``'s if ``p % world_size == rank``, so each item is on one rank once an epoch. All ranks
    get equally many items: if the total does not divide, the last ranks take the first items (fewer
    than ``world_size``) of the epoch after the last.

    The order is a function of the seed and the number of items used. Because a loader fetches items
    ahead of their use, the training loop reports used items with ``advance``.

    Args:
        size: Items of the data set.
        seed: Seed of the orders.
        shuffle: Whether to shuffle; otherwise items come in order.
        rank: The data-parallel rank.
        world_size: Number of ranks.
        epochs: Number of epochs; None for no end.

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
        _check_rank(rank, world_size)
        self._order = {"size": size, "seed": seed, "shuffle": shuffle, "world_size": world_size}
        self._rank = rank
        self._epochs = epochs
        self._used = 0

    def __iter__(self) -> Iterator[int]:
        """Indices from the first unused item on."""
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
        """Number of items left."""
        if self._epochs is None:
            raise TypeError("epochs without end have no length")
        each = -(-self._epochs * self._order["size"] // self._order["world_size"])
        return max(each - self._used, 0)

    def advance(self, count: int) -> None:
        """Record that this rank has used ``count`` more items."""
        self._used += count

    def state_dict(self) -> dict[str, Any]:
        """Plain values to resume from; equal on all ranks that have used as many items."""
        return {"used": self._used, **self._order}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from a state.

        The number of ranks may change if all ranks had used as many items and the total divides
        among the new ranks.

        Raises:
            ConfigError: The state is of another order, or the items used do not divide.
        """
        _check_state(state, {name: self._order[name] for name in ("size", "seed", "shuffle")})
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
