"""What objectives look up of a batch's text, where its data is loaded.

B batch, T tokens, C chunks.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from megatron_ext.alignment.batch import AlignmentBatch
from megatron_ext.constants import NO_CHUNK
from megatron_ext.errors import LossError
from megatron_ext.losses.vocabulary_match import IdTable
from megatron_ext.ops.chunk_likelihood import ChunkedLabels, PlaceAfter
from megatron_ext.ops.chunk_rows import ChunkRows
from megatron_ext.ops.partition_kl import ChainRows

if TYPE_CHECKING:
    from typing_extensions import Self

Ids = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Completions(ABC):
    """What an objective reads of the texts of a batch beside its labels and alignment."""

    chunk_count: int
    """C, chunks of the alignment."""

    @abstractmethod
    def each(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Self:
        """The same with ``change`` of every tensor."""

    @abstractmethod
    def by_place(self, student: IdTable, teacher: IdTable) -> Self:
        """Replace ids by their places in a vocabulary layout."""

    def to(self, device: torch.device | str) -> Self:
        """Copy to ``device``."""
        return self.each(lambda tensor: tensor.to(device, non_blocking=True))

    def pin_memory(self) -> Self:
        """Copy to page-locked memory, from which ``to`` does not block."""
        return self.each(torch.Tensor.pin_memory)


class CompletionSource(Protocol):
    """Table of a pair of vocabularies in which the completions of batches are looked up."""

    def of_batch(
        self, alignment: AlignmentBatch, student_labels: torch.Tensor, teacher_labels: torch.Tensor
    ) -> Completions:
        """Look up a batch, on the CPU; a data loader's work.

        Args:
            alignment: Of the microbatch, on the CPU.
            student_labels: [B, Ts] int64: the token that each position predicts, negative for none.
            teacher_labels: [B, Tt] int64

        Raises:
            LossError: Labels of another shape than the alignment, or outside the vocabularies.
        """


def chunk_rows(alignment: AlignmentBatch) -> tuple[ChunkRows, ChunkRows]:
    """Student's and teacher's rows by chunk, which were sorted where data was loaded."""
    return (
        ChunkRows(
            alignment.student_order,
            alignment.student_offsets,
            alignment.student_chunk_id.flatten(),
        ),
        ChunkRows(
            alignment.teacher_order,
            alignment.teacher_offsets,
            alignment.teacher_chunk_id.flatten(),
        ),
    )


def chunked_labels(
    alignment: AlignmentBatch, labels: torch.Tensor, teacher_labels: torch.Tensor
) -> tuple[ChunkedLabels, ChunkedLabels]:
    """The student's labels [B, T] and the teacher's, with their chunks."""
    own, its = chunk_rows(alignment)
    return (
        ChunkedLabels(own, alignment.student_spans, labels, alignment.student_behind),
        ChunkedLabels(its, alignment.teacher_spans, teacher_labels, alignment.teacher_behind),
    )


def places_after(
    alignment: AlignmentBatch, labels: torch.Tensor, teacher_labels: torch.Tensor
) -> tuple[PlaceAfter, PlaceAfter]:
    """Rows after each chunk in the student's rows and in the teacher's; labels [B, T]."""
    own, its = chunked_labels(alignment, labels, teacher_labels)
    return own.after(), its.after()


class ChunkSide:
    """Rows and labels of each chunk on one side, in order."""

    def __init__(self, chunk_id: Ids, labels: Ids, chunk_count: int) -> None:
        flat = chunk_id.reshape(-1)
        used = np.flatnonzero(flat != NO_CHUNK)
        self._rows = used[np.argsort(flat[used], kind="stable")]
        self._labels = labels.reshape(-1)
        self._pointers = np.zeros(chunk_count + 1, dtype=np.int64)
        np.cumsum(np.bincount(flat[used], minlength=chunk_count), out=self._pointers[1:])
        unlabelled = np.bincount(flat[used], self._labels[used] < 0, minlength=chunk_count)
        self.is_labelled: NDArray[np.bool_] = unlabelled == 0
        """[C] chunks of which every token has a label."""

    def rows_of(self, chunk: int) -> Ids:
        """Rows of a chunk, ascending."""
        rows: Ids = self._rows[self._pointers[chunk] : self._pointers[chunk + 1]]
        return rows

    def labels_of(self, chunk: int) -> Ids:
        """Labels of a chunk's rows."""
        labels: Ids = self._labels[self.rows_of(chunk)]
        return labels

    def first_rows(self, chunks: Ids) -> Ids:
        """First row of each chunk."""
        rows: Ids = self._rows[self._pointers[chunks]]
        return rows

    def longest(self, chunks: Ids) -> int:
        """Largest number of tokens before the last one in any of the chunks."""
        sizes = np.diff(self._pointers)[chunks]
        return int(sizes.max(initial=1)) - 1

    def chain_rows(self, chunks: Ids, completion: Ids) -> ChainRows:
        """Rows of chunks of several tokens, for ``ops.partition_kl``."""
        rows = [self.rows_of(chunk) for chunk in chunks.tolist()]
        steps = [len(chunk_rows) - 1 for chunk_rows in rows]
        step_row = joined([chunk_rows[:-1] for chunk_rows in rows])
        return ChainRows(
            step_row=ids_tensor(step_row),
            step_label=ids_tensor(self._labels[step_row]),
            step_chain=ids_tensor(np.repeat(np.arange(len(rows)), steps)),
            step_place=ids_tensor(joined([np.arange(count) for count in steps])),
            last_row=ids_tensor(joined([chunk_rows[-1:] for chunk_rows in rows])),
            completion=ids_tensor(completion),
        )


def joined(parts: list[Ids]) -> Ids:
    """All ids one after another; no list, no ids."""
    return np.concatenate([np.zeros(0, dtype=np.int64), *parts])


def ids_tensor(ids: Ids) -> torch.Tensor:
    """int64, on the CPU."""
    return torch.from_numpy(ids.astype(np.int64))


def check_labels(side: str, chunk_id: torch.Tensor, labels: torch.Tensor, vocab_size: int) -> None:
    """Check labels of a batch against the chunk ids and the vocabulary of a table.

    Raises:
        LossError: Labels of another shape, or outside the vocabulary.
    """
    if labels.shape != chunk_id.shape:
        raise LossError(
            f"the {side}'s labels do not fit its chunk ids [B, T]",
            got=tuple(labels.shape),
            expected=tuple(chunk_id.shape),
        )
    if labels.numel() and int(labels.max()) >= vocab_size:
        raise LossError(
            f"a label of the {side} lies outside the vocabulary of the completions",
            got=int(labels.max()),
            expected=f"below {vocab_size}",
            fix="build the completion table from the tokenizers of the data",
        )
