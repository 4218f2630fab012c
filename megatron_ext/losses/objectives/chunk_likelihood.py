"""Likelihoods of each chunk's tokens under both models, and objectives that compare them.

T rows, Vp local columns, C chunks.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import replace
from functools import partial

import torch

from megatron_ext.errors import LossError
from megatron_ext.losses.base import DistillationInputs, KnownAhead, LossOutput
from megatron_ext.losses.checks import check_alignment, check_student
from megatron_ext.losses.diagnostics import chunk_output
from megatron_ext.losses.lookup import chunked_labels
from megatron_ext.losses.objective import Evaluated, FusedObjective, Scale
from megatron_ext.losses.targets import TargetKind, TeacherTargets
from megatron_ext.losses.vocabulary_match import BoundaryColumns
from megatron_ext.ops.chunk_likelihood import (
    ChunkLikelihoods,
    RowLikelihoods,
    chunk_likelihoods,
    labelled_chunks,
)
from megatron_ext.ops.launch import Implementation
from megatron_ext.ops.token_likelihood import (
    TokenLikelihood,
    TokenRows,
    evaluate_token_likelihood,
    write_likelihood_gradient,
)


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
        alignment, teacher = check_alignment(inputs, objective=self.name, kinds=kinds)
        labels = _teacher_labels(inputs, teacher, self.name)
        has_ce, columns = ce_scale is not None, None
        if self.reads_boundaries:
            columns = _columns(inputs, teacher, self.name)
        student = TokenRows(
            inputs.student_logits.flatten(0, 1),
            inputs.labels.flatten(),
            None if columns is None else columns.student,
            inputs.student_shard,
        )
        found = evaluate_token_likelihood(
            student,
            _teacher_rows(teacher, labels, columns),
            with_top_column=has_ce,
            implementation=self.implementation,
        )
        own, its = found.student, found.teacher
        if its is None:
            its = _given(teacher, own.log_prob.dtype, self.name, columns is not None)
        needs_gradient = gradient is not None
        on = [part.detach().requires_grad_(needs_gradient) for part in (own.log_prob, own.log_mass)]
        with torch.set_grad_enabled(needs_gradient):
            chunks = chunk_likelihoods(
                (RowLikelihoods(*on), RowLikelihoods(its.log_prob, its.log_mass)),
                chunked_labels(alignment, inputs.labels, labels),
                inputs.chunk_mask,
                implementation=self.implementation,
            )
            output = self.compare(inputs, chunks)
        if gradient is not None:
            # Scaled last: differences of divergences that cancel are exact for 1 alone.
            on_token, on_mass = (
                part * scale
                for part in torch.autograd.grad(output.loss_sum, on, materialize_grads=True)
            )
            if ce_scale is not None:
                # Rows without a label get nothing.
                on_token = on_token - ce_scale
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


def likelihood_output(
    inputs: DistillationInputs,
    chunk_loss: torch.Tensor,
    compared: torch.Tensor,
    kept: torch.Tensor,
    means: Mapping[str, torch.Tensor],
    *,
    implementation: Implementation,
) -> LossOutput:
    """``chunk_output`` of the ``kept`` chunks, with the metric ``impossible``: those of probability
    0, of all that are ``compared``; bool [C] each."""
    output = chunk_output(
        inputs, chunk_loss, usable=kept, means=means, implementation=implementation
    )
    count = compared.sum()
    impossible = (count - output.count).to(chunk_loss.dtype)
    return replace(output, metrics=output.metrics | {"impossible": (impossible, count)})


def labelled_ahead(known: KnownAhead) -> torch.Tensor:
    """``labelled_chunks`` of the sides whose labels are known."""
    alignment = known.aligned
    labels, ids = [known.labels.flatten()], [alignment.student_chunk_id.flatten()]
    if known.teacher_labels is not None:
        labels.append(known.teacher_labels.flatten())
        ids.append(alignment.teacher_chunk_id.flatten())
    return labelled_chunks(labels, ids, alignment.chunk_count)


def _teacher_rows(
    teacher: TeacherTargets, labels: torch.Tensor, columns: BoundaryColumns | None
) -> TokenRows | None:
    """The teacher's rows; None where its likelihoods are given."""
    if teacher.kind == "label":
        return None
    members = None if columns is None else columns.teacher
    return TokenRows(teacher.to_logits().flatten(0, 1), labels.flatten(), members, teacher.shard)


def _given(
    teacher: TeacherTargets, dtype: torch.dtype, objective: str, with_boundary: bool
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
    return TokenLikelihood(log_probs.flatten().to(dtype), boundary.flatten().to(dtype))


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
