"""Recording of a cache's files: the blocks of documents, and the targets of one block."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
import torch

from megatron_ext.data.aligner import PackedSample
from megatron_ext.data.collator import CrossTokenizerCollator
from megatron_ext.data.packed_dataset import PackedTextDataset
from megatron_ext.distributed.process_groups import ProcessGroups
from megatron_ext.losses import TeacherTargets
from megatron_ext.teachers import Teacher
from megatron_ext.teachers.formed_targets import FormedTargets, to_records
from megatron_ext.teachers.target_form import TargetForm
from megatron_ext.training import watchdog
from megatron_ext.training.microbatch import Microbatch
from megatron_ext.training.run_data import RunData
from megatron_ext.training.teachers.shard_file import (
    PlacedWindow,
    PlacedWindows,
    Window,
    write_shard,
)
from megatron_ext.training.teachers.target_cache import Manifest

_TOKEN_BYTES: Final = 4
"""Approximate bytes of text in a token."""
_MOST_BYTES: Final = 1 << 22
"""Most bytes of text in a file."""
_RUN_DOCUMENTS: Final = 8


class Block(NamedTuple):
    """The texts of one file."""

    name: str
    """Name of the file."""

    dataset: PackedTextDataset
    number: int

    def samples(self) -> tuple[PackedSample, ...]:
        """Rows of the block; tokenized by this call."""
        return self.dataset[0, self.number].samples


def block_bytes(form: TargetForm, file_bytes: int) -> int:
    """Least bytes of text of a file, except for the last."""
    return min(max(file_bytes // form.bytes_per_token * _TOKEN_BYTES, 1), _MOST_BYTES)


def blocks_of(data: RunData, text_bytes: int) -> list[Block]:
    """All blocks of a run's training text, in the order of the documents.

    A corpus that several sources share is included once. Blocks depend on the texts and the
    tokenizers alone, so that a recording continues over any number of ranks.

    Args:
        text_bytes: The result of ``block_bytes``.
    """
    stop_at_bad = data.config.data.bad_documents == "stop"
    datasets: dict[str, PackedTextDataset] = {}
    for source in data.sources:
        trained = source.dataset
        datasets.setdefault(
            trained.documents.sha256,
            PackedTextDataset(
                trained.documents,
                trained.collator,
                shuffle=False,
                block_bytes=text_bytes,
                run_documents=_RUN_DOCUMENTS,
                refuse_bad=stop_at_bad,
            ),
        )
    return list(_blocks(list(datasets.values())))


def _blocks(datasets: list[PackedTextDataset]) -> Iterator[Block]:
    for source, dataset in enumerate(datasets):
        for number in range(dataset.block_count(0)):
            yield Block(f"targets-{source:02d}-{number:06d}.bin", dataset, number)


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockRecorder:
    """The recorder of one replica, all of whose ranks record the same blocks."""

    name: str
    """Name of the teacher."""

    teacher: Teacher
    formed: FormedTargets
    collator: CrossTokenizerCollator
    groups: ProcessGroups
    micro_batch_size: int

    microbatch_count: int
    """Number of microbatches in one pass of the teacher's schedule."""

    manifest: Manifest
    folder: Path

    def record(self, block: Block) -> None:
        """Make the file of a block, which the replica's main rank writes.

        Collectives: those of the teacher's schedule and of ``FormedTargets`` for each microbatch.

        Raises:
            LossError: A number of the teacher cannot be stored.
        """
        rows = block.samples()
        size = self.micro_batch_size * self.microbatch_count
        windows: dict[bytes, Window] = {}
        for start in range(0, len(rows), size):
            watchdog.tick()
            for window in self._windows(rows[start : start + size]):
                windows.setdefault(window.key, window)
        if self.groups.is_replica_main:
            write_shard(
                self.folder / block.name,
                list(windows.values()),
                bytes_per_token=self.manifest.form.bytes_per_token,
                digest=self.manifest.digest,
            )

    def _windows(self, rows: Sequence[PackedSample]) -> Iterator[Window]:
        """Windows of the rows of one pass, on the rank that writes; none on the others."""
        size = self.micro_batch_size
        count = size * self.microbatch_count
        # Every pass has the same shape; windows of rows that only fill it up are left out.
        filled = [*rows, *[rows[-1]] * (count - len(rows))]
        batches, placed = [], []
        for start in range(0, count, size):
            samples = filled[start : start + size]
            microbatch = Microbatch.of(self.collator(samples), {}, context=self.formed.context)
            batches.append(microbatch.to(self.groups.device).teachers[self.name])
            real = min(max(len(rows) - start, 0), size)
            all_placed = PlacedWindows.of(samples, self.collator, self.name)
            limit = real * all_placed.row_length
            placed.append([window for window in all_placed.windows if window.start < limit])
        targets = self.teacher.targets(batches)
        for batch, of_batch, windows in zip(batches, targets, placed, strict=False):
            yield from self._of_batch(of_batch, batch.labels, windows)

    def _of_batch(
        self, targets: TeacherTargets, labels: torch.Tensor, windows: Sequence[PlacedWindow]
    ) -> Iterator[Window]:
        fields = self.formed(targets, labels)
        if not (self.groups.is_replica_main and windows):
            return
        places = np.concatenate([np.arange(w.start, w.start + w.length) for w in windows])
        index = torch.from_numpy(places).to(self.groups.device)
        on_host = {name: values.flatten(0, 1)[index].cpu() for name, values in fields.items()}
        records = to_records(on_host, self.manifest.form)
        first = 0
        for window in windows:
            # A copy, so that the records of the whole microbatch can be freed.
            yield Window(window.key, records[first : first + window.length].copy())
            first += window.length
