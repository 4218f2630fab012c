"""Tokenized documents, and the files that hold those of one shard.

N tokens, S sequences, D documents. Megatron stores sequences of tokens and, for each document, its
number of sequences: one, or one for each sentence. Empty sequences are not stored, so a document
may have no sequence at all.

The files of a shard are not a Megatron dataset: writing one would load megatron-core and torch into
every worker, which takes seconds and hundreds of megabytes. megatron-core's builder joins them.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from megatron_ext.errors import DataError

_SMALL_VOCABULARY = 65500


@dataclass(frozen=True, slots=True, eq=False)
class EncodedDocuments:
    """Tokenized documents of one key."""

    ids: NDArray[np.int32]
    """[N]"""

    sequence_lengths: NDArray[np.int64]
    """[S] tokens of each sequence, at least 1."""

    sequence_counts: NDArray[np.int64]
    """[D] number of sequences of each document."""

    trained: NDArray[np.uint8] | None = None
    """[N] 1 where a token is trained; None for data without a loss mask."""

    @classmethod
    def from_sequences(
        cls, ids: NDArray[np.int32], lengths: NDArray[np.int64], counts: NDArray[np.int64]
    ) -> EncodedDocuments:
        """Documents from sequences, of which empty ones are dropped.

        Args:
            ids: [N].
            lengths: [S'] tokens of each sequence, possibly 0.
            counts: [D] sequences of each document, empty ones included.
        """
        if lengths.all():
            return cls(ids, lengths, counts)
        return cls(ids, lengths[lengths > 0], _sums(lengths > 0, counts))

    @property
    def document_lengths(self) -> NDArray[np.int64]:
        """[D] tokens of each document."""
        return _sums(self.sequence_lengths, self.sequence_counts)

    @property
    def trained_lengths(self) -> NDArray[np.int64]:
        """[D] trained tokens of each document; all tokens without a mask."""
        lengths = self.document_lengths
        return lengths if self.trained is None else _sums(self.trained, lengths)

    def with_eod(self, eod: int) -> EncodedDocuments:
        """A copy with ``eod`` appended to each document that has any tokens."""
        assert self.trained is None
        is_filled = self.sequence_counts > 0
        lengths = self.sequence_lengths.copy()
        lengths[np.cumsum(self.sequence_counts)[is_filled] - 1] += 1
        ends = np.cumsum(self.document_lengths)[is_filled]
        ids = np.insert(self.ids, ends, np.int32(eod))
        return EncodedDocuments(ids, lengths, self.sequence_counts)


def _sums(values: NDArray[Any], counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """Sums of consecutive groups of ``values`` with the sizes ``counts``, which may be 0."""
    sums = np.concatenate(([0], np.cumsum(values, dtype=np.int64)))
    return np.diff(sums[np.concatenate(([0], np.cumsum(counts)))])


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    """Storage type of ids in megatron-core: ``DType.optimal_dtype`` without importing torch."""
    return np.dtype(np.uint16 if vocab_size < _SMALL_VOCABULARY else np.int32)


class PartWriter:
    """Writer of the tokens and documents of one shard and key.

    Args:
        prefix: Prefix of the files ``prefix.bin`` and ``prefix.npz``.
        dtype: Storage type of a token.
    """

    def __init__(self, prefix: Path, dtype: np.dtype[Any]) -> None:
        self._prefix = prefix
        self._dtype = dtype
        self._limits = np.iinfo(dtype)
        self._stream: BinaryIO | None = None
        self._lengths: list[NDArray[np.int32]] = [np.zeros(0, np.int32)]
        self._counts: list[NDArray[np.int64]] = [np.zeros(0, np.int64)]

    def add(self, tokens: NDArray[Any], documents: EncodedDocuments) -> None:
        """Append ``tokens`` [N], divided into sequences and documents as ``documents`` is.

        Raises:
            DataError: A token does not fit into ``dtype``.
        """
        if len(tokens) and not (
            self._limits.min <= tokens.min() and tokens.max() <= self._limits.max
        ):
            raise DataError(
                "the tokenizer gave an id beyond its vocabulary",
                got=f"ids {tokens.min()} to {tokens.max()}",
                expected=f"0 to {self._limits.max}",
            )
        assert self._stream is not None, "a part is written inside its with block"
        self._stream.write(tokens.astype(self._dtype, copy=False).data)
        self._lengths.append(documents.sequence_lengths.astype(np.int32))
        self._counts.append(documents.sequence_counts)

    def __enter__(self) -> PartWriter:
        self._stream = Path(f"{self._prefix}.bin").open("wb")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._stream is not None:
            self._stream.close()
        if kind is None:
            np.savez(
                f"{self._prefix}.npz",
                sequence_lengths=np.concatenate(self._lengths),
                sequence_counts=np.concatenate(self._counts),
            )
