"""Likelihoods of each chunk's tokens under both models. T rows, Vp local columns, C chunks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from megatron_ext.constants import NO_CHUNK
from megatron_ext.errors import LossError
from megatron_ext.losses.base import DistillationInputs, KnownAhead
from megatron_ext.losses.diagnostics import bad_flags, used_chunks
from megatron_ext.losses.lookup import places_after
from megatron_ext.losses.matched_columns import counted_ids
from megatron_ext.losses.targets import TeacherTargets
from megatron_ext.losses.vocabulary_match import BoundaryColumns
from megatron_ext.ops.chunk_rows import chunk_slots, index_sum
from megatron_ext.ops.launch import Implementation
from megatron_ext.ops.token_likelihood import TokenLikelihood, TokenRows, token_likelihood


class ChunkLikelihoods(NamedTuple):
    """Likelihoods [C], the same on every rank; the student's have a graph."""

    student: torch.Tensor
    """Sum of the log-probabilities of the chunk's student tokens."""

    teacher: torch.Tensor

    student_boundary: torch.Tensor
    """Log-probability that a boundary token follows, 0 where ``follows`` is False."""

    teacher_boundary: torch.Tensor

    follows: torch.Tensor
    """bool: both models predict the position after the chunk."""

    usable: torch.Tensor
    """bool: the chunk counts, and each of its positions has a label."""

    told: tuple[torch.Tensor | None, torch.Tensor | None]
    """``TokenLikelihood.log_sum`` of both models."""

    def bad(self, inputs: DistillationInputs) -> torch.Tensor:
        """``LossOutput.bad``, where ``tells_bad``."""
        student, teacher = self.told
        assert student is not None
        assert teacher is not None
        return bad_flags(inputs, student, teacher)


def tells_bad(inputs: DistillationInputs) -> bool:
    """Whether likelihoods of both models are made of sums, which a row of NaN or +inf does not
    have."""
    return inputs.teacher is not None and inputs.teacher.kind != "label"


def chunk_likelihoods(
    inputs: DistillationInputs,
    teacher: TeacherTargets,
    *,
    objective: str,
    with_boundary: bool,
    implementation: Implementation = "auto",
) -> ChunkLikelihoods:
    """Likelihoods of the inputs' chunks.

    Args:
        inputs: With an alignment that fits.
        teacher: Targets of the kind ``logits``, ``hidden`` or ``label``.
        objective: Its name, for errors.
        with_boundary: Compute boundary probabilities; otherwise they are 0.
        implementation: Implementation of ``token_likelihood``.

    Two all-reduces of at most [3 (Ts + Tt)]. Numbers of chunks that are not usable are
    arbitrary, but their rows, NaN included, reach no other chunk.

    Raises:
        LossError: No teacher labels, no boundaries, or ones that do not fit.
    """
    alignment = inputs.alignment
    assert alignment is not None
    teacher_labels = _teacher_labels(inputs, teacher, objective)
    labels = inputs.labels.flatten(), teacher_labels.flatten()
    chunk_ids = counted_ids(inputs)
    asked = tuple(
        torch.where(ids == NO_CHUNK, -1, side) for ids, side in zip(chunk_ids, labels, strict=True)
    )
    columns = _columns(inputs, teacher, objective) if with_boundary else None
    student = TokenRows(
        inputs.student_logits.flatten(0, 1),
        asked[0],
        None if columns is None else columns.student,
        inputs.student_shard,
    )
    rows = _rows(student, teacher, asked[1], columns, objective, implementation)

    count = alignment.chunk_count
    usable = used_chunks(inputs, labelled_chunks(labels, chunk_ids, count))
    places = places_after(alignment, inputs.labels, teacher_labels)
    follows = usable & places[0].exists & places[1].exists
    boundaries = [
        torch.where(follows, side.log_mass[place.row], 0.0)
        for side, place in zip(rows, places, strict=True)
    ]
    sums = [_sum_rows(side.log_prob, ids, count) for side, ids in zip(rows, chunk_ids, strict=True)]
    told = rows[0].log_sum, rows[1].log_sum
    return ChunkLikelihoods(sums[0], sums[1], boundaries[0], boundaries[1], follows, usable, told)


def labelled_chunks(
    labels: Sequence[torch.Tensor], chunk_ids: Sequence[torch.Tensor], count: int
) -> torch.Tensor:
    """Chunks of which every position has a label, bool [C], on all given sides ([T] each)."""
    missing = torch.zeros(count, dtype=torch.int64, device=labels[0].device)
    for side, ids in zip(labels, chunk_ids, strict=True):
        missing += _sum_rows((side < 0).to(torch.int64), ids, count)
    return missing == 0


def labelled_ahead(known: KnownAhead) -> torch.Tensor:
    """``labelled_chunks`` of the sides whose labels are known."""
    alignment = known.aligned
    labels, ids = [known.labels.flatten()], [alignment.student_chunk_id.flatten()]
    if known.teacher_labels is not None:
        labels.append(known.teacher_labels.flatten())
        ids.append(alignment.teacher_chunk_id.flatten())
    return labelled_chunks(labels, ids, alignment.chunk_count)


def _sum_rows(values: torch.Tensor, chunk_id: torch.Tensor, count: int) -> torch.Tensor:
    return index_sum(values, chunk_slots(chunk_id, count), count + 1)[:-1]


def _rows(
    student: TokenRows,
    teacher: TeacherTargets,
    asked: torch.Tensor,
    columns: BoundaryColumns | None,
    objective: str,
    implementation: Implementation,
) -> tuple[TokenLikelihood, TokenLikelihood]:
    """Likelihoods of both models' rows; ``asked`` are the teacher's tokens, negative for none."""
    if teacher.kind == "label":
        likelihood, _ = token_likelihood(student, implementation=implementation)
        dtype = likelihood.log_prob.dtype
        return likelihood, _given(teacher, asked, dtype, objective, columns is not None)
    other = TokenRows(
        teacher.to_logits().flatten(0, 1),
        asked,
        None if columns is None else columns.teacher,
        teacher.shard,
    )
    likelihood, teacher_likelihood = token_likelihood(student, other, implementation=implementation)
    assert teacher_likelihood is not None
    return likelihood, teacher_likelihood


def _given(
    teacher: TeacherTargets,
    asked: torch.Tensor,
    dtype: torch.dtype,
    objective: str,
    with_boundary: bool,
) -> TokenLikelihood:
    """Likelihoods that targets of the kind ``label`` hold."""
    log_probs, boundary = teacher.label_log_probs, teacher.boundary_log_probs
    assert log_probs is not None
    if boundary is None:
        if with_boundary:
            raise LossError(
                f"the objective {objective} needs the teacher's boundary log-probabilities",
                got="targets of kind 'label' without boundary_log_probs",
                fix="record them with the labels', or set debias to false and merge to none",
            )
        boundary = torch.zeros_like(log_probs)
    if boundary.shape != log_probs.shape:
        raise LossError(
            "the teacher's boundary log-probabilities do not fit its labels'",
            got=tuple(boundary.shape),
            expected=tuple(log_probs.shape),
        )
    asked_log_probs = log_probs.flatten().to(dtype).masked_fill(asked < 0, 0.0)
    return TokenLikelihood(asked_log_probs, boundary.flatten().to(dtype))


def _teacher_labels(
    inputs: DistillationInputs, teacher: TeacherTargets, objective: str
) -> torch.Tensor:
    labels = inputs.teacher_labels
    if labels is None or labels.shape != teacher.positions:
        raise LossError(
            f"the objective {objective} needs the labels of the teacher's positions",
            got="none" if labels is None else tuple(labels.shape),
            expected=tuple(teacher.positions),
        )
    return labels


def _columns(
    inputs: DistillationInputs, teacher: TeacherTargets, objective: str
) -> BoundaryColumns:
    columns = inputs.boundary
    if columns is None:
        raise LossError(
            f"the objective {objective} needs to know which tokens begin a word",
            got="no boundary columns",
            fix="make BoundaryColumns of the tokenizers' bytes, or set debias to false",
        )
    got = columns.student.shape[0], columns.teacher.shape[0]
    expected = inputs.student_shard.width, teacher.shard.width
    if got != expected:
        raise LossError(
            "the boundary columns are cut for other shards (student, teacher)",
            got=got,
            expected=expected,
        )
    return columns
