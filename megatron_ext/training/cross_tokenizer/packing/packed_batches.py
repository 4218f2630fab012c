"""Batches of packed samples, read by worker processes, resumed at any sample."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from itertools import count
from typing import Any

from torch.utils.data import DataLoader, Sampler

from megatron_ext.errors import ConfigError, DataError
from megatron_ext.training.cross_tokenizer.packing.packed_dataset import (
    PackedBlock,
    PackedTextDataset,
)
from megatron_ext.training.cross_tokenizer.packing.position import Position
from megatron_ext.training.cross_tokenizer.packing.sample import PackedSample
from megatron_ext.training.cross_tokenizer.rows.batch import CrossTokenizerBatch


class PackedBatches:
    """What a training loop iterates over.

    Workers read, tokenize, align and pack blocks; batches are cut from their samples here, in
    order, so they do not depend on the number of workers. The blocks of an epoch are dealt out to
    the data-parallel ranks in turn: each sample is on one rank once an epoch. One epoch follows the
    other without end, and a batch may hold samples of two, so that every rank always has a next
    batch and a training loop ends by its steps.

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
        samples: list[PackedSample] = []
        for sample, position in self._samples():
            samples.append(sample)
            if len(samples) == self.batch_size:
                self._position = position
                yield self._batch(samples)
                samples = []
        if samples:
            self._position = position
            yield self._batch(samples)

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

    def _samples(self) -> Iterator[tuple[PackedSample, Position]]:
        """Each sample from the position on, and the position behind it."""
        start = self._position
        if self._loader_options["num_workers"]:
            self.dataset.collator.prepare()
        loader: DataLoader[PackedBlock] = DataLoader(
            self.dataset,
            batch_size=None,
            sampler=_Keys(self, start),
            **self._loader_options,
        )
        last_full = start.epoch - 1
        for (epoch, block), content in zip(self._keys(start), loader, strict=True):
            self.dropped_bytes += content.dropped_bytes
            if content.samples:
                last_full = epoch
            elif epoch - last_full > 1:
                raise self._nothing_fits()
            first = start.sample if (epoch, block) == (start.epoch, start.block) else 0
            for index, sample in enumerate(content.samples[first:], start=first + 1):
                yield sample, Position(epoch, block, index)
        if last_full < start.epoch and start == Position():
            raise self._nothing_fits()

    def _nothing_fits(self) -> DataError:
        return DataError(
            "no text fits the models' sequence lengths",
            got=f"{self.dataset.documents.report.bytes} bytes of text",
            fix="raise the lengths",
        )

    def _keys(self, start: Position) -> Iterator[tuple[int, int]]:
        """Epoch and block of this rank from a position on."""
        epochs = count(start.epoch) if self._epochs is None else range(start.epoch, self._epochs)
        for epoch in epochs:
            blocks = range(self._rank, self.dataset.block_count(epoch), self._world_size)
            first = start.block if epoch == start.epoch else 0
            yield from ((epoch, block) for block in range(first, len(blocks)))


class _Keys(Sampler[tuple[int, int]]):
    """Which blocks a loader reads."""

    def __init__(self, batches: PackedBatches, start: Position) -> None:
        self._batches = batches
        self._start = start

    def __iter__(self) -> Iterator[tuple[int, int]]:
        rank, step = self._batches._rank, self._batches._world_size
        for epoch, block in self._batches._keys(self._start):
            yield epoch, rank + block * step


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
