"""Rows and completions of a microbatch's chunks, made where its data is loaded.

B batch, Ts Tt tokens, C chunks, H chains, E completions.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray

from megatron_ext.alignment.batch import AlignmentBatch
from megatron_ext.alignment.chunk_class import ChunkClass
from megatron_ext.constants import NO_CHUNK
from megatron_ext.errors import LossError
from megatron_ext.losses.inputs.completion_table import CompletionTable
from megatron_ext.losses.inputs.id_table import IdTable
from megatron_ext.ops.partition_kl import ChainRows, Chains, SingleRows

Ids = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkCompletions:
    """What ``partition_kl`` compares in each chunk; rows count over the flattened [B, T].

    Chunks of one token a side are ``singles``, all others chains. A chunk of several tokens is
    left out where one of them has no label: what was observed is not known then.
    """

    singles: SingleRows

    single_chunk: torch.Tensor
    """[singles] int64: their chunks, ascending."""

    chains: Chains

    chain_chunk: torch.Tensor
    """[H] int64: theirs."""

    chunk_count: int
    """C of the alignment."""

    @classmethod
    def of(
        cls,
        alignment: AlignmentBatch,
        student_labels: torch.Tensor,
        teacher_labels: torch.Tensor,
        table: CompletionTable,
        *,
        limit: int | None = 4096,
    ) -> ChunkCompletions:
        """Look up the completions of a batch, on the CPU; a data loader's work.

        Args:
            alignment: Of the microbatch, on the CPU.
            student_labels: [B, Ts] int64: the token that each position predicts, negative for none.
            teacher_labels: [B, Tt] int64
            table: Of the two vocabularies.
            limit: Most completions of a chunk besides the realised one, see
                ``CompletionTable.completions``; those left out count into the rest.

        Raises:
            LossError: Labels of another shape than the alignment, or outside the vocabularies.
        """
        sides = []
        for side, chunk_id, labels, spellings in (
            ("student", alignment.student_chunk_id, student_labels, table.student_bytes),
            ("teacher", alignment.teacher_chunk_id, teacher_labels, table.teacher_bytes),
        ):
            _check(side, chunk_id, labels, len(spellings))
            sides.append(_Side(chunk_id.numpy(), labels.numpy(), alignment.chunk_count))
        classes = alignment.chunk_class.numpy()
        is_single = classes == ChunkClass.ONE_TO_ONE
        single_chunk = np.flatnonzero(is_single)
        chain_chunk = np.flatnonzero(~is_single & sides[0].is_labelled & sides[1].is_labelled)
        found = [
            table.completions(
                sides[0].labels_of(chunk).tolist(), sides[1].labels_of(chunk).tolist(), limit
            )
            for chunk in chain_chunk.tolist()
        ]
        counts = [len(student) for student, _ in found]
        chains = Chains(
            student=sides[0].chain_rows(chain_chunk, _joined([student for student, _ in found])),
            teacher=sides[1].chain_rows(chain_chunk, _joined([teacher for _, teacher in found])),
            completion_chain=_tensor(np.repeat(np.arange(len(found)), counts)),
            completion_pointers=(0, *np.cumsum(counts, dtype=np.int64).tolist()),
            longest=max((side.longest(chain_chunk) for side in sides), default=0),
        )
        return cls(
            singles=SingleRows(*(_tensor(side.first_rows(single_chunk)) for side in sides)),
            single_chunk=_tensor(single_chunk),
            chains=chains,
            chain_chunk=_tensor(chain_chunk),
            chunk_count=alignment.chunk_count,
        )

    def to(self, device: torch.device | str) -> ChunkCompletions:
        """The same on ``device``."""
        return self._each(lambda tensor: tensor.to(device, non_blocking=True))

    def pin_memory(self) -> ChunkCompletions:
        """The same in page-locked memory, from which ``to`` does not wait."""
        return self._each(torch.Tensor.pin_memory)

    def by_place(self, student: IdTable, teacher: IdTable) -> ChunkCompletions:
        """The same with places of a vocabulary layout instead of ids."""
        chains = self.chains
        return replace(
            self,
            chains=chains._replace(
                student=_by_place(chains.student, student),
                teacher=_by_place(chains.teacher, teacher),
            ),
        )

    def _each(self, change: Callable[[torch.Tensor], torch.Tensor]) -> ChunkCompletions:
        chains = self.chains
        return replace(
            self,
            singles=SingleRows(*map(change, self.singles)),
            single_chunk=change(self.single_chunk),
            chain_chunk=change(self.chain_chunk),
            chains=chains._replace(
                student=ChainRows(*map(change, chains.student)),
                teacher=ChainRows(*map(change, chains.teacher)),
                completion_chain=change(chains.completion_chain),
            ),
        )


class _Side:
    """The rows of each chunk on one side, in order."""

    def __init__(self, chunk_id: Ids, labels: Ids, chunk_count: int) -> None:
        flat = chunk_id.reshape(-1)
        used = np.flatnonzero(flat != NO_CHUNK)
        self._rows = used[np.argsort(flat[used], kind="stable")]
        self._labels = labels.reshape(-1)
        self._pointers = np.zeros(chunk_count + 1, dtype=np.int64)
        np.cumsum(np.bincount(flat[used], minlength=chunk_count), out=self._pointers[1:])
        unlabelled = np.bincount(flat[used], self._labels[used] < 0, minlength=chunk_count)
        self.is_labelled: NDArray[np.bool_] = unlabelled == 0
        """[C] every token of the chunk has a label."""

    def rows_of(self, chunk: int) -> Ids:
        rows: Ids = self._rows[self._pointers[chunk] : self._pointers[chunk + 1]]
        return rows

    def labels_of(self, chunk: int) -> Ids:
        labels: Ids = self._labels[self.rows_of(chunk)]
        return labels

    def first_rows(self, chunks: Ids) -> Ids:
        rows: Ids = self._rows[self._pointers[chunks]]
        return rows

    def longest(self, chunks: Ids) -> int:
        """Most tokens of one of the chunks, less the last."""
        sizes = np.diff(self._pointers)[chunks]
        return int(sizes.max(initial=1)) - 1

    def chain_rows(self, chunks: Ids, completion: Ids) -> ChainRows:
        rows = [self.rows_of(chunk) for chunk in chunks.tolist()]
        steps = [len(own) - 1 for own in rows]
        step_row = _joined([own[:-1] for own in rows])
        return ChainRows(
            step_row=_tensor(step_row),
            step_label=_tensor(self._labels[step_row]),
            step_chain=_tensor(np.repeat(np.arange(len(rows)), steps)),
            step_place=_tensor(_joined([np.arange(count) for count in steps])),
            last_row=_tensor(_joined([own[-1:] for own in rows])),
            completion=_tensor(completion),
        )


def _by_place(rows: ChainRows, table: IdTable) -> ChainRows:
    return rows._replace(
        step_label=table.places_of(rows.step_label), completion=table.places_of(rows.completion)
    )


def _joined(parts: list[Ids]) -> Ids:
    return np.concatenate([np.zeros(0, dtype=np.int64), *parts])


def _tensor(ids: Ids) -> torch.Tensor:
    return torch.from_numpy(ids.astype(np.int64))


def _check(side: str, chunk_id: torch.Tensor, labels: torch.Tensor, vocab_size: int) -> None:
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
