"""One shard's share of a dataset: the tokens as they will lie in the .bin file, and lengths.

A part is no Megatron dataset: writing one would load megatron-core and torch into every worker,
which takes seconds and hundreds of megabytes of memory. megatron-core's builder puts them together.

S sequences, D documents.
"""

from __future__ import annotations

from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from megatron_ext.errors import DataError
from megatron_ext.preprocessing.encoded_documents import EncodedDocuments

_SMALL_VOCABULARY = 65500


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
