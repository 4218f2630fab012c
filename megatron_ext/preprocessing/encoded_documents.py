"""Documents as token ids, and one shard's share of them in files.

N tokens, S sequences, D documents. Megatron stores sequences of tokens and, for each document, how
many sequences are its own: one, or one for each sentence. Sequences without tokens are none, so a
document may have no sequence at all.

A part is no Megatron dataset: writing one would load megatron-core and torch into every worker,
which takes seconds and hundreds of megabytes of memory. megatron-core's builder puts them together.
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
    """Some documents under one key."""

    ids: NDArray[np.int32]
    """[N]"""

    sequence_lengths: NDArray[np.int64]
    """[S] tokens of each sequence, at least 1."""

    sequence_counts: NDArray[np.int64]
    """[D] sequences of each document."""

    trained: NDArray[np.uint8] | None = None
    """[N] 1 where a token is trained; None where the data has no such mask."""

    @classmethod
    def from_sequences(
        cls, ids: NDArray[np.int32], lengths: NDArray[np.int64], counts: NDArray[np.int64]
    ) -> EncodedDocuments:
        """The same without the sequences that have no tokens.

        Args:
            ids: [N]
            lengths: Tokens of each sequence, 0 among them [S'].
            counts: Sequences of each document, those without tokens included [D].
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
        """[D] trained tokens of each document; all of them where there is no mask."""
        lengths = self.document_lengths
        return lengths if self.trained is None else _sums(self.trained, lengths)

    def with_eod(self, eod: int) -> EncodedDocuments:
        """The same with ``eod`` as the last token of each document that has any tokens."""
        assert self.trained is None
        is_filled = self.sequence_counts > 0
        lengths = self.sequence_lengths.copy()
        lengths[np.cumsum(self.sequence_counts)[is_filled] - 1] += 1
        ends = np.cumsum(self.document_lengths)[is_filled]
        ids = np.insert(self.ids, ends, np.int32(eod))
        return EncodedDocuments(ids, lengths, self.sequence_counts)


def _sums(values: NDArray[Any], counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """Sums of consecutive groups of ``values``, of which each has that many, possibly none."""
    sums = np.concatenate(([0], np.cumsum(values, dtype=np.int64)))
    return np.diff(sums[np.concatenate(([0], np.cumsum(counts)))])


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    """How megatron-core stores the ids of a vocabulary: ``DType.optimal_dtype`` without torch."""
    return np.dtype(np.uint16 if vocab_size < _SMALL_VOCABULARY else np.int32)


class PartWriter:
    """Writes a part.

    Args:
        prefix: Its files are ``prefix.bin`` and ``prefix.npz``.
        dtype: How a token is stored.
    """

    def __init__(self, prefix: Path, dtype: np.dtype[Any]) -> None:
        self._prefix = prefix
        self._dtype = dtype
        self._limits = np.iinfo(dtype)
        self._stream: BinaryIO | None = None
        self._lengths: list[NDArray[np.int32]] = [np.zeros(0, np.int32)]
        self._counts: list[NDArray[np.int64]] = [np.zeros(0, np.int64)]

    def add(self, tokens: NDArray[Any], documents: EncodedDocuments) -> None:
        """Append ``tokens`` [N], which lie in sequences and documents as those of ``documents``.

        Raises:
            DataError: A token does not fit into the type that the size of the vocabulary gives.
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
