"""Rows of a global batch, the same under every layout, resumed under any. V streams, G rows.

The blocks of a corpus are dealt out to V streams, each read in its own order without end. Row ``g``
of a global batch is the next sample of stream ``g % V``. How many streams there are follows from
the corpus and the size of a global batch alone, so what a global batch holds does not depend on how
many replicas share it; and a replica reads only the streams of its own rows, so no block is
tokenized by two as long as there are as many streams as rows.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

from torch.utils.data import DataLoader, Sampler

from megatron_ext.data.aligner import PackedSample
from megatron_ext.data.block_order import Position
from megatron_ext.data.packed_dataset import (
    BlockWorkers,
    DeadWorkerError,
    PackedBlock,
    PackedTextDataset,
    RefusedDocument,
)
from megatron_ext.errors import ConfigError, DataError

_EMPTY_EPOCHS: Final = 2
"""Epochs without a sample after which a stream is taken to have none."""

_RESTARTS: Final = 3
"""Times in a row that workers are started again before a block has come."""


def stream_count(block_count: int, global_batch_size: int) -> int:
    """V: the largest divisor of a global batch of which two fit into the blocks of an epoch.

    Every epoch cuts blocks anew and may have fewer of them; a stream must not be without.
    """
    most = max(block_count // 2, 1)
    divisors = (v for v in range(min(most, global_batch_size), 0, -1) if not global_batch_size % v)
    return next(divisors)


class RowStreams:
    """Samples of some of the V streams of a corpus, in the order of each.

    Args:
        dataset: The blocks.
        stream_count: V.
        streams: Which of them are read here.
        epochs: How often the corpus is read; without end with None.
        num_workers: Processes that read, tokenize, align and pack blocks; 0 for none.
        loader_options: What a ``DataLoader`` takes besides.

    Attributes:
        positions: Where each of the streams goes on, by its number.
        dropped_bytes: Bytes of the blocks read since this was made that are in no sample.
        refused: Documents that were left out, of the blocks whose first sample was taken; so it
            does not depend on how far blocks were read ahead, or read again.
        retokenized: How many documents the student reads as other ids than they are kept as, of
            the same blocks.
        restarts: How often workers were started again because one had died.
        waited: Seconds for which ``take`` had no sample at hand.
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
        self._asked: _Asked | None = None
        self._ready: dict[int, deque[_Ready]] = {}
        self._unannounced: dict[int, _Findings] = {}
        self._restarts_in_a_row = 0
        self._last_full: dict[int, int] = {}

    def load_positions(self, positions: Mapping[int, Position]) -> None:
        """Go on from ``positions``, which has every stream that is read here.

        Raises:
            ConfigError: One is missing.
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
        """Whether the epochs of a stream are not at their end; reads on to its next sample.

        Raises:
            DataError: The stream has none, a document cannot be read, or workers die each time
                that they are started.
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
        """The next sample of a stream, which ``has_sample``; see there for the errors."""
        has_sample = self.has_sample(stream)
        assert has_sample, f"the epochs of stream {stream} are at their end"
        taken = self._ready[stream].popleft()
        self.positions[stream] = taken.next_position
        self.refused += taken.findings.refused
        self.retokenized += taken.findings.retokenized
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
        self._asked = _Asked(self.dataset, self._stream_count, self._epochs, self.positions)
        self._ready = {stream: deque() for stream in self.positions}
        self._unannounced = {}
        self._last_full = {s: position.epoch - 1 for s, position in self.positions.items()}
        loader: DataLoader[PackedBlock] = DataLoader(
            self.dataset, batch_size=None, sampler=self._asked, **self._loader_options
        )
        self._blocks = BlockWorkers(loader) if loader.num_workers else iter(loader)

    def _read_block_or_restart(self) -> None:
        """Read a block; where a worker has died, start all of them again from ``positions``."""
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
            findings = self._unannounced.pop(stream, _Findings()).with_those_of(block)
            if fresh:
                fresh[0] = fresh[0]._replace(findings=findings)
            else:
                self._unannounced[stream] = findings
        self._ready[stream].extend(fresh)
        self._asked.note(stream, expected=expected, samples=len(fresh))
        if block.samples:
            self._last_full[stream] = start.epoch
        elif start.epoch - self._last_full[stream] > _EMPTY_EPOCHS:
            raise self.nothing_fits()

    def nothing_fits(self) -> DataError:
        """The error that no document gives a sample."""
        return DataError(
            "no text fits the models' sequence lengths",
            got=f"{self.dataset.documents.report.bytes} bytes of text",
            fix="raise the sequence lengths, which are seq_length in a run",
        )


class _Findings(NamedTuple):
    """What is to be said of the documents of blocks."""

    refused: tuple[RefusedDocument, ...] = ()
    retokenized: int = 0

    def with_those_of(self, block: PackedBlock) -> _Findings:
        return _Findings((*self.refused, *block.refused), self.retokenized + block.retokenized)


class _Ready(NamedTuple):
    """A sample that was read ahead."""

    sample: PackedSample

    next_position: Position
    """Where its stream goes on behind it."""

    findings: _Findings = _Findings()
    """What is said with it."""


class _Asked(Sampler[tuple[int, int]]):
    """Which block is read next: one of the stream that has the fewest samples waiting.

    Attributes:
        pending: Stream, first position and expected samples of each block that was asked for and
            not received.
        waiting: Samples of each stream that are there or were asked for, the latter by the size
            of the blocks before.
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
        """Whether a block is to be received yet."""
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
        """A block of ``stream`` has come, with so many samples."""
        self.waiting[stream] += samples - expected
        self._usual = max(1.0, samples)


class _Blocks(Iterator[tuple[Position, int]]):
    """The blocks of one stream from a position on, without end: where it is, and its number."""

    def __init__(
        self, dataset: PackedTextDataset, stream: int, stream_count: int, start: Position
    ) -> None:
        self._dataset = dataset
        self._stream, self._stream_count = stream, stream_count
        self._at = start

    @property
    def place(self) -> tuple[Position, int]:
        """What comes next."""
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
