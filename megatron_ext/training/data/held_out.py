"""Held-out rows, in memory, the same number for every replica. G rows of a global batch."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

from megatron_ext.data.aligned_text import PackedSample
from megatron_ext.data.global_batches import Replica
from megatron_ext.data.packed_dataset import PackedTextDataset
from megatron_ext.errors import DataError

_BLANK = PackedSample(())
"""A row that predicts nothing."""


class HeldOut:
    """The rows of held-out texts, filled up with blank ones to whole global batches.

    Args:
        dataset: The texts, without an end-of-document token, so that labels are the text.
        global_batch_size: G

    Attributes:
        refused: Documents that were left out, which ``data.bad_documents: skip`` allows.

    Raises:
        DataError: No row fits the models.
    """

    def __init__(self, dataset: PackedTextDataset, *, global_batch_size: int) -> None:
        blocks = [dataset[0, block] for block in range(dataset.block_count(0))]
        self.dataset = dataset
        self.samples = list(chain.from_iterable(block.samples for block in blocks))
        self.dropped_bytes = sum(block.dropped_bytes for block in blocks)
        self.refused = [document for block in blocks for document in block.refused]
        if not self.samples:
            raise DataError(
                "no held-out text fits the models' sequence lengths",
                got=f"{self.dropped_bytes} bytes dropped",
                fix="raise seq_length",
            )
        self._rows = global_batch_size

    def global_batches(self, replica: Replica) -> Iterator[list[list[PackedSample]]]:
        """The replica's microbatches of each global batch."""
        filled = -(-len(self.samples) // self._rows) * self._rows
        samples = [*self.samples, *[_BLANK] * (filled - len(self.samples))]
        for first in range(0, filled, self._rows):
            own = [samples[first + row] for row in range(self._rows) if replica.has(row)]
            size = replica.micro_batch_size
            yield [own[start : start + size] for start in range(0, len(own), size)]
