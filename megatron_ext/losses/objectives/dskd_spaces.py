"""DSKD's projectors, and its terms a slice of positions at a time, without whole projected logits.

C positions, n positions of a slice, T student rows, Ds Dt hidden, Vp Vps Vpt local columns,
N common tokens.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch.autograd.function import once_differentiable

from megatron_ext.distributed.shard_collectives import all_reduce_sum, copy_to_shards, group_size
from megatron_ext.distributed.vocab_parallel import VocabShard, row_slices
from megatron_ext.errors import LossError
from megatron_ext.losses.vocabulary_match import VocabularyMatch
from megatron_ext.ops.unit_gradient import transfer


class Spaces(NamedTuple):
    """Logits of the positions of a slice, this rank's columns."""

    student: torch.Tensor
    """[n, Vps]"""

    student_projected: torch.Tensor
    """[n, Vps] of the teacher's hidden states, under the student's head."""

    teacher: torch.Tensor
    """[n, Vpt]"""

    teacher_projected: torch.Tensor
    """[n, Vpt] of the student's hidden states, under the teacher's head."""


class Terms(NamedTuple):
    """Terms [C] of each position, replicated over the group. ``loss`` has a graph."""

    loss: torch.Tensor
    cross_entropy: torch.Tensor
    kd_student: torch.Tensor
    kd_teacher: torch.Tensor
    gate: torch.Tensor
    """bool"""

    hits: torch.Tensor
    """bool: True where the target has the largest projected logit."""

    target: torch.Tensor
    """int64, negative for none."""


class SliceTerms(Protocol):
    """Function that computes the terms of a slice; their loss has a graph to the logits."""

    def __call__(self, spaces: Spaces, positions: slice) -> Terms: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Positions:
    """Compared positions and the heads, none of which gets a gradient."""

    rows: torch.Tensor
    """int64 [C]: rows of the student's logits, all different."""

    hidden: torch.Tensor
    """[C, Dt]: the teacher's hidden states."""

    student_head: torch.Tensor
    """[Vps, Ds]"""

    teacher_head: torch.Tensor
    """[Vpt, Dt]"""

    student_shard: VocabShard
    teacher_shard: VocabShard


def terms_by_slice(
    student_logits: torch.Tensor,
    onto_student: torch.Tensor,
    onto_teacher: torch.Tensor,
    positions: Positions,
    terms: SliceTerms,
    *,
    grad_scale: torch.Tensor,
) -> Terms:
    """Terms of all positions, with the gradient of their loss.

    The forward computes the gradients, for the upstream gradient ``grad_scale``.

    Args:
        student_logits: [T, Vps]
        onto_student: [C, Ds] the teacher's hidden states, projected; replicated.
        onto_teacher: [C, Dt] the student's hidden states, projected; replicated.
        grad_scale: [C], the gradient that each loss will get; a row of scale 0 gets none.

    Collectives: those of ``terms`` in every slice; backward an all-reduce of [C, Ds] and one of
    [C, Dt]. Keeps the gradients.
    """
    outputs = _TermsBySlice.apply(
        student_logits,
        copy_to_shards(onto_student, positions.student_shard.group),
        copy_to_shards(onto_teacher, positions.teacher_shard.group),
        positions,
        terms,
        grad_scale,
        torch.is_grad_enabled(),
    )
    return Terms(*outputs)


class _TermsBySlice(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        student_logits: torch.Tensor,
        onto_student: torch.Tensor,
        onto_teacher: torch.Tensor,
        positions: Positions,
        terms: SliceTerms,
        grad_scale: torch.Tensor,
        is_grad_enabled: bool,
    ) -> tuple[torch.Tensor, ...]:
        inputs = (student_logits, onto_student, onto_teacher)
        needs = [is_grad_enabled and need for need in ctx.needs_input_grad[:3]]
        gradients = [
            torch.zeros_like(value) if need else None
            for value, need in zip(inputs, needs, strict=True)
        ]
        count = len(positions.rows)
        widest = max(student_logits.shape[1], len(positions.teacher_head))
        slices = []
        # One slice at least, so that there are outputs of the right dtypes.
        for part in list(row_slices(count, widest, device=student_logits.device)) or [slice(0, 0)]:
            rows = positions.rows[part]
            leaves = [
                value.detach().requires_grad_(need)
                for value, need in zip(
                    (student_logits[rows], onto_student[part], onto_teacher[part]),
                    needs,
                    strict=True,
                )
            ]
            with torch.set_grad_enabled(any(needs)):
                out = terms(_spaces(leaves, positions, part), part)
            slices.append([value.detach() for value in out])
            if not out.loss.requires_grad:
                continue
            trained = [leaf for leaf in leaves if leaf.requires_grad]
            slice_gradients = iter(
                torch.autograd.grad(
                    out.loss, trained, grad_scale[part].to(out.loss.dtype), materialize_grads=True
                )
            )
            every: tuple[torch.Tensor | slice, ...] = (rows, part, part)
            for gradient, places in zip(gradients, every, strict=True):
                if gradient is not None:
                    gradient[places] = next(slice_gradients)
        ctx.save_for_backward(*gradients, grad_scale, positions.rows)
        outputs = [torch.cat(values) for values in zip(*slices, strict=True)]
        ctx.mark_non_differentiable(*outputs[1:])
        return tuple(outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor, *_: Any) -> tuple[Any, ...]:
        logits, onto_student, onto_teacher, grad_scale, rows = ctx.saved_tensors
        scale = (grad / grad_scale).masked_fill_(grad_scale == 0, 0.0)[:, None]
        if logits is not None:
            slots = torch.full_like(logits[:, 0], len(rows), dtype=torch.int64)
            slots[rows] = torch.arange(len(rows), device=rows.device)
            logits = transfer(logits, grad, grad_scale, slots=slots)
        others = (
            None if value is None else value * scale for value in (onto_student, onto_teacher)
        )
        return logits, *others, None, None, None, None


def _spaces(leaves: list[torch.Tensor], positions: Positions, part: slice) -> Spaces:
    student, onto_student, onto_teacher = leaves
    return Spaces(
        student=student,
        student_projected=_under_head(onto_student, positions.student_head),
        teacher=_under_head(positions.hidden[part], positions.teacher_head),
        teacher_projected=_under_head(onto_teacher, positions.teacher_head),
    )


def _under_head(hidden: torch.Tensor, head: torch.Tensor) -> torch.Tensor:
    return hidden.to(head.dtype) @ head.detach().t()


class DskdProjectors(torch.nn.Module):
    """The two linear maps of DSKD, replicated over the tensor-parallel group.

    Parameters are fp32 and initialised from a seed, so that every rank has the same ones. Their
    gradients are complete on every rank: a trainer reduces them over data-parallel replicas alone.
    """

    def __init__(self, *, student_hidden: int, teacher_hidden: int, seed: int = 0) -> None:
        super().__init__()
        self.student_hidden = student_hidden
        self.teacher_hidden = teacher_hidden
        generator = torch.Generator().manual_seed(seed)
        self.teacher_to_student = _random(student_hidden, teacher_hidden, generator)
        """[Ds, Dt]"""
        self.student_to_teacher: torch.nn.Parameter | None
        self.student_to_teacher = _random(teacher_hidden, student_hidden, generator)
        """[Dt, Ds]; None where it is computed from the heads."""
        # Made from the frozen teacher, so a resumed run makes them again.
        self.matched_rows: torch.Tensor | None
        self.inverse_gram: torch.Tensor | None
        self.register_buffer("matched_rows", None, persistent=False)
        self.register_buffer("inverse_gram", None, persistent=False)

    @classmethod
    @torch.no_grad()
    def from_heads(
        cls,
        student_head_weight: torch.Tensor,
        teacher_head_weight: torch.Tensor,
        match: VocabularyMatch,
        *,
        student_shard: VocabShard,
        teacher_shard: VocabShard,
    ) -> DskdProjectors:
        """DSKDv2's maps, by pseudo-inverses of the heads' rows of common tokens.

        With ``E_s`` [N, Ds] and ``E_t`` [N, Dt] the rows of common tokens,
        ``A = pinv(E_s) E_t`` solves ``E_s A = E_t`` in least squares and initialises
        ``teacher_to_student``: a projected teacher state has, under the student's head, the logits
        that the state has under the teacher's. ``E_t B = E_s`` likewise; B is no parameter but is
        computed from the student's head as it learns.

        Collectives, once: all-reduces of [V', Dt] slices over the student's vocabulary, of [Ds, Ds]
        and of [Ds, Dt], [Dt, Dt]. Keeps [Vps, Dt] in the teacher's dtype.

        Raises:
            LossError: The vocabularies have no token in common.
        """
        if not len(match.common_student):
            raise LossError(
                "projectors from heads need tokens that both vocabularies have",
                got="no token in common",
                fix="make DskdProjectors from a seed instead",
            )
        made = cls(
            student_hidden=student_head_weight.shape[1],
            teacher_hidden=teacher_head_weight.shape[1],
        ).to(student_head_weight.device)
        rows = _matched_rows(teacher_head_weight, match, student_shard, teacher_shard)
        is_common = torch.zeros(
            max(student_shard.vocab_size, student_shard.stop),
            dtype=torch.bool,
            device=rows.device,
        )
        is_common[match.common_student] = True
        is_common = is_common[student_shard.start : student_shard.stop]
        group = student_shard.group
        common = student_head_weight.double().masked_fill(~is_common[:, None], 0.0)
        student_gram = all_reduce_sum(common.t() @ common, group)
        cross = all_reduce_sum(common.t() @ rows.double(), group)
        teacher_gram = all_reduce_sum(rows.double().t() @ rows.double(), group)
        start = torch.linalg.pinv(student_gram, hermitian=True) @ cross
        made.teacher_to_student.copy_(start)
        made.student_to_teacher = None
        made.matched_rows = rows
        made.inverse_gram = torch.linalg.pinv(teacher_gram, hermitian=True).float()
        return made

    def to_teacher_weight(
        self, student_head_weight: torch.Tensor, shard: VocabShard
    ) -> torch.Tensor:
        """[Dt, Ds]: the parameter, or B of ``from_heads``: one all-reduce of [Dt, Ds], no graph."""
        if self.student_to_teacher is not None:
            return self.student_to_teacher
        assert self.matched_rows is not None
        assert self.inverse_gram is not None
        with torch.no_grad():
            dtype = self.teacher_to_student.dtype
            local = self.matched_rows.to(dtype).t() @ student_head_weight.to(dtype)
            return self.inverse_gram.to(dtype) @ all_reduce_sum(local, shard.group)


def _random(rows: int, columns: int, generator: torch.Generator) -> torch.nn.Parameter:
    values = torch.randn(rows, columns, generator=generator) / math.sqrt(columns)
    return torch.nn.Parameter(values)


def _matched_rows(
    teacher_head_weight: torch.Tensor,
    match: VocabularyMatch,
    student_shard: VocabShard,
    teacher_shard: VocabShard,
) -> torch.Tensor:
    """[Vps, Dt]: the teacher's head row of each student column's match, 0 for none."""
    group, device = student_shard.group, teacher_head_weight.device
    width, hidden = student_shard.width, teacher_head_weight.shape[1]
    partner = torch.full((width * group_size(group),), -1, dtype=torch.int64, device=device)
    partner[match.common_student] = match.common_teacher
    local = partner - teacher_shard.start
    here = (local >= 0) & (local < teacher_shard.valid_width)
    matched = teacher_head_weight.new_zeros(width, hidden)
    for rows in row_slices(len(partner), hidden, device=device):
        part = teacher_head_weight[torch.where(here[rows], local[rows], 0)]
        part = all_reduce_sum(part.masked_fill(~here[rows, None], 0.0), group)
        first = max(rows.start, student_shard.start)
        last = min(rows.stop, student_shard.stop)
        if first < last:
            local_rows = slice(first - student_shard.start, last - student_shard.start)
            matched[local_rows] = part[first - rows.start : last - rows.start]
    return matched
