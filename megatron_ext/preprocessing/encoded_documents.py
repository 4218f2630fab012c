"""Documents as token ids, one after another in flat arrays.

N tokens, S sequences, D documents. Megatron stores sequences of tokens and, for each document, how
many sequences are its own: one, or one for each sentence. Sequences without tokens are none, so a
document may have no sequence at all.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray


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
