"""Parts of all shards to Megatron's .bin and .idx, through megatron-core's own builder."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from megatron_ext.documents.id_tokenizers import LOSS_MASK
from megatron_ext.documents.source_file import SourceFiles
from megatron_ext.errors import DataError
from megatron_ext.files import flush, write_text
from megatron_ext.preprocessing.config import PreprocessConfig
from megatron_ext.preprocessing.report import Report, ShardRecord
from megatron_ext.preprocessing.work_folder import Plan, WorkFolder

_COPY_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class PendingDataset:
    """A whole dataset that does not have its name yet.

    Attributes:
        prefix: The output will be ``prefix.bin`` and ``prefix.idx``.
        tokens: What becomes the .bin.
        index: What becomes the .idx.
    """

    prefix: Path
    tokens: Path
    index: Path

    @classmethod
    def build(
        cls, prefix: Path, parts: Sequence[Path], scratch: Path, *, cardinality: int | None
    ) -> PendingDataset:
        """Put ``parts`` together in order.

        Args:
            prefix: Where the dataset will be.
            scratch: A folder on the same file system, for the files until then.
            parts: Prefixes of what ``PartWriter`` wrote.
            cardinality: Size of the vocabulary; None for bytes, as a loss mask is.

        Raises:
            DataError: A part is damaged.
        """
        # Here, because megatron-core and torch take seconds to load and nothing else needs them.
        from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder

        pending = cls(prefix, scratch / f"{prefix.name}.bin", scratch / f"{prefix.name}.idx")
        dtype = np.uint8 if cardinality is None else DType.optimal_dtype(cardinality)
        builder = IndexedDatasetBuilder(str(pending.tokens), dtype=dtype)
        for part in parts:
            _append(builder, part)
        builder.finalize(str(pending.index))
        flush(pending.tokens, pending.index)
        return pending


def publish(datasets: Sequence[PendingDataset]) -> None:
    """Give whole datasets their names, replacing what has them.

    A dataset is there when its index is. So the old indices go first and the new ones come last:
    whoever reads meanwhile finds the old files, the new ones or none, and never a mixture.
    """
    for dataset in datasets:
        Path(f"{dataset.prefix}.idx").unlink(missing_ok=True)
    for dataset in datasets:
        dataset.tokens.replace(f"{dataset.prefix}.bin")
    for dataset in datasets:
        dataset.index.replace(f"{dataset.prefix}.idx")


def _append(builder: Any, part: Path) -> None:
    """What ``IndexedDatasetBuilder.add_index`` does, for a part."""
    with np.load(f"{part}.npz") as arrays:
        lengths, counts = arrays["sequence_lengths"], arrays["sequence_counts"]
    tokens = Path(f"{part}.bin")
    expected = int(lengths.sum(dtype=np.int64)) * np.dtype(builder.dtype).itemsize
    if tokens.stat().st_size != expected:
        raise DataError(
            "a finished part is damaged",
            where=tokens,
            got=f"{tokens.stat().st_size} bytes",
            expected=expected,
            fix=f"remove {part.parent} and run the command again",
        )
    with tokens.open("rb") as stream:
        shutil.copyfileobj(stream, builder.data_file, _COPY_BYTES)
    ends = np.cumsum(counts) + len(builder.sequence_lengths)
    builder.sequence_lengths.extend(lengths.tolist())
    builder.document_indices.extend(ends.tolist())


def assemble(
    config: PreprocessConfig, plan: Plan, sources: SourceFiles, *, vocab_size: int
) -> Report:
    """Write the datasets and the report of a run whose shards are all finished.

    Raises:
        DataError: The input gave nothing to train on, a part is damaged or, if the run is strict,
            a record could not be used.
        OSError: The output cannot be written.
    """
    folder, digest = WorkFolder(config.names.work_folder), plan.digest()
    report = Report.of(
        (_finished(folder, index, digest) for index in range(len(plan.shards))),
        settings=plan.settings,
        inputs=[file.path for file in sources.files],
        skipped_files=sources.skipped,
    )
    if config.strict and report.bad:
        raise DataError(report.bad[0].problem, where=report.bad[0].place)
    problem = _emptiness(report)
    if problem is not None:
        # Nothing in it is worth taking up.
        folder.finish()
        raise problem
    # Everything is made among the parts, which go with all that a killed run may leave there.
    scratch = folder.scratch()
    _write_datasets(config, folder, len(plan.shards), scratch, vocab_size)
    write_text(scratch / config.names.report.name, report.to_json())
    (scratch / config.names.report.name).replace(config.names.report)
    folder.finish()
    return report


def _finished(folder: WorkFolder, index: int, plan: str) -> ShardRecord:
    record = folder.record(index, plan)
    if record is None:
        raise DataError(
            "a finished shard has gone",
            where=folder.shard(index),
            fix="run the command again, and one at a time",
        )
    return record


def _emptiness(report: Report) -> DataError | None:
    """Why there is nothing to write, if so."""
    if not report.documents:
        first = report.bad[0] if report.bad else None
        return DataError(
            "no record of the input can be used",
            got=f"{report.bad_records} bad, the first: {first.place}: {first.problem}"
            if first is not None
            else "no records",
        )
    for name, count in report.tokens.items():
        if count:
            continue
        if name.endswith(f"_{LOSS_MASK}"):
            return DataError("no token of the input is trained", where=name)
        return DataError("the documents of the input give no tokens", where=name)
    return None


def _write_datasets(
    config: PreprocessConfig, folder: WorkFolder, shard_count: int, scratch: Path, vocab_size: int
) -> None:
    pending = [
        PendingDataset.build(
            prefix,
            [folder.shard(index) / name for index in range(shard_count)],
            scratch,
            cardinality=None if name.endswith(f"_{LOSS_MASK}") else vocab_size,
        )
        for name, prefix in config.names.datasets()
    ]
    publish(pending)
