"""``RowStreams``: rows of global batches, resumable under any layout. V streams, G rows.

The blocks of a corpus are dealt to V streams, each read in its own order without end. Row ``g`` of
a global batch is the next sample of stream ``g % V``. V follows from the corpus and the global
batch size alone, so the contents of a global batch do not depend on the number of replicas; and a
replica reads only the streams of its own rows, so no block is tokenized twice, provided that there
are as many streams as rows.
"""

from __future__ import annotations

import signal
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

from torch.utils.data import DataLoader, Sampler

from megatron_ext.data.aligner import PackedSample
from megatron_ext.data.packed_dataset import (
    BlockWorkers,
    DeadWorkerError,
    PackedBlock,
    PackedTextDataset,
    RefusedDocument,
)
from megatron_ext.data.reading_order import Position
from megatron_ext.errors import ConfigError, DataError
from megatron_ext.files import die_with_parent

_EMPTY_EPOCHS: Final = 2
"""Epochs without a sample after which a stream counts as empty."""

_RESTARTS: Final = 3
"""Most consecutive restarts of the workers without a block."""


def stream_count(block_count: int, global_batch_size: int) -> int:
    """V, the largest divisor of the global batch size up to half the blocks of an epoch.

    The margin of two blocks a stream is needed because every epoch forms its own number of blocks.
    """
    most = max(block_count // 2, 1)
    divisors = (v for v in range(min(most, global_batch_size), 0, -1) if not global_batch_size % v)
    return next(divisors)


class RowStreams:
    """Reader of some of the V streams of a corpus, each in its order.

    Args:
        dataset: The blocks.
        stream_count: V.
        streams: Numbers of the streams that are read here.
        epochs: Number of epochs; None for no end.
        num_workers: Worker processes that read, tokenize, align and pack blocks; 0 for none.
        loader_options: Other ``DataLoader`` arguments.

    Attributes:
        positions: Next position of each stream, by number.
        dropped_bytes: Bytes in no sample, of the blocks read since construction.
        refused: Documents left out of the blocks whose first sample was taken, so that the list
            does not depend on reading ahead or on restarts.
        retokenized: Documents of the same blocks whose stored ids differ from the student's.
        restarts: Restarts of the workers after one died.
        waited: Seconds that ``take`` spent waiting.
    """

    def __init__(
        self,
        dataset: PackedTextDataset,
        *,
        stream_count: int,
        streams: Sequence[int],
        epochs: int | None = None,
        num_workers: int = 0,
        **loader_options: Any,
    ) -> None:
        self.dataset = dataset
        self.positions = dict.fromkeys(streams, Position())
        self.dropped_bytes = 0
        self.refused: list[RefusedDocument] = []
        self.retokenized = 0
        self.restarts = 0
        self.waited = 0.0
        self._stream_count, self._epochs = stream_count, epochs
        self._loader_options = {"num_workers": num_workers, **loader_options}
        self._blocks: Iterator[PackedBlock] | None = None
        self._asked: _BlockSampler | None = None
        self._ready: dict[int, deque[_Ready]] = {}
        self._unreported: dict[int, _DocumentCounts] = {}
        self._restarts_in_a_row = 0
        self._last_full: dict[int, int] = {}

    def load_positions(self, positions: Mapping[int, Position]) -> None:
        """Resume from ``positions``, which must have every stream that is read here.

        Raises:
            ConfigError: A stream is missing.
        """
        missing = self.positions.keys() - positions.keys()
        if missing:
            raise ConfigError(
                "the state of the data lacks streams",
                got=f"{len(positions)} streams",
                expected=f"stream {min(missing)} too",
                fix="resume with the data and the global batch size of the run",
            )
        self.close()
        self.positions = {stream: positions[stream] for stream in self.positions}

    def has_sample(self, stream: int) -> bool:
        """Whether a stream has a next sample, which is read.

        Raises:
            DataError: No document fits a row, a document cannot be read, or workers die at every
                restart.
        """
        if self._blocks is None:
            self._open()
        assert self._asked is not None
        if not self._ready[stream]:
            started = time.perf_counter()
            while not self._ready[stream] and self._asked.has_blocks:
                self._read_block_or_restart()
            self.waited += time.perf_counter() - started
        return bool(self._ready[stream])

    def take(self, stream: int) -> PackedSample:
        """The next sample of a stream; ``has_sample`` must hold, and raises the same errors."""
        has_sample = self.has_sample(stream)
        assert has_sample, f"the epochs of stream {stream} are at their end"
        taken = self._ready[stream].popleft()
        self.positions[stream] = taken.next_position
        self.refused += taken.counts.refused
        self.retokenized += taken.counts.retokenized
        assert self._asked is not None
        self._asked.waiting[stream] -= 1
        return taken.sample

    def close(self) -> None:
        """End the workers; the next ``take`` starts them again from ``positions``."""
        if isinstance(self._blocks, BlockWorkers):
            self._blocks.close()
        self._blocks = None
        self._ready = {}

    def _open(self) -> None:
        if self._loader_options["num_workers"]:
            self.dataset.collator.prepare()
        self._asked = _BlockSampler(self.dataset, self._stream_count, self._epochs, self.positions)
        self._ready = {stream: deque() for stream in self.positions}
        self._unreported = {}
        self._last_full = {s: position.epoch - 1 for s, position in self.positions.items()}
        loader: DataLoader[PackedBlock] = DataLoader(
            self.dataset,
            batch_size=None,
            sampler=self._asked,
            worker_init_fn=_begin_worker,
            **self._loader_options,
        )
        self._blocks = BlockWorkers(loader) if loader.num_workers else iter(loader)

    def _read_block_or_restart(self) -> None:
        """Read a block; if a worker has died, restart all from ``positions``."""
        try:
            self._read_block()
        except DeadWorkerError as error:
            self.close()
            if self._restarts_in_a_row == _RESTARTS:
                raise DataError(
                    "the workers that read the data die each time that they are started",
                    got=f"{error}, after {_RESTARTS} starts without a block",
                    fix="look for a lack of memory; data.num_workers 0 reads without them",
                ) from error
            self.restarts += 1
            self._restarts_in_a_row += 1
            self._open()
        else:
            self._restarts_in_a_row = 0

    def _read_block(self) -> None:
        assert self._blocks is not None
        assert self._asked is not None
        block = next(self._blocks)
        stream, start, expected = self._asked.pending.popleft()
        self.dropped_bytes += block.dropped_bytes
        fresh = [
            _Ready(sample, Position(start.epoch, start.block, number))
            for number, sample in enumerate(block.samples, start=1)
        ][start.sample :]
        if not start.sample:
            counts = self._unreported.pop(stream, _DocumentCounts()).with_those_of(block)
            if fresh:
                fresh[0] = fresh[0]._replace(counts=counts)
            else:
                self._unreported[stream] = counts
        self._ready[stream].extend(fresh)
        self._asked.note(stream, expected=expected, samples=len(fresh))
        if block.samples:
            self._last_full[stream] = start.epoch
        elif start.epoch - self._last_full[stream] > _EMPTY_EPOCHS:
            raise self.nothing_fits(block.refused)

    def nothing_fits(self, refused: Sequence[RefusedDocument] = ()) -> DataError:
        """The error of a corpus in which no document fits a row, or all are left out.

        Args:
            refused: Some of those that are left out.
        """
        if refused:
            first = refused[0]
            return DataError(
                "no document of the data can be used",
                got=f"{first.place}: {first.reason}" + (", and so on" if refused[1:] else ""),
            )
        return DataError(
            "no text fits the models' sequence lengths",
            got=f"{self.dataset.documents.report.bytes} bytes of text",
            fix="raise the sequence lengths, which are seq_length in a run",
        )


class _DocumentCounts(NamedTuple):
    """Refused and retokenized documents, reported with the next sample."""

    refused: tuple[RefusedDocument, ...] = ()
    retokenized: int = 0

    def with_those_of(self, block: PackedBlock) -> _DocumentCounts:
        return _DocumentCounts(
            (*self.refused, *block.refused), self.retokenized + block.retokenized
        )


class _Ready(NamedTuple):
    """A sample read ahead."""

    sample: PackedSample

    next_position: Position
    """Position of the stream after this sample."""

    counts: _DocumentCounts = _DocumentCounts()
    """Counts reported when the sample is taken."""


def _begin_worker(index: int) -> None:
    """Leave an interrupt of the terminal to the run, and end with the process that started it."""
    # A fork server that somebody else has started gives it no blocked signals.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    die_with_parent()


class _BlockSampler(Sampler[tuple[int, int]]):
    """Sampler of block keys: the next block is of the stream with the fewest samples waiting.

    Attributes:
        pending: Stream, first position and expected samples of each block requested but not yet
            received.
        waiting: Samples of each stream that were received or are expected; the latter are estimated
            by the samples of the block received last.
    """

    def __init__(
        self,
        dataset: PackedTextDataset,
        stream_count: int,
        epochs: int | None,
        positions: Mapping[int, Position],
    ) -> None:
        self.pending: deque[tuple[int, Position, float]] = deque()
        self.waiting = dict.fromkeys(positions, 0.0)
        self._epochs = epochs
        self._next = {s: _Blocks(dataset, s, stream_count, p) for s, p in positions.items()}
        self._usual = 1.0

    @property
    def has_blocks(self) -> bool:
        """Whether more blocks are to be received."""
        return bool(self.pending) or any(map(self._goes_on, self._next))

    def _goes_on(self, stream: int) -> bool:
        return self._epochs is None or self._next[stream].place[0].epoch < self._epochs

    def __iter__(self) -> Iterator[tuple[int, int]]:
        while going_on := [stream for stream in self.waiting if self._goes_on(stream)]:
            stream = min(going_on, key=self.waiting.__getitem__)
            position, block = next(self._next[stream])
            self.pending.append((stream, position, self._usual))
            self.waiting[stream] += self._usual
            yield position.epoch, block

    def note(self, stream: int, *, expected: float, samples: int) -> None:
        """Correct ``waiting`` of ``stream`` for a received block."""
        self.waiting[stream] += samples - expected
        self._usual = max(1.0, samples)


class _Blocks(Iterator[tuple[Position, int]]):
    """Endless (position, block number) pairs of one stream, from a position on."""

    def __init__(
        self, dataset: PackedTextDataset, stream: int, stream_count: int, start: Position
    ) -> None:
        self._dataset = dataset
        self._stream, self._stream_count = stream, stream_count
        self._at = start

    @property
    def place(self) -> tuple[Position, int]:
        """Position and number of the next block."""
        at = self._at
        block = self._stream + at.block * self._stream_count
        while block >= self._dataset.block_count(at.epoch):
            at = Position(at.epoch + 1)
            block = self._stream
        return at, block

    def __next__(self) -> tuple[Position, int]:
        at, block = self.place
        self._at = Position(at.epoch, at.block + 1)
        return at, block
