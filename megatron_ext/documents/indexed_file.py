"""``IndexedFile``: the ids of one ``.bin`` with its ``.idx``. D documents, S sequences, N ids."""

from __future__ import annotations

import glob
import os
import struct
import warnings
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from types import ModuleType
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatron_ext.errors import DataError

_ENDS: Final = (".bin", ".idx")
_HEADER: Final = struct.Struct("<9sQBQQ")
_MAGIC: Final = b"MMIDIDX\x00\x00"
_BLOCK_IDS: Final = 1 << 20
"""Least ids of a ``DocumentBlock``, rounded up to whole documents."""

RawIds = NDArray[np.integer[Any]]


def indexed_prefixes(name: str) -> list[str]:
    """Prefixes of the indexed datasets that ``name`` stands for; empty for any other file.

    Args:
        name: A prefix, a ``.bin``, an ``.idx``, or a glob pattern of either file.

    Raises:
        DataError: A pattern that matches nothing.
    """
    stem = name.removesuffix(".bin").removesuffix(".idx")
    if stem == name:
        is_prefix = not os.path.exists(name) and any(os.path.exists(name + end) for end in _ENDS)
        return [name] if is_prefix else []
    if os.path.lexists(name) or not glob.has_magic(stem):
        return [stem]
    found = sorted(glob.glob(f"{stem}.idx", recursive=True))
    if not found:
        raise DataError("the pattern matches no indexed dataset", where=name)
    return [path.removesuffix(".idx") for path in found]


class Stamp(NamedTuple):
    """Size and time of change of a file, to detect that it was replaced."""

    size: int

    modified: int
    """Time of the last change, in nanoseconds."""


class DocumentBlock(NamedTuple):
    """The ids of neighbouring documents."""

    first: int
    """Number of the first document, from 0."""

    ids: RawIds
    """[N] ids of all documents of the block, in the stored type."""

    bounds: NDArray[np.int64]
    """[D + 1] offsets of the documents in ``ids``."""


class IndexedFile:
    """Reads documents by number, mapped into memory by megatron-core's ``IndexedDataset``.

    A document is the concatenation of its sequences. Picklable: another process maps the files
    again.

    Args:
        prefix: Path without ``.bin`` and ``.idx``.

    Attributes:
        prefix: The prefix as an absolute path.
        stamps: Size and time of the ``.bin`` and the ``.idx`` when this was made.

    Raises:
        DataError: A file is missing, damaged, of another format, or does not fit the other.
    """

    def __init__(self, prefix: str) -> None:
        self.prefix = os.path.abspath(prefix)
        self.stamps = self._stamps_now()
        _check_header(Path(f"{self.prefix}.idx"), self.stamps[1].size)
        if not self.stamps[0].size:
            raise DataError("the dataset holds no ids", where=f"{self.prefix}.bin", got="0 bytes")
        self._check_ends()

    def __len__(self) -> int:
        return len(self._dataset.document_indices) - 1

    def document(self, number: int) -> NDArray[np.int32]:
        """The ids [N] of a document, a copy.

        Raises:
            DataError: The files have changed.
        """
        first, stop = self._bounds(number, number + 1).tolist()
        return self._ids[first:stop].astype(np.int32)

    def blocks(self) -> Iterator[DocumentBlock]:
        """Blocks of all documents in order, some megabytes each.

        Raises:
            DataError: The sequences of the index are not in the order of the ids.
        """
        index, first = self._dataset.index, 0
        while first < len(self):
            enough = (self._bounds(first, first)[0] + _BLOCK_IDS) * index.dtype_size
            sequence = index.sequence_pointers.searchsorted(enough)
            last = int(index.document_indices.searchsorted(sequence))
            last = min(max(last, first + 1), len(self))
            self._check_order(first, last)
            bounds = self._bounds(first, last)
            yield DocumentBlock(first, self._ids[bounds[0] : bounds[-1]], bounds - bounds[0])
            first = last

    @cached_property
    def _dataset(self) -> Any:
        if self._stamps_now() != self.stamps:
            raise DataError(
                "the file has changed since the run was started",
                where=self.prefix,
                fix="start the run again",
            )
        try:
            return _library().IndexedDataset(self.prefix)
        except AssertionError as error:
            raise self._error("the documents of the index are not its sequences") from error

    @cached_property
    def _ids(self) -> RawIds:
        """[N] all ids, memory-mapped."""
        count = self.stamps[0].size // self._dataset.index.dtype_size
        ids: RawIds = self._dataset.bin_reader.read(
            dtype=self._dataset.index.dtype, count=count, offset=0
        )
        return ids

    def _bounds(self, first: int, last: int) -> NDArray[np.int64]:
        """Offsets in the ids at which the documents ``first`` to ``last`` (inclusive) begin."""
        index = self._dataset.index
        sequences = index.document_indices[first : last + 1]
        is_inside = sequences < len(index.sequence_pointers)
        bounds = np.full(len(sequences), len(self._ids), np.int64)
        bounds[is_inside] = index.sequence_pointers[sequences[is_inside]] // index.dtype_size
        return bounds

    def _check_ends(self) -> None:
        """Refuse a ``.bin`` whose size is not where the last sequence of the ``.idx`` ends."""
        index, size = self._dataset.index, self.stamps[0].size
        if not np.issubdtype(index.dtype, np.integer):
            raise self._error("the dataset holds no ids", got=index.dtype.__name__)
        lengths, pointers = index.sequence_lengths, index.sequence_pointers
        expected = int(pointers[-1]) + int(lengths[-1]) * index.dtype_size if len(lengths) else 0
        if size != expected:
            raise DataError(
                "the .bin does not fit its index",
                where=f"{self.prefix}.bin",
                got=f"{size} bytes",
                expected=expected,
                fix="copy both files again, or make them again",
            )
        if index.document_indices[0]:
            raise self._error("the documents of the index are not its sequences")

    def _check_order(self, first: int, last: int) -> None:
        """Refuse documents whose sequences are not contiguous in the ids."""
        index = self._dataset.index
        documents = index.document_indices[first : last + 1]
        begin, end = int(documents[0]), int(documents[-1])
        behind = (
            index.sequence_pointers[begin:end]
            + index.sequence_lengths[begin:end].astype(np.int64) * index.dtype_size
        )
        following = index.sequence_pointers[begin + 1 : end + 1]
        is_in_order = np.array_equal(behind[: len(following)], following)
        if not is_in_order or (np.diff(documents) < 0).any():
            raise self._error("the index is not in the order of the ids")

    def _error(self, what: str, got: object = None) -> DataError:
        return DataError(
            what, got=got, where=f"{self.prefix}.idx", fix="make it with megatron-ext tokenize"
        )

    def _stamps_now(self) -> tuple[Stamp, Stamp]:
        """Stamps of the ``.bin`` and the ``.idx``."""
        paths = [Path(self.prefix + end) for end in _ENDS]
        try:
            status = [path.stat() for path in paths]
            for path in paths:
                path.open("rb").close()
        except OSError as error:
            raise DataError(
                "an indexed dataset is a .bin with its .idx, and one cannot be read",
                where=error.filename,
                got=error.strerror,
            ) from error
        data, index = (Stamp(one.st_size, one.st_mtime_ns) for one in status)
        return data, index

    def __getstate__(self) -> dict[str, Any]:
        return {"prefix": self.prefix, "stamps": self.stamps}


def _library() -> ModuleType:
    """megatron-core's module of the format; imported late because that takes seconds."""
    with warnings.catch_warnings():
        # The import warns about megatron-core's own internals, in every process.
        warnings.simplefilter("ignore")
        from megatron.core.datasets import indexed_dataset
    library: ModuleType = indexed_dataset
    return library


def _dtype_codes() -> set[int]:
    """Codes of the number types that the format has."""
    return {kind.value for kind in _library().DType}


def _check_header(path: Path, size: int) -> None:
    """Refuse an index that megatron-core would fail on obscurely."""
    with path.open("rb") as stream:
        header = stream.read(_HEADER.size)
    if len(header) == _HEADER.size:
        magic, version, code, sequences, documents = _HEADER.unpack(header)
        # int32 length and int64 offset of each sequence; int64 first sequence of each document.
        expected = _HEADER.size + 12 * sequences + 8 * documents
        is_supported = magic == _MAGIC and version == 1 and code in _dtype_codes()
        if is_supported and documents and size == expected:
            return
    raise DataError(
        "the file is not an index of an indexed dataset, or is cut short",
        where=path,
        got=f"{size} bytes that begin with {header[:9]!r}",
        fix="copy it again, or make it again with megatron-ext tokenize",
    )
