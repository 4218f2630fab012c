"""Vocabulary match cut to one rank's columns, and rows of both models by counted chunks.

T rows, Vp local columns, C chunks, N common tokens.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from megatron_ext.constants import NO_CHUNK
from megatron_ext.distributed.vocab_parallel import MadeOnce, VocabShard
from megatron_ext.errors import LossError
from megatron_ext.losses.base import DistillationInputs
from megatron_ext.losses.checks import check_match
from megatron_ext.losses.lookup import chunk_rows
from megatron_ext.losses.targets import TeacherTargets
from megatron_ext.ops.chunk_rows import ChunkedLogits, ChunkRows
from megatron_ext.ops.matched_divergence import Matching


class MatchedColumns(NamedTuple):
    """This rank's columns of both sides with their matches."""

    matching: Matching

    student_rest: int
    """Tokens of the student's whole vocabulary without a match."""

    teacher_rest: int


_CACHE: MadeOnce[MatchedColumns] = MadeOnce()


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
    return _CACHE(match.common_student, match.common_teacher, shards, _columns)


def _columns(
    own: torch.Tensor, other: torch.Tensor, student: VocabShard, teacher: VocabShard
) -> MatchedColumns:
    rest = student.vocab_size - len(own), teacher.vocab_size - len(own)
    crossing = own // max(student.width, 1) != other // max(teacher.width, 1)
    matching = Matching(
        student_column=_partners(other, own, teacher),
        is_common=_partners(own, other, student) >= 0,
        with_rest=min(rest) > 0,
        pairs_cross=student.group is not None and bool(crossing.any()),
    )
    return MatchedColumns(matching, *rest)


def _partners(ids: torch.Tensor, partners: torch.Tensor, shard: VocabShard) -> torch.Tensor:
    """int64 [Vp]: the other side's token that each of this shard's columns matches, -1 for none."""
    size = max(shard.vocab_size, shard.stop)
    everywhere = torch.full((size,), -1, dtype=torch.int64, device=ids.device)
    everywhere[ids] = partners
    return everywhere[shard.start : shard.stop]


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
