"""Parts to Megatron's .bin and .idx, through megatron-core's own builder."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder

from megatron_ext.errors import DataError

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
        pending = cls(prefix, scratch / f"{prefix.name}.bin", scratch / f"{prefix.name}.idx")
        dtype = np.uint8 if cardinality is None else DType.optimal_dtype(cardinality)
        builder = IndexedDatasetBuilder(str(pending.tokens), dtype=dtype)
        for part in parts:
            _append(builder, part)
        builder.finalize(str(pending.index))
        _flush(pending.tokens)
        _flush(pending.index)
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


def _append(builder: IndexedDatasetBuilder, part: Path) -> None:
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


def _flush(file: Path) -> None:
    with file.open("rb") as stream:
        os.fsync(stream.fileno())
