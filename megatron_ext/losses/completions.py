"""Completions of chunks: tokens of two vocabularies that are the same text behind a prefix.

Where a student writes one token and its teacher several, the teacher's first tokens are a prefix of
the student's token, and the possible continuations of both are known: behind the prefix ``1``, the
student's ``17`` is the teacher's ``7``. ``ChunkCompletions`` are made where a microbatch's data is
loaded, from the ``CompletionTable`` of the pair.

B batch, Ts Tt tokens, C chunks, H chains, E completions, V Vs Vt vocabularies.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray

from megatron_ext.alignment.alignment import ChunkClass
from megatron_ext.alignment.batch import AlignmentBatch
from megatron_ext.losses.lookup import (
    ChunkSide,
    Completions,
    Ids,
    check_labels,
    ids_tensor,
    joined,
)
from megatron_ext.losses.vocabulary_match import IdTable
from megatron_ext.ops.partition_kl import ChainEdges, ChainRows, Chains, SingleRows
from megatron_ext.projection.speller import Speller
from megatron_ext.tokenizers.base import ByteTokenizer


@dataclass(frozen=True, slots=True, eq=False)
class PrefixPairs:
    """Tokens of one vocabulary that begin with a prefix, and the other's tokens for the rest.

    ``bytes(whole[i]) == prefix + bytes(part[i])``, neither of them empty.
    """

    row: dict[bytes, int]
    """Prefix -> row, in no order."""

    pointers: Ids
    """[rows + 1] start of each prefix's pairs."""

    whole: NDArray[np.int32]
    """[pairs] ascending within a prefix."""

    part: NDArray[np.int32]
    """[pairs]"""

    @classmethod
    def of(cls, whole_ids: dict[bytes, int], part_ids: dict[bytes, int]) -> PrefixPairs:
        """Build all pairs from the id of each spelling in both vocabularies."""
        row: dict[bytes, int] = {}
        rows: list[int] = []
        wholes: list[int] = []
        parts: list[int] = []
        for token, whole in whole_ids.items():
            for cut in range(1, len(token)):
                part = part_ids.get(token[cut:])
                if part is not None:
                    rows.append(row.setdefault(token[:cut], len(row)))
                    wholes.append(whole)
                    parts.append(part)
        order = np.lexsort((wholes, rows))
        counts = np.bincount(np.asarray(rows, dtype=np.int64), minlength=len(row))
        return cls(
            row=row,
            pointers=np.concatenate([[0], np.cumsum(counts)]).astype(np.int64),
            whole=np.asarray(wholes, dtype=np.int32)[order],
            part=np.asarray(parts, dtype=np.int32)[order],
        )

    def behind(self, prefix: bytes) -> tuple[Ids, Ids]:
        """Whole and part of every pair with this prefix."""
        row = self.row.get(prefix)
        if row is None:
            return np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64)
        pairs = slice(int(self.pointers[row]), int(self.pointers[row + 1]))
        return self.whole[pairs].astype(np.int64), self.part[pairs].astype(np.int64)


@dataclass(frozen=True, slots=True, eq=False)
class CompletionTable:
    """Completions of every prefix, between two vocabularies; built once for a pair.

    Several ids with the same bytes are represented by the one that the tokenizer emits.
    """

    student_bytes: Sequence[bytes | None]
    """[Vs] None for a control token."""

    teacher_bytes: Sequence[bytes | None]
    """[Vt]"""

    student_wholes: PrefixPairs
    """Prefix of teacher tokens; the student's whole token, the teacher's rest of it."""

    teacher_wholes: PrefixPairs
    """Prefix of student tokens; the teacher's whole token, the student's rest of it."""

    @classmethod
    def from_tokenizers(cls, student: ByteTokenizer, teacher: ByteTokenizer) -> CompletionTable:
        """Build the table of a pair; takes seconds for vocabularies of 150,000."""
        spellers = Speller(student), Speller(teacher)
        student_ids, teacher_ids = (
            {speller.tokens[token] or b"": token for token in sorted(speller.emitted_ids)}
            for speller in spellers
        )
        return cls._of(spellers[0].tokens, spellers[1].tokens, student_ids, teacher_ids)

    @classmethod
    def from_token_bytes(
        cls, student: Sequence[bytes | None], teacher: Sequence[bytes | None]
    ) -> CompletionTable:
        """Build the table from lists of bytes by id; the lowest id represents equal bytes."""
        return cls._of(student, teacher, *map(_lowest_ids, (student, teacher)))

    @classmethod
    def _of(
        cls,
        student: Sequence[bytes | None],
        teacher: Sequence[bytes | None],
        student_ids: dict[bytes, int],
        teacher_ids: dict[bytes, int],
    ) -> CompletionTable:
        return cls(
            student_bytes=student,
            teacher_bytes=teacher,
            student_wholes=PrefixPairs.of(student_ids, teacher_ids),
            teacher_wholes=PrefixPairs.of(teacher_ids, student_ids),
        )

    def of_batch(
        self, alignment: AlignmentBatch, student_labels: torch.Tensor, teacher_labels: torch.Tensor
    ) -> ChunkCompletions:
        """``ChunkCompletions.of`` a batch, on the CPU; a data loader's work."""
        return ChunkCompletions.of(alignment, student_labels, teacher_labels, self)

    def completions(
        self, student: Sequence[int], teacher: Sequence[int], limit: int | None = None
    ) -> tuple[Ids, Ids]:
        """Last tokens of both sides that spell the same text, the observed pair first.

        Args:
            student: The student's tokens of a chunk.
            teacher: The teacher's.
            limit: Most completions besides the observed one, those of the lowest whole ids; ids of
                most vocabularies grow with rarity. None: all.

        Returns:
            Student ids and teacher ids. Only the observed pair where both sides have several
            tokens or one each, or where their bytes are not known to be equal.
        """
        observed = np.array([student[-1]]), np.array([teacher[-1]])
        if (len(student) == 1) == (len(teacher) == 1):
            return observed
        mirrored = len(student) > 1
        whole, parts = (teacher[0], student) if mirrored else (student[0], teacher)
        spellings = (self.student_bytes, self.teacher_bytes)
        whole_bytes, part_bytes = spellings[::-1] if mirrored else spellings
        text, pieces = whole_bytes[whole], [part_bytes[part] for part in parts]
        if text is None or not all(pieces) or b"".join(p or b"" for p in pieces) != text:
            return observed
        pairs = self.teacher_wholes if mirrored else self.student_wholes
        paired_whole, paired_part = pairs.behind(text[: len(text) - len(pieces[-1] or b"")])
        # The table may hold the spelling of the observed pair under other ids.
        other = np.fromiter(
            (whole_bytes[token] != text for token in paired_whole.tolist()),
            dtype=np.bool_,
            count=len(paired_whole),
        )
        wholes = np.concatenate([[whole], paired_whole[other][:limit]]).astype(np.int64)
        last = np.concatenate([[parts[-1]], paired_part[other][:limit]]).astype(np.int64)
        return (last, wholes) if mirrored else (wholes, last)


def _lowest_ids(tokens: Sequence[bytes | None]) -> dict[bytes, int]:
    lowest: dict[bytes, int] = {}
    for token_id, token in enumerate(tokens):
        if token:
            lowest.setdefault(token, token_id)
    return lowest


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkCompletions(Completions):
    """Rows and completions that ``partition_kl`` compares; rows count over the flattened [B, T].

    Chunks of one token a side are ``singles``, all others ``chains``. A chunk of several tokens is
    left out where one of them has no label, since its observed text is then unknown.
    """

    singles: SingleRows

    chains: Chains

    chunk: torch.Tensor
    """[singles + H] int64: chunk of each single, ascending, and of each chain, ascending."""

    place: torch.Tensor
    """[C] int32: place of each chunk in ``chunk``, -1 of one that is left out."""

    @property
    def single_chunk(self) -> torch.Tensor:
        """[singles] of ``chunk``"""
        return self.chunk[: len(self.singles.student)]

    @property
    def chain_chunk(self) -> torch.Tensor:
        """[H] of ``chunk``"""
        return self.chunk[len(self.singles.student) :]

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
            limit: Most completions of a chunk besides the observed one, see
                ``CompletionTable.completions``; those left out count into the rest.

        Raises:
            LossError: Labels of another shape than the alignment, or outside the vocabularies.
        """
        sides = []
        for side, chunk_id, labels, spellings in (
            ("student", alignment.student_chunk_id, student_labels, table.student_bytes),
            ("teacher", alignment.teacher_chunk_id, teacher_labels, table.teacher_bytes),
        ):
            check_labels(side, chunk_id, labels, len(spellings))
            sides.append(ChunkSide(chunk_id.numpy(), labels.numpy(), alignment.chunk_count))
        classes = alignment.chunk_class.numpy()
        is_single = classes == ChunkClass.ONE_TO_ONE
        single_chunk = np.flatnonzero(is_single)
        chain_chunk = np.flatnonzero(~is_single & sides[0].is_labelled & sides[1].is_labelled)
        completions = [
            table.completions(
                sides[0].labels_of(chunk).tolist(), sides[1].labels_of(chunk).tolist(), limit
            )
            for chunk in chain_chunk.tolist()
        ]
        counts = [len(ids) for ids, _ in completions]
        own, its = (
            side.chain_rows(chain_chunk, joined([ids[number] for ids in completions]))
            for number, side in enumerate(sides)
        )
        completion_chain = ids_tensor(np.repeat(np.arange(len(completions)), counts))
        numbers = own.step_chain, its.step_chain, completion_chain
        chains = Chains(
            student=own,
            teacher=its,
            completion_chain=completion_chain,
            completion_pointers=(0, *np.cumsum(counts, dtype=np.int64).tolist()),
            longest=max((side.longest(chain_chunk) for side in sides), default=0),
            edges=ChainEdges.of(numbers, len(completions)),
        )
        chunk = np.concatenate([single_chunk, chain_chunk])
        place = np.full(alignment.chunk_count, -1, dtype=np.int32)
        place[chunk] = np.arange(len(chunk))
        return cls(
            singles=SingleRows(*(ids_tensor(side.first_rows(single_chunk)) for side in sides)),
            chains=chains,
            chunk=ids_tensor(chunk),
            place=torch.from_numpy(place),
            chunk_count=alignment.chunk_count,
        )

    def by_place(self, student: IdTable, teacher: IdTable) -> ChunkCompletions:
        """Replace ids by their places in a vocabulary layout."""
        chains = self.chains
        return replace(
            self,
            chains=chains._replace(
                student=_by_place(chains.student, student),
                teacher=_by_place(chains.teacher, teacher),
            ),
        )

    def each(self, change: Callable[[torch.Tensor], torch.Tensor]) -> ChunkCompletions:
        chains = self.chains
        return replace(
            self,
            singles=SingleRows(*map(change, self.singles)),
            chunk=change(self.chunk),
            place=change(self.place),
            chains=chains._replace(
                student=ChainRows(*map(change, chains.student)),
                teacher=ChainRows(*map(change, chains.teacher)),
                completion_chain=change(chains.completion_chain),
                edges=chains.edges and ChainEdges(*map(change, chains.edges)),
            ),
        )


def _by_place(rows: ChainRows, table: IdTable) -> ChainRows:
    return rows._replace(
        step_label=table.places_of(rows.step_label), completion=table.places_of(rows.completion)
    )
