"""Documents to train on, from files of text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from megatron_ext.errors import DataError
from megatron_ext.preprocessing.record_block import RecordFields
from megatron_ext.preprocessing.records import read_records
from megatron_ext.preprocessing.shard_cut import cut_into_shards
from megatron_ext.preprocessing.source_file import source_file, source_kind


def read_documents(paths: Sequence[str], *, text_key: str = "text") -> list[str]:
    """Every non-empty document, in the order of the files.

    JSON lines and Parquet hold records, with a text under ``text_key``; any other file is one
    document.

    Raises:
        DataError: A file is missing or damaged, a record has no text (with file and line), or no
            file holds any text.
        MissingDependencyError: A package that reads this kind of file is not installed.
    """
    fields = RecordFields((text_key,), "text", "data.text_key")
    documents = [document for path in paths for document in _documents(path, fields) if document]
    if not documents:
        raise DataError(
            "the corpus holds no text",
            got=f"{len(paths)} empty file{'s' if len(paths) != 1 else ''}: {', '.join(paths)}",
            fix="check data.train and data.validation",
        )
    return documents


def _documents(path: str, fields: RecordFields) -> Iterator[str]:
    file = source_file(Path(path), source_kind(path))
    for piece in cut_into_shards([file], 1)[0]:
        for block in read_records(piece, fields):
            if block.bad:
                raise block.bad[0].error(piece.path)
            yield from block.columns[0]
