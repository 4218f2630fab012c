"""Global batches that are read ahead of the one that is trained on, and a state that is not ahead.

What a checkpoint keeps, and what is counted, is of the global batches that were taken: a run that
is resumed reads again what was only read ahead.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from megatron_ext.data.aligned_text import PackedSample
from megatron_ext.data.global_batches import GlobalBatches, Place
from megatron_ext.data.packed_dataset import RefusedDocument
from megatron_ext.errors import DataError

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
