"""Joining of all shards into Megatron's ``.bin`` and ``.idx`` by megatron-core's own builder."""

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
    """A complete dataset under temporary names.

    Attributes:
        prefix: Prefix of the final ``prefix.bin`` and ``prefix.idx``.
        tokens: Temporary file of the .bin.
        index: Temporary file of the .idx.
    """

    prefix: Path
    tokens: Path
    index: Path

    @classmethod
    def build(
        cls, prefix: Path, parts: Sequence[Path], scratch: Path, *, cardinality: int | None
    ) -> PendingDataset:
        """Join ``parts`` in order.

        Args:
            prefix: Final prefix of the dataset.
            scratch: Folder of the temporary files, on the same file system.
            parts: Prefixes of the files of ``PartWriter``.
            cardinality: Size of the vocabulary; None for bytes, as in a loss mask.

        Raises:
            DataError: A part is damaged.
        """
        # Imported late: megatron-core and torch take seconds to load and nothing else needs them.
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
    """Rename complete datasets to their final names, replacing existing ones.

    A dataset exists once its index does. So old indices are removed first and new ones renamed
    last: a concurrent reader finds the old files, the new ones or none, never a mixture.
    """
    for dataset in datasets:
        Path(f"{dataset.prefix}.idx").unlink(missing_ok=True)
    for dataset in datasets:
        dataset.tokens.replace(f"{dataset.prefix}.bin")
    for dataset in datasets:
        dataset.index.replace(f"{dataset.prefix}.idx")


def _append(builder: Any, part: Path) -> None:
    """``IndexedDatasetBuilder.add_index`` for the files of a ``PartWriter``."""
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
        DataError: The input has nothing to train on, a shard is damaged or, with ``strict``, a
            record could not be used.
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
    problem = _empty_output_error(report)
    if problem is not None:
        # Nothing in the folder is worth resuming.
        folder.finish()
        raise problem
    # Temporary files are in the work folder, so that leftovers of a killed run go with it.
    scratch = folder.scratch()
    try:
        pending = _pending_datasets(config, folder, len(plan.shards), scratch, vocab_size)
        with folder.lock():
            # Another process may have put the files of the run in place, which stay there.
            folder.plan.stat()
            write_text(scratch / config.names.report.name, report.to_json())
            publish(pending)
            (scratch / config.names.report.name).replace(config.names.report)
            folder.plan.unlink()
        folder.finish()
    except FileNotFoundError as error:
        if folder.plan.exists():
            raise
        raise DataError(
            "another process has finished the run meanwhile, or removed its folder",
            where=folder.path,
            fix=f"see {config.names.report}, or run the command again",
        ) from error
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


def _empty_output_error(report: Report) -> DataError | None:
    """The error of a run without any output; None otherwise."""
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


def _pending_datasets(
    config: PreprocessConfig, folder: WorkFolder, shard_count: int, scratch: Path, vocab_size: int
) -> list[PendingDataset]:
    return [
        PendingDataset.build(
            prefix,
            [folder.shard(index) / name for index in range(shard_count)],
            scratch,
            cardinality=None if name.endswith(f"_{LOSS_MASK}") else vocab_size,
        )
        for name, prefix in config.names.datasets()
    ]
