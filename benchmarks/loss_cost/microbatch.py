"""A microbatch of one rank: real vocabularies and chunks, random logits. T rows, V columns.

A rank of several is simulated in one process, without a group: its columns become a vocabulary of
their own, cut as the vocabulary layout cuts it, so that a student token and its teacher token are
on one rank. That says what one rank reads, writes and computes, and nothing of communication.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from megatron_ext.alignment.batch import AlignmentBatch
from megatron_ext.distributed.vocab_parallel import VocabShard
from megatron_ext.losses import (
    BoundaryColumns,
    ChunkCompletions,
    CompletionTable,
    DistillationInputs,
    ProjectionShard,
    TeacherTargets,
    VocabularyMatch,
)
from megatron_ext.projection import SparseProjection
from megatron_ext.projection.layout import VocabularyLayout
from megatron_ext.tokenizers.token_bytes import TokenBytes

from .pairs import Ids, Pair

Order = Literal["co_sharded", "original"]
"""Of both heads: as a run on a GPU lays them out, or as the tokenizers have their ids."""

PADDED_TO: Final = 128
"""Each rank's columns are a multiple of this, as in megatron-core."""


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Sizes that bytes are counted from."""

    student_rows: int
    teacher_rows: int
    student_columns: int
    """Padding included."""
    teacher_columns: int
    chunks: int
    entries: int
    """Of the projection."""
    direct_pairs: int
    """Student tokens that are one teacher token, which is no other's."""
    summed_columns: int
    """Reachable teacher columns that are not in a direct pair."""
    residual_rows: int
    """Student tokens with an entry in a summed column."""
    common: int
    """Tokens that both vocabularies have."""
    joined_rows: int
    """Student rows in chunks of several of them."""


@dataclass(frozen=True, kw_only=True)
class Text:
    """What is known of a microbatch before a model reads it."""

    labels: torch.Tensor
    """int64 [1, Ts]"""

    teacher_labels: torch.Tensor
    """int64 [1, Tt]"""

    alignment: AlignmentBatch
    completions: ChunkCompletions

    @property
    def lengths(self) -> tuple[int, int]:
        """Ts and Tt."""
        return self.labels.shape[1], self.teacher_labels.shape[1]


@dataclass(frozen=True, kw_only=True)
class RankVocabulary:
    """The columns of one rank as a pair of vocabularies; made once for all lengths."""

    pair: Pair
    projection: SparseProjection
    match: VocabularyMatch
    table: CompletionTable
    tokens: tuple[TokenBytes, TokenBytes]
    shards: tuple[VocabShard, VocabShard]
    columns: tuple[Ids, Ids]
    """Ids of the pair that this rank has, by column."""

    @classmethod
    def of(cls, pair: Pair, ranks: int, order: Order = "co_sharded") -> RankVocabulary:
        """Every ``ranks``-th common pair, and of the other tokens too."""
        partition = pair.projection.partition()
        columns = (
            _every(partition.common_student, partition.uncommon_student, ranks),
            _every(partition.common_teacher, partition.uncommon_teacher, ranks),
        )
        projection = _cut(pair.projection, columns) if ranks > 1 else pair.projection
        shards = (_shard(len(columns[0]), ranks), _shard(len(columns[1]), ranks))
        if order == "co_sharded":
            layout = VocabularyLayout.of(
                projection,
                rank_count=1,
                student_size=shards[0].width,
                teacher_size=shards[1].width,
            )
            projection = projection.permuted(layout)
            student, teacher = (
                side.ids[: side.vocab_size] for side in (layout.student, layout.teacher)
            )
            columns = (columns[0][student], columns[1][teacher])
        spellings = [
            [tokens[column] for column in side.tolist()]
            for tokens, side in zip(
                (pair.student_tokens, pair.teacher_tokens), columns, strict=True
            )
        ]
        return cls(
            pair=pair,
            projection=projection,
            match=VocabularyMatch.from_partition(projection.partition()),
            table=CompletionTable.from_token_bytes(*spellings),
            tokens=(TokenBytes.from_tokens(spellings[0]), TokenBytes.from_tokens(spellings[1])),
            shards=shards,
            columns=columns,
        )

    def microbatch(
        self,
        rows: int,
        *,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.bfloat16,
        seed: int = 0,
    ) -> DistillationInputs:
        """One sample of ``rows`` student tokens; the student's logits are a leaf with a gradient.

        Tokens of other ranks count as one of this rank's: what a loss does with a label costs the
        same whichever it is.
        """
        known = self.text(rows)
        logits = [
            random_logits((1, length, shard.width), device=device, dtype=dtype, seed=seed + side)
            for side, (length, shard) in enumerate(zip(known.lengths, self.shards, strict=True))
        ]
        teacher = TeacherTargets(kind="logits", shard=self.shards[1], logits=logits[1])
        return self.inputs(known, logits[0].requires_grad_(), teacher)

    def text(self, rows: int) -> Text:
        """Labels and chunks of ``rows`` student tokens, on the CPU."""
        text = self.pair.of_rows(rows)
        labels = [
            torch.from_numpy(_local(ids, columns))[None]
            for ids, columns in zip((text.student_ids, text.teacher_ids), self.columns, strict=True)
        ]
        alignment = AlignmentBatch.from_chunk_ids(
            torch.from_numpy(text.student_chunk)[None], torch.from_numpy(text.teacher_chunk)[None]
        )
        return Text(
            labels=labels[0],
            teacher_labels=labels[1],
            alignment=alignment,
            completions=ChunkCompletions.of(alignment, *labels, self.table),
        )

    def inputs(
        self, known: Text, student_logits: torch.Tensor, teacher: TeacherTargets
    ) -> DistillationInputs:
        """What an objective gets, on the device of the logits."""
        device = student_logits.device
        return DistillationInputs(
            student_logits=student_logits,
            student_shard=self.shards[0],
            labels=known.labels.to(device),
            teacher=teacher,
            teacher_labels=known.teacher_labels.to(device),
            alignment=known.alignment.to(device),
            projection=ProjectionShard.from_projection(
                self.projection,
                student_shard=self.shards[0],
                teacher_shard=self.shards[1],
                device=device,
            ),
            match=VocabularyMatch(
                common_student=self.match.common_student.to(device),
                common_teacher=self.match.common_teacher.to(device),
            ),
            boundary=BoundaryColumns.at_word_starts(
                *self.tokens,
                student_shard=self.shards[0],
                teacher_shard=self.shards[1],
                device=device,
            ),
            completions=known.completions.to(device),
        )

    def shape(self, rows: int) -> Shape:
        """Sizes of ``microbatch(rows)``, without making it."""
        text = self.pair.of_rows(rows)
        rows_of = np.diff(self.projection.indptr)
        degree = np.bincount(self.projection.indices, minlength=self.projection.shape[1])
        row = np.repeat(np.arange(len(rows_of)), rows_of)
        direct = (rows_of[row] == 1) & (degree[self.projection.indices] == 1)
        sizes = np.bincount(text.student_chunk[text.student_chunk >= 0])
        return Shape(
            student_rows=rows,
            teacher_rows=len(text.teacher_ids),
            student_columns=self.shards[0].width,
            teacher_columns=self.shards[1].width,
            chunks=1 + int(text.student_chunk.max()),
            entries=len(self.projection.values),
            direct_pairs=int(direct.sum()),
            summed_columns=int((degree > 0).sum() - direct.sum()),
            residual_rows=len(np.unique(row[~direct])),
            common=len(self.match.common_student),
            joined_rows=int(sizes[sizes > 1].sum()),
        )


def random_logits(
    shape: tuple[int, ...], *, device: torch.device | str, dtype: torch.dtype, seed: int
) -> torch.Tensor:
    """Normal numbers of standard deviation 3, made in ``dtype``."""
    generator = torch.Generator(device=device).manual_seed(seed)
    return torch.randn(shape, generator=generator, device=device, dtype=dtype).mul_(3)


def same_vocabulary(inputs: DistillationInputs, seed: int = 7) -> DistillationInputs:
    """The student's side with a teacher of its own tokenizer; for ``vocab_kl``."""
    logits = inputs.student_logits
    teacher = random_logits(
        tuple(logits.shape), device=logits.device, dtype=logits.dtype, seed=seed
    )
    return DistillationInputs(
        student_logits=logits,
        student_shard=inputs.student_shard,
        labels=inputs.labels,
        teacher=TeacherTargets(kind="logits", shard=inputs.student_shard, logits=teacher),
        teacher_labels=inputs.labels,
    )


def _every(common: Ids, others: Ids, ranks: int) -> Ids:
    return np.sort(np.concatenate([common[::ranks], others[::ranks]]))


def _cut(projection: SparseProjection, columns: tuple[Ids, Ids]) -> SparseProjection:
    """The entries within a rank, rows normalised again.

    A row of several entries of which one alone is within the rank is left out: it would look like a
    token that both vocabularies have, out of order.
    """
    onto = np.full(projection.shape[1], -1)
    onto[columns[1]] = np.arange(len(columns[1]))
    counts = np.diff(projection.indptr)
    row_of = np.repeat(np.arange(projection.shape[0]), counts)
    place = np.full(projection.shape[0], -1)
    place[columns[0]] = np.arange(len(columns[0]))
    rows, found = place[row_of], onto[projection.indices]
    inside = (rows >= 0) & (found >= 0)
    left = np.bincount(rows[inside], minlength=len(columns[0]))
    inside[inside] = (left[rows[inside]] > 1) | (counts[row_of[inside]] == 1)
    # A generated pair has exact rows among the uncommon ones, whose partner another rank may have.
    kept = np.bincount(rows[inside], minlength=len(columns[0]))
    return SparseProjection.from_entries(
        rows[inside],
        found[inside],
        projection.values[inside],
        (len(columns[0]), len(columns[1])),
        is_exact_row=projection.is_exact_row[columns[0]] & (kept == 1),
    )


def _shard(columns: int, ranks: int) -> VocabShard:
    """All columns of this rank, and its padding."""
    return VocabShard(start=0, stop=-(-columns // PADDED_TO) * PADDED_TO, vocab_size=columns)


def _local(ids: Ids, columns: Ids) -> NDArray[np.int64]:
    places = np.arange(1 + max(int(columns.max()), int(ids.max()))) % len(columns)
    places[columns] = np.arange(len(columns))
    return places[ids]
