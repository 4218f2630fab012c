"""Megatron's way to write an indexed dataset: one record and one document after the other."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder


def write_one_by_one(
    records: Iterable[Mapping[str, Any]],
    tokenizer: Any,
    prefix: Path,
    *,
    keys: Sequence[str] = ("text",),
    append_eod: bool = False,
) -> None:
    """What Megatron's preprocess_data.py does with each record, in this process."""
    builders = {
        key: IndexedDatasetBuilder(
            f"{prefix}_{key}_document.bin", dtype=DType.optimal_dtype(tokenizer.vocab_size)
        )
        for key in keys
    }
    for record in records:
        for key in keys:
            value = record[key]
            ids: list[int] = []
            lengths: list[int] = []
            for sentence in value if isinstance(value, list) else [value]:
                sentence_ids = tokenizer.tokenize(sentence)
                if sentence_ids:
                    ids += sentence_ids
                    lengths.append(len(sentence_ids))
            if ids and append_eod:
                ids.append(tokenizer.eod)
                lengths[-1] += 1
            builders[key].add_document(ids, lengths)
    for key in keys:
        builders[key].finalize(f"{prefix}_{key}_document.idx")
