"""One ``.bin`` with its ``.idx``: documents as ids. D documents, S sequences, N ids."""

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
"""Least ids that are looked at together, whole documents."""

RawIds = NDArray[np.integer[Any]]


def indexed_prefixes(name: str) -> list[str]:
    """The indexed datasets that a name of the configuration stands for; none for another file.

    Args:
        name: A prefix, the ``.bin``, the ``.idx``, or a pattern of one of the latter.

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
    """What tells that a file is as it was."""

    size: int

    modified: int
    """Time of its last change, in nanoseconds."""


class DocumentBlock(NamedTuple):
    """The ids of neighbouring documents."""

    first: int
    """Number of the first document, from 0."""

    ids: RawIds
    """[N] of all of them, as they are stored."""

    bounds: NDArray[np.int64]
    """[D + 1] where the ids of each begin and end."""


class IndexedFile:
    """Reads documents by number, mapped into memory by megatron-core's ``IndexedDataset``.

    A document is all of its sequences, one behind the other. It can be sent to another process,
    which maps the files itself.

    Args:
        prefix: Path without ``.bin`` and ``.idx``.

    Attributes:
        prefix: It, as an absolute path.
        stamps: Of both files when this was made.

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
        """All documents in order, some megabytes at a time.

        Raises:
            DataError: The index is not in the order of the ids.
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
        """All ids, mapped."""
        count = self.stamps[0].size // self._dataset.index.dtype_size
        ids: RawIds = self._dataset.bin_reader.read(
            dtype=self._dataset.index.dtype, count=count, offset=0
        )
        return ids

    def _bounds(self, first: int, last: int) -> NDArray[np.int64]:
        """Where in the ids the documents from ``first`` to ``last`` begin, both included."""
        index = self._dataset.index
        sequences = index.document_indices[first : last + 1]
        is_inside = sequences < len(index.sequence_pointers)
        bounds = np.full(len(sequences), len(self._ids), np.int64)
        bounds[is_inside] = index.sequence_pointers[sequences[is_inside]] // index.dtype_size
        return bounds

    def _check_ends(self) -> None:
        """Whether the files fit one another, by where the last sequence ends."""
        index, found = self._dataset.index, self.stamps[0].size
        if not np.issubdtype(index.dtype, np.integer):
            raise self._error("the dataset holds no ids", got=index.dtype.__name__)
        lengths, pointers = index.sequence_lengths, index.sequence_pointers
        expected = int(pointers[-1]) + int(lengths[-1]) * index.dtype_size if len(lengths) else 0
        if found != expected:
            raise DataError(
                "the .bin does not fit its index",
                where=f"{self.prefix}.bin",
                got=f"{found} bytes",
                expected=expected,
                fix="copy both files again, or make them again",
            )
        if index.document_indices[0]:
            raise self._error("the documents of the index are not its sequences")

    def _check_order(self, first: int, last: int) -> None:
        """Whether the sequences of some documents lie one behind the other."""
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
        """Of the ``.bin`` and the ``.idx``."""
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
        first, second = (Stamp(its.st_size, its.st_mtime_ns) for its in status)
        return first, second

    def __getstate__(self) -> dict[str, Any]:
        return {"prefix": self.prefix, "stamps": self.stamps}


def _library() -> ModuleType:
    """megatron-core's module of the format; here, since it takes seconds to load and few runs need
    it before they start."""
    with warnings.catch_warnings():
        # It warns its own developers, in every process.
        warnings.simplefilter("ignore")
        from megatron.core.datasets import indexed_dataset
    library: ModuleType = indexed_dataset
    return library


def _codes() -> set[int]:
    """Of the types of numbers that it can hold."""
    return {kind.value for kind in _library().DType}


def _check_header(path: Path, size: int) -> None:
    """Refuse an index that megatron-core would stumble over."""
    with path.open("rb") as stream:
        header = stream.read(_HEADER.size)
    if len(header) == _HEADER.size:
        magic, version, code, sequences, documents = _HEADER.unpack(header)
        # A length, a place, and for each document where it begins.
        expected = _HEADER.size + 12 * sequences + 8 * documents
        is_known = magic == _MAGIC and version == 1 and code in _codes()
        if is_known and documents and size == expected:
            return
    raise DataError(
        "the file is no index of an indexed dataset, or is cut short",
        where=path,
        got=f"{size} bytes that begin with {header[:9]!r}",
        fix="copy it again, or make it again with megatron-ext tokenize",
    )
