"""Likelihoods of each chunk's tokens under both models, and objectives that compare them.

T rows, Vp local columns, C chunks.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch

from megatron_ext.constants import NO_CHUNK
from megatron_ext.errors import LossError
from megatron_ext.losses.base import DistillationInputs, KnownAhead, LossOutput
from megatron_ext.losses.checks import check_alignment, check_student
from megatron_ext.losses.diagnostics import used_chunks
from megatron_ext.losses.lookup import places_after
from megatron_ext.losses.matched_columns import counted_ids
from megatron_ext.losses.objective import Evaluated, FusedObjective, Scale, label_scales
from megatron_ext.losses.targets import TargetKind, TeacherTargets
from megatron_ext.losses.vocabulary_match import BoundaryColumns
from megatron_ext.ops.chunk_rows import chunk_slots, index_sum
from megatron_ext.ops.token_likelihood import (
    TokenLikelihood,
    TokenRows,
    evaluate_token_likelihood,
    write_likelihood_gradient,
)


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


class LikelihoodObjective(FusedObjective):
    """Objective that compares the likelihoods of chunks, with the cross-entropy or without.

    The gradient of a row of logits follows from two numbers, those of its token's log-probability
    and of its set's log-mass, which autograd finds from [C] likelihoods; the cross-entropy adds to
    the first.
    """

    __slots__ = ()

    @property
    def reads_boundaries(self) -> bool:
        """Whether it reads the log-probability that a boundary follows; otherwise that is 0."""
        return False

    @abstractmethod
    def compare(self, inputs: DistillationInputs, chunks: ChunkLikelihoods) -> LossOutput:
        """The loss, with a graph to the student's likelihoods."""

    def evaluate(
        self,
        inputs: DistillationInputs,
        *,
        scale: Scale = 1.0,
        ce_scale: Scale | None = None,
        gradient: torch.Tensor | None = None,
    ) -> Evaluated:
        """See ``FusedObjective``. Collectives: see the class, and ``compare``."""
        check_student(inputs)
        kinds: tuple[TargetKind, ...] = ("logits", "hidden", "label")
        _, teacher = check_alignment(inputs, objective=self.name, kinds=kinds)
        labels = inputs.labels.flatten(), _teacher_labels(inputs, teacher, self.name).flatten()
        ids = counted_ids(inputs)
        asked = [
            torch.where(its == NO_CHUNK, -1, side) for its, side in zip(ids, labels, strict=True)
        ]
        has_ce, columns = ce_scale is not None, None
        if self.reads_boundaries:
            columns = _columns(inputs, teacher, self.name)
        student = TokenRows(
            inputs.student_logits.flatten(0, 1),
            labels[0] if has_ce else asked[0],
            None if columns is None else columns.student,
            inputs.student_shard,
        )
        found = evaluate_token_likelihood(
            student,
            _teacher_rows(teacher, asked[1], columns),
            with_top_column=has_ce,
            implementation=self.implementation,
        )
        own, its = found.student, found.teacher
        if its is None:
            its = _given(teacher, asked[1], own.log_prob.dtype, self.name, columns is not None)
        needs_gradient = gradient is not None
        on = [part.detach().requires_grad_(needs_gradient) for part in (own.log_prob, own.log_mass)]
        with torch.set_grad_enabled(needs_gradient):
            sides = own._replace(log_prob=on[0], log_mass=on[1]), its
            output = self.compare(inputs, _of_chunks(inputs, sides, labels, ids))
        if gradient is not None:
            # Scaled last: differences of divergences that cancel are exact for 1 alone.
            on_token, on_mass = (
                part * scale
                for part in torch.autograd.grad(output.loss_sum, on, materialize_grads=True)
            )
            if ce_scale is not None:
                on_token = on_token - label_scales(inputs, ce_scale)
            write_likelihood_gradient(
                student, found, on_token, on_mass, gradient, implementation=self.implementation
            )
        output = replace(output, loss_sum=output.loss_sum.detach())
        if self.tells_bad(inputs):
            assert own.log_sum is not None
            assert its.log_sum is not None
            output = replace(output, bad=partial(self.flags, inputs, own.log_sum, its.log_sum))
        return Evaluated(output, -own.log_prob if has_ce else None, found.top_column)

    def tells_bad(self, inputs: DistillationInputs) -> bool:
        """Whether likelihoods of both models are made of sums, which a row of NaN or +inf does not
        have."""
        return inputs.teacher is not None and inputs.teacher.kind != "label"


def _of_chunks(
    inputs: DistillationInputs,
    sides: tuple[TokenLikelihood, TokenLikelihood],
    labels: tuple[torch.Tensor, torch.Tensor],
    ids: tuple[torch.Tensor, torch.Tensor],
) -> ChunkLikelihoods:
    """Likelihoods of the inputs' chunks from those of both models' rows.

    Numbers of chunks that are not usable are arbitrary, but their rows, NaN included, reach no
    other chunk.
    """
    alignment = inputs.alignment
    assert alignment is not None
    assert inputs.teacher_labels is not None
    count = alignment.chunk_count
    usable = used_chunks(inputs, labelled_chunks(labels, ids, count))
    places = places_after(alignment, inputs.labels, inputs.teacher_labels)
    follows = usable & places[0].exists & places[1].exists
    boundaries = [
        torch.where(follows, side.log_mass[place.row], 0.0)
        for side, place in zip(sides, places, strict=True)
    ]
    sums = [_sum_rows(side.log_prob, its, count) for side, its in zip(sides, ids, strict=True)]
    return ChunkLikelihoods(sums[0], sums[1], boundaries[0], boundaries[1], follows, usable)


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


def _teacher_rows(
    teacher: TeacherTargets, asked: torch.Tensor, columns: BoundaryColumns | None
) -> TokenRows | None:
    """The teacher's rows, asked for ``asked``; None where its likelihoods are given."""
    if teacher.kind == "label":
        return None
    members = None if columns is None else columns.teacher
    return TokenRows(teacher.to_logits().flatten(0, 1), asked, members, teacher.shard)


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
