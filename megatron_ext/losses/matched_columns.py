"""Vocabulary match cut to one rank's columns, and rows of both models by counted chunks.

T rows, Vp local columns, C chunks, N common tokens.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.utils.weak import WeakIdKeyDictionary

from megatron_ext.alignment.batch import AlignmentBatch
from megatron_ext.constants import NO_CHUNK
from megatron_ext.distributed.vocab_parallel import VocabShard
from megatron_ext.errors import LossError
from megatron_ext.losses.base import DistillationInputs
from megatron_ext.losses.checks import check_match
from megatron_ext.losses.targets import TeacherTargets
from megatron_ext.losses.vocabulary_match import VocabularyMatch
from megatron_ext.ops.chunk_rows import ChunkedLogits, ChunkRows
from megatron_ext.ops.matched_divergence import Matching


class MatchedColumns(NamedTuple):
    """This rank's columns of both sides with their matches."""

    student_common: torch.Tensor
    """bool [Vps]: columns with a match; False in padding."""

    teacher_common: torch.Tensor
    """bool [Vpt]"""

    student_column: torch.Tensor
    """int64 [Vpt]: the global student column that each teacher column matches, -1 for none."""

    student_rest: int
    """Tokens of the student's whole vocabulary without a match."""

    teacher_rest: int

    matching: Matching
    """The same for ``ops/matched_divergence``."""

    def student_matched(self, shard: VocabShard) -> torch.Tensor:
        """bool [Vps]: columns that are matched or padding."""
        return _or_padding(self.student_common, shard)

    def teacher_matched(self, shard: VocabShard) -> torch.Tensor:
        """bool [Vpt]"""
        return _or_padding(self.teacher_common, shard)


_CACHE: WeakIdKeyDictionary = WeakIdKeyDictionary()
"""Cache: tensor of common student tokens -> columns by teacher tokens and shards."""


def matched_columns(
    inputs: DistillationInputs, teacher: TeacherTargets, *, objective: str
) -> MatchedColumns:
    """Cut the inputs' match to this rank's columns, once a match: that waits for the device.

    No collectives: every rank has all pairs.

    Raises:
        LossError: There is no match, its sides differ in number, or it has more tokens than a
            vocabulary.
    """
    match, shards = check_match(inputs, objective=objective), (inputs.student_shard, teacher.shard)
    count, smaller = len(match.common_student), min(shard.vocab_size for shard in shards)
    if count > smaller:
        raise LossError(
            f"the vocabulary match of the objective {objective} does not pair tokens one to one",
            got=f"{count} student and {count} teacher tokens",
            expected=f"equally many, at most {smaller}",
        )
    tables = _CACHE.setdefault(match.common_student, {})
    key = (id(match.common_teacher), *shards)
    if key not in tables:
        # Keeps the teacher's tokens alive, so that no other tensor can have their id.
        tables[key] = (match.common_teacher, _columns(match, *shards))
    columns: MatchedColumns = tables[key][1]
    return columns


def _columns(match: VocabularyMatch, student: VocabShard, teacher: VocabShard) -> MatchedColumns:
    own, other = match.common_student, match.common_teacher
    student_common = _partners(own, other, student) >= 0
    student_column = _partners(other, own, teacher)
    rest = student.vocab_size - len(own), teacher.vocab_size - len(own)
    crossing = own // max(student.width, 1) != other // max(teacher.width, 1)
    return MatchedColumns(
        student_common=student_common,
        teacher_common=student_column >= 0,
        student_column=student_column,
        student_rest=rest[0],
        teacher_rest=rest[1],
        matching=Matching(
            student_column,
            student_common,
            with_rest=min(rest) > 0,
            pairs_cross=student.group is not None and bool(crossing.any()),
        ),
    )


def _partners(ids: torch.Tensor, partners: torch.Tensor, shard: VocabShard) -> torch.Tensor:
    """int64 [Vp]: the other side's token that each of this shard's columns matches, -1 for none."""
    size = max(shard.vocab_size, shard.stop)
    everywhere = torch.full((size,), -1, dtype=torch.int64, device=ids.device)
    everywhere[ids] = partners
    return everywhere[shard.start : shard.stop]


def _or_padding(common: torch.Tensor, shard: VocabShard) -> torch.Tensor:
    padding = shard.excluded_columns(common.device)
    return common if padding is None else common | padding


def counted_ids(inputs: DistillationInputs) -> tuple[torch.Tensor, torch.Tensor]:
    """Student [B Ts] and teacher [B Tt] chunk ids, ``NO_CHUNK`` outside ``chunk_mask``.

    No objective reads rows without a chunk, so their content, NaN included, is neither in the value
    nor in the gradient.
    """
    alignment = inputs.alignment
    assert alignment is not None
    student, teacher = alignment.student_chunk_id.flatten(), alignment.teacher_chunk_id.flatten()
    mask = inputs.chunk_mask
    if mask is None:
        return student, teacher
    # NO_CHUNK is -1, which indexes this extra last entry.
    counts = torch.cat([mask, mask.new_zeros(1)])
    return (
        torch.where(counts[student], student, NO_CHUNK),
        torch.where(counts[teacher], teacher, NO_CHUNK),
    )


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


def counted_rows(inputs: DistillationInputs) -> tuple[ChunkRows, ChunkRows]:
    """``chunk_rows`` of ``counted_ids``."""
    assert inputs.alignment is not None
    if inputs.chunk_mask is None:
        return chunk_rows(inputs.alignment)
    student, teacher = counted_ids(inputs)
    count = inputs.alignment.chunk_count
    return ChunkRows.of(student, count), ChunkRows.of(teacher, count)


def chunked_pair(
    inputs: DistillationInputs, teacher: TeacherTargets, rows: tuple[ChunkRows, ChunkRows]
) -> tuple[ChunkedLogits, ChunkedLogits]:
    """Student's and teacher's logits, with the rows [B Ts] and [B Tt] of each chunk."""
    student, logits = inputs.student_logits.flatten(0, 1), teacher.to_logits().flatten(0, 1)
    return (
        ChunkedLogits(student, rows[0], inputs.student_shard),
        ChunkedLogits(logits, rows[1], teacher.shard),
    )
