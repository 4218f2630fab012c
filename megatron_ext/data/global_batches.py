"""Global batches, one after the other; each replica has its microbatches. S sources, G rows.

Global batches that are read ahead of the one that is trained on, and a state that is not ahead.

What a checkpoint keeps, and what is counted, is of the global batches that were taken: a run that
is resumed reads again what was only read ahead.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass, field
from typing import Any, Generic, NamedTuple, TypeVar

from megatron_ext.data.aligner import PackedSample
from megatron_ext.data.blend import Blend
from megatron_ext.data.block_order import Position
from megatron_ext.data.packed_dataset import PackedTextDataset, RefusedDocument
from megatron_ext.data.row_streams import RowStreams, stream_count
from megatron_ext.errors import ConfigError, DataError


class WeightedDataset(NamedTuple):
    """A source of rows."""

    weight: float
    dataset: PackedTextDataset


class Place(NamedTuple):
    """Behind one global batch of a replica; plain values."""

    iteration: int
    """Global batches before."""

    counts: list[int]
    """[S] rows taken of each source, over all replicas."""

    positions: list[dict[int, tuple[int, int, int]]]
    """[S] where this replica's streams go on."""


class Replica(NamedTuple):
    """Which rows of a global batch a data-parallel rank has."""

    rank: int
    size: int
    micro_batch_size: int

    def has(self, row: int) -> bool:
        """Whether a row is this replica's: microbatches are dealt out in turn."""
        return row // self.micro_batch_size % self.size == self.rank


class GlobalBatches:
    """What a run trains on, from iteration 0 or from a state.

    A global batch is a function of the sources, the seed and its number: neither the replicas, the
    microbatches nor the workers change it.

    Args:
        sources: Their samples, with weights.
        global_batch_size: G
        replica: This rank's part.
        seed: Of the blend.
        loader_options: ``num_workers`` and what a ``DataLoader`` takes besides, for each source.

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
        own = []
        for row, source in zip(self._rows, chosen.tolist(), strict=True):
            streams = self._streams[source]
            stream = row % self._stream_counts[source]
            if stream in streams.positions:
                # Rows of other replicas are passed over where a stream is shared with them.
                known, counted = len(streams.refused), streams.retokenized
                sample = streams.take(stream)
                if self._replica.has(row):
                    own.append(sample)
                else:
                    del streams.refused[known:]
                    streams.retokenized = counted
        self.iteration += 1
        size = self._replica.micro_batch_size
        return [own[start : start + size] for start in range(0, len(own), size)]

    @property
    def waited(self) -> float:
        """Seconds for which no sample was at hand."""
        return sum(streams.waited for streams in self._streams)

    @property
    def dropped_bytes(self) -> int:
        """Bytes read by this replica that are in no sample."""
        return sum(streams.dropped_bytes for streams in self._streams)

    def restarts_since_asked(self) -> int:
        """How often this rank's workers were started again because one had died, since the last
        call."""
        count = sum(streams.restarts for streams in self._streams)
        for streams in self._streams:
            streams.restarts = 0
        return count

    def refused(self) -> list[RefusedDocument]:
        """Documents that this replica has left out since it was last asked."""
        found = [document for streams in self._streams for document in streams.refused]
        for streams in self._streams:
            streams.refused = []
        return found

    def retokenized_since_asked(self) -> int:
        """Documents that are kept as ids of the student's vocabulary and that its tokenizer gives
        other ids, of this replica, since the last call."""
        count = sum(streams.retokenized for streams in self._streams)
        for streams in self._streams:
            streams.retokenized = 0
        return count

    def close(self) -> None:
        """End the workers."""
        for streams in self._streams:
            streams.close()

    def positions(self) -> list[dict[int, tuple[int, int, int]]]:
        """[S] where this replica's streams go on; those of all replicas make a state."""
        return [
            {stream: astuple(position) for stream, position in streams.positions.items()}
            for streams in self._streams
        ]

    def place(self) -> Place:
        """Where this replica is now."""
        return Place(self.iteration, list(self._counts), self.positions())

    def state(
        self,
        everywhere: Sequence[list[dict[int, tuple[int, int, int]]]],
        *,
        at: Place | None = None,
    ) -> dict[str, Any]:
        """Plain values to go on from under any layout.

        Args:
            everywhere: ``positions`` of every replica.
            at: Where they are; now when not given.
        """
        at = at or self.place()
        merged: list[dict[int, tuple[int, int, int]]] = [{} for _ in self._streams]
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
        """Go on from a ``state``.

        Raises:
            ConfigError: It is of other data, another blend or another order.
        """
        for name, value in self._identity().items():
            before = state["identity"].get(name)
            if before != value:
                raise ConfigError(
                    f"the run was started with other data: {name}",
                    got=before,
                    expected=value,
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
    """One global batch as it was read."""

    batch: Batch | None
    """None where it cannot be read."""

    place: Place
    """Where the data goes on behind it."""

    refused: list[RefusedDocument] = field(default_factory=list)
    retokenized: int = 0
    restarts: int = 0
    error: DataError | None = None


class ReadAhead(Generic[Batch]):
    """Takes global batches one after the other, some of which were read before they are needed.

    Args:
        batches: What is read.
        prepare: What is made of this replica's microbatches of a global batch when it is read.
        depth: Global batches that are read ahead; 0 for none.
        total: Global batches of the run, of which none is read beyond; None for no end.
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
        """The next global batch, behind which more are read.

        Raises:
            DataError: It cannot be read; as late as if nothing were read ahead.
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

    def ahead(self) -> list[tuple[int, Batch]]:
        """Iteration, from 1, and batch of those that were read and come next."""
        return [
            (read.place.iteration, read.batch) for read in self._ahead if read.batch is not None
        ]

    @property
    def iteration(self) -> int:
        """Global batches taken."""
        return self._taken.place.iteration

    @property
    def waited(self) -> float:
        """See ``GlobalBatches``; also for what was read ahead."""
        return self._batches.waited

    def refused(self) -> list[RefusedDocument]:
        """Documents that this replica left out of the batch taken last; each is said once."""
        found, self._taken.refused = self._taken.refused, []
        return found

    def retokenized_since_asked(self) -> int:
        """See ``GlobalBatches``, of the batch taken last."""
        count, self._taken.retokenized = self._taken.retokenized, 0
        return count

    def restarts_since_asked(self) -> int:
        """See ``GlobalBatches``, while the batch taken last was read."""
        count, self._taken.restarts = self._taken.restarts, 0
        return count

    def positions(self) -> list[dict[int, tuple[int, int, int]]]:
        """See ``GlobalBatches``, behind the batch taken last."""
        return self._taken.place.positions

    def state(self, everywhere: Sequence[list[dict[int, tuple[int, int, int]]]]) -> dict[str, Any]:
        """See ``GlobalBatches``, behind the batch taken last."""
        return self._batches.state(everywhere, at=self._taken.place)

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on from a ``state``; what was read ahead is forgotten.

        Raises:
            ConfigError: It is of other data, another blend or another order.
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
        return _Read(
            self._prepare(samples),
            batches.place(),
            refused=batches.refused(),
            retokenized=batches.retokenized_since_asked(),
            restarts=batches.restarts_since_asked(),
        )
