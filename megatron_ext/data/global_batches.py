"""Global batches of a run, dealt to replicas and read ahead. S sources, G rows.

Checkpoints and counters describe the global batches that were taken: a resumed run reads again what
was only read ahead.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from typing import Any, Final, Generic, NamedTuple, TypeVar

from megatron_ext.data.aligner import PackedSample
from megatron_ext.data.packed_dataset import PackedTextDataset, RefusedDocument
from megatron_ext.data.reading_order import Blend, Position
from megatron_ext.data.row_streams import RowStreams, stream_count
from megatron_ext.errors import ConfigError, DataError


class WeightedDataset(NamedTuple):
    """A source of rows, and its weight in the blend."""

    weight: float
    dataset: PackedTextDataset

    paths: tuple[str, ...] = ()
    """Entries of the configuration that it is of."""


Positions = list[dict[int, tuple[int, int, int]]]
"""[S] next position of each of the streams of a replica; plain values."""


class Place(NamedTuple):
    """Position of a replica between two global batches; plain values."""

    iteration: int
    """Global batches taken."""

    counts: list[int]
    """[S] rows taken of each source, over all replicas."""

    positions: Positions


class DataFaults(NamedTuple):
    """What a replica has met in some of its documents, and of its workers."""

    refused: Sequence[RefusedDocument] = ()
    """Documents that were left out."""

    retokenized: int = 0
    """Documents that are stored as ids of the student's vocabulary and to which its tokenizer gives
    other ids."""

    restarts: int = 0
    """Restarts of the workers after one died."""


_NO_FAULTS: Final = DataFaults()


class Replica(NamedTuple):
    """Share of a data-parallel rank in each global batch."""

    rank: int
    size: int
    micro_batch_size: int

    def has(self, row: int) -> bool:
        """Whether a row is this replica's: microbatches are dealt round-robin."""
        return row // self.micro_batch_size % self.size == self.rank


class GlobalBatches:
    """The sequence of a run's global batches, from iteration 0 or from a saved state.

    A global batch is a function of the sources, the seed and its number, independent of replicas,
    microbatches and workers.

    Args:
        sources: Packed data sets with weights.
        global_batch_size: G.
        replica: This rank's share.
        seed: Seed of the blend.
        loader_options: ``num_workers`` and other ``DataLoader`` arguments, for each source.

    Attributes:
        iteration: Number of the next global batch, from 0.
    """

    def __init__(
        self,
        sources: Sequence[WeightedDataset],
        *,
        global_batch_size: int,
        replica: Replica,
        seed: int,
        **loader_options: Any,
    ) -> None:
        self.iteration = 0
        self._rows = range(global_batch_size)
        self._replica = replica
        self._blend = Blend(tuple(source.weight for source in sources), seed)
        self._counts = [0] * len(sources)
        self._stream_counts = [
            stream_count(source.dataset.block_count(0), global_batch_size) for source in sources
        ]
        self._streams = [
            RowStreams(
                source.dataset,
                stream_count=count,
                streams=sorted({row % count for row in self._rows if replica.has(row)}),
                **loader_options,
            )
            for source, count in zip(sources, self._stream_counts, strict=True)
        ]

    def take(self) -> list[list[PackedSample]]:
        """This replica's microbatches of the next global batch.

        Raises:
            DataError: A source has no sample, or a document cannot be read.
        """
        chosen, self._counts = self._blend.sources(self.iteration, self._counts, len(self._rows))
        samples = []
        for row, source in zip(self._rows, chosen.tolist(), strict=True):
            streams = self._streams[source]
            stream = row % self._stream_counts[source]
            if stream in streams.positions:
                # A stream may be shared with other replicas: skip their rows and their counts.
                refused_count, retokenized = len(streams.refused), streams.retokenized
                sample = streams.take(stream)
                if self._replica.has(row):
                    samples.append(replace(sample, source=source))
                else:
                    del streams.refused[refused_count:]
                    streams.retokenized = retokenized
        self.iteration += 1
        size = self._replica.micro_batch_size
        return [samples[start : start + size] for start in range(0, len(samples), size)]

    @property
    def waited(self) -> float:
        """Seconds spent waiting for samples."""
        return sum(streams.waited for streams in self._streams)

    @property
    def dropped_bytes(self) -> int:
        """Bytes read by this replica that are in no sample."""
        return sum(streams.dropped_bytes for streams in self._streams)

    def faults_since_asked(self) -> DataFaults:
        """What this replica has met since the last call."""
        faults = DataFaults(
            [document for streams in self._streams for document in streams.refused],
            sum(streams.retokenized for streams in self._streams),
            sum(streams.restarts for streams in self._streams),
        )
        for streams in self._streams:
            streams.refused, streams.retokenized, streams.restarts = [], 0, 0
        return faults

    def close(self) -> None:
        """End the workers."""
        for streams in self._streams:
            streams.close()

    def positions(self) -> Positions:
        """Those of this replica's streams, for ``state``."""
        return [
            {stream: astuple(position) for stream, position in streams.positions.items()}
            for streams in self._streams
        ]

    def place(self) -> Place:
        """The current position of this replica."""
        return Place(self.iteration, list(self._counts), self.positions())

    def state(self, everywhere: Sequence[Positions], *, at: Place | None = None) -> dict[str, Any]:
        """Plain values to resume from under any layout.

        Args:
            everywhere: ``positions`` of every replica.
            at: The place to save; None for the current one.
        """
        at = at or self.place()
        merged: Positions = [{} for _ in self._streams]
        for positions in everywhere:
            for source, streams in zip(merged, positions, strict=True):
                source.update(streams)
        return {
            "iteration": at.iteration,
            "counts": list(at.counts),
            "positions": [[list(source[stream]) for stream in sorted(source)] for source in merged],
            "identity": self._identity(),
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Resume from a ``state``.

        Raises:
            ConfigError: The state is of other data, another blend or another order.
        """
        for name, value in self._identity().items():
            before = state["identity"].get(name)
            if before != value:
                raise ConfigError(
                    f"the run was started with other data: {name}",
                    got=value,
                    expected=before,
                    fix="resume with the data of the run, or take another run_dir",
                )
        self.iteration = int(state["iteration"])
        self._counts = [int(count) for count in state["counts"]]
        for streams, positions in zip(self._streams, state["positions"], strict=True):
            streams.load_positions(
                {stream: Position(*place) for stream, place in enumerate(positions)}
            )

    def _identity(self) -> dict[str, Any]:
        return {
            "global_batch_size": len(self._rows),
            "weights": list(self._blend.weights),
            "seed": self._blend.seed,
            "sources": [dict(streams.dataset.identity) for streams in self._streams],
        }


Batch = TypeVar("Batch")


@dataclass(slots=True)
class _Read(Generic[Batch]):
    """One prepared global batch, with what was met in it."""

    batch: Batch | None
    """The prepared batch; None after ``error``."""

    place: Place
    """Position of the data after this batch."""

    faults: DataFaults = _NO_FAULTS
    error: DataError | None = None


class ReadAhead(Generic[Batch]):
    """Reader of global batches that keeps some ready before they are taken.

    Args:
        batches: The global batches.
        prepare: Function of this replica's microbatches of a global batch, called when it is read.
        depth: Global batches that are read ahead whenever one is taken; 0 for none.
        total: Global batches of the run, beyond which none is read; None for no end.
    """

    def __init__(
        self,
        batches: GlobalBatches,
        prepare: Callable[[list[list[PackedSample]]], Batch],
        *,
        depth: int = 0,
        total: int | None = None,
    ) -> None:
        self._batches = batches
        self._prepare = prepare
        self._depth = depth
        self._total = total
        self._ahead: deque[_Read[Batch]] = deque()
        self._taken: _Read[Batch] = _Read(None, batches.place())

    def take(self) -> Batch:
        """The next prepared global batch; reads further ahead.

        Raises:
            DataError: The batch cannot be read; raised when it is taken, not when it is read ahead.
        """
        if not self._ahead:
            self._ahead.append(self._read())
        self._taken = self._ahead.popleft()
        if self._taken.error is not None:
            raise self._taken.error
        while len(self._ahead) < self._depth and self._has_more():
            self._ahead.append(self._read())
        assert self._taken.batch is not None
        return self._taken.batch

    def read_next(self) -> None:
        """Read the batch behind those that ``take`` reads, for the next call to have it ready."""
        if len(self._ahead) <= self._depth and self._has_more():
            self._ahead.append(self._read())

    def ahead(self) -> list[tuple[int, Batch]]:
        """Iteration (from 1) and batch of those read ahead."""
        return [
            (read.place.iteration, read.batch) for read in self._ahead if read.batch is not None
        ]

    @property
    def iteration(self) -> int:
        """Global batches taken."""
        return self._taken.place.iteration

    @property
    def waited(self) -> float:
        """See ``GlobalBatches``; includes what was read ahead."""
        return self._batches.waited

    def faults_since_asked(self) -> DataFaults:
        """See ``GlobalBatches``, of the batch taken last; none on a second call."""
        faults, self._taken.faults = self._taken.faults, _NO_FAULTS
        return faults

    def positions(self) -> Positions:
        """See ``GlobalBatches``, behind the batch taken last."""
        return self._taken.place.positions

    def state(self, everywhere: Sequence[Positions]) -> dict[str, Any]:
        """See ``GlobalBatches``, behind the batch taken last."""
        return self._batches.state(everywhere, at=self._taken.place)

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Resume from a ``state``, discarding what was read ahead.

        Raises:
            ConfigError: The state is of other data, another blend or another order.
        """
        self._ahead.clear()
        self._batches.load_state(state)
        self._taken = _Read(None, self._batches.place())

    def close(self) -> None:
        """End the workers."""
        self._batches.close()

    def _has_more(self) -> bool:
        is_broken = bool(self._ahead) and self._ahead[-1].error is not None
        return not is_broken and (self._total is None or self._batches.iteration < self._total)

    def _read(self) -> _Read[Batch]:
        batches = self._batches
        try:
            samples = batches.take()
        except DataError as error:
            return _Read(None, batches.place(), error=error)
        return _Read(self._prepare(samples), batches.place(), batches.faults_since_asked())
