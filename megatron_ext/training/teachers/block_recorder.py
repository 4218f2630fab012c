"""What a cache is recorded of, file by file: blocks of documents, each once."""

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
from megatron_ext.training import rank_phase
from megatron_ext.training.microbatch import Microbatch
from megatron_ext.training.run_data import RunData
from megatron_ext.training.teachers.cache_manifest import Manifest
from megatron_ext.training.teachers.shard_file import (
    PlacedWindow,
    PlacedWindows,
    Window,
    write_shard,
)

_TOKEN_BYTES: Final = 4
"""Bytes of text in a token, roughly."""
_MOST_BYTES: Final = 1 << 22
"""Of text in a file."""
_RUN_DOCUMENTS: Final = 8


class Block(NamedTuple):
    """The texts of one file."""

    name: str
    """Of the file."""

    dataset: PackedTextDataset
    number: int

    def samples(self) -> tuple[PackedSample, ...]:
        """Its rows; tokenized now."""
        return self.dataset[0, self.number].samples


def block_bytes(form: TargetForm, file_bytes: int) -> int:
    """Least bytes of text of a file, but for the last."""
    return min(max(file_bytes // form.bytes_per_token * _TOKEN_BYTES, 1), _MOST_BYTES)


def blocks_of(data: RunData, text_bytes: int, *, stop_at_bad: bool) -> list[Block]:
    """All blocks of a run's training text, in the order of the documents.

    A text that several sources have is there once. A block is a function of the texts and
    the tokenizers, so that a recording goes on over any number of ranks.

    Args:
        text_bytes: What ``block_bytes`` returned.
        stop_at_bad: Raise the error of a document that cannot be read, as a run does.
    """
    datasets: dict[str, PackedTextDataset] = {}
    for source in data.sources:
        own = source.dataset
        datasets.setdefault(
            own.documents.sha256,
            PackedTextDataset(
                own.documents,
                own.collator,
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
    """This replica's work; every rank of it calls the same."""

    name: str
    """Of the teacher."""

    teacher: Teacher
    formed: FormedTargets
    collator: CrossTokenizerCollator
    groups: ProcessGroups
    micro_batch_size: int

    microbatch_count: int
    """Of one pass of the teacher's schedule."""

    manifest: Manifest
    folder: Path

    def record(self, block: Block) -> None:
        """Make the file of a block; its first rank on the last stage writes it.

        Collectives: those of the teacher's schedule and of ``FormedTargets`` for each microbatch.

        Raises:
            LossError: A number of the teacher cannot be kept.
        """
        rows = block.samples()
        size = self.micro_batch_size * self.microbatch_count
        windows: dict[bytes, Window] = {}
        for start in range(0, len(rows), size):
            rank_phase.tick()
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
        """What the rows of one pass give; nothing but on the rank that writes."""
        size = self.micro_batch_size
        count = size * self.microbatch_count
        # Every pass has the same shape; what is only there to fill it is left out again.
        filled = [*rows, *[rows[-1]] * (count - len(rows))]
        batches, placed = [], []
        for start in range(0, count, size):
            own = filled[start : start + size]
            sides = self.collator(own)
            microbatch = Microbatch.of(sides, {}, context=self.formed.context)
            batches.append(microbatch.to(self.groups.device).teachers[self.name])
            real = min(max(len(rows) - start, 0), size)
            its = PlacedWindows.of(own, sides, self.collator.sides, self.name)
            placed.append([w for w in its.windows if w.start < real * its.row_length])
        targets = self.teacher.targets(batches)
        for batch, of_batch, its_windows in zip(batches, targets, placed, strict=False):
            yield from self._of_batch(of_batch, batch.labels, its_windows)

    def _of_batch(
        self, targets: TeacherTargets, labels: torch.Tensor, windows: Sequence[PlacedWindow]
    ) -> Iterator[Window]:
        fields = self.formed(targets, labels)
        if not (self.groups.is_replica_main and windows):
            return
        places = np.concatenate([np.arange(w.start, w.start + w.length) for w in windows])
        index = torch.from_numpy(places).to(self.groups.device)
        kept = {name: values.flatten(0, 1)[index].cpu() for name, values in fields.items()}
        records = to_records(kept, self.manifest.form)
        first = 0
        for window in windows:
            # A copy: the records of the whole microbatch need not stay.
            yield Window(window.key, records[first : first + window.length].copy())
            first += window.length
