"""DSKD's terms a slice of positions at a time: projected logits are never whole.

C positions, T student rows, Ds Dt hidden, Vps Vpt local columns.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch.autograd.function import once_differentiable

from megatron_ext.distributed.shard_collectives import copy_to_shards
from megatron_ext.distributed.vocab_parallel import VocabShard, row_slices
from megatron_ext.ops.unit_gradient import hand_over_chunks


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
    """[C] each, replicated over the group. ``loss`` has a graph."""

    loss: torch.Tensor
    cross_entropy: torch.Tensor
    kd_student: torch.Tensor
    kd_teacher: torch.Tensor
    gate: torch.Tensor
    """bool"""

    hits: torch.Tensor
    """bool: the largest projected logit is the target's."""

    target: torch.Tensor
    """int64, negative for none."""


class SliceTerms(Protocol):
    """What is computed of a slice; its loss has a graph to the logits."""

    def __call__(self, spaces: Spaces, positions: slice) -> Terms: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Positions:
    """What is compared, and under which heads. Nothing of it gets a gradient."""

    rows: torch.Tensor
    """int64 [C]: different rows of the student's logits."""

    hidden: torch.Tensor
    """[C, Dt] of the teacher."""

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
    announced: torch.Tensor,
) -> Terms:
    """``terms`` of all positions, with the gradient of their loss.

    The gradients are made in the forward, for the upstream gradient that is announced.

    Args:
        student_logits: [T, Vps]
        onto_student: [C, Ds] the teacher's hidden states, carried over; replicated.
        onto_teacher: [C, Dt] the student's.
        announced: [C], the gradient that each loss will get; a row announced 0 gets none.

    Collectives: those of ``terms`` in every slice; backward an all-reduce of [C, Ds] and one of
    [C, Dt]. Keeps the gradients.
    """
    outputs = _TermsBySlice.apply(
        student_logits,
        copy_to_shards(onto_student, positions.student_shard.group),
        copy_to_shards(onto_teacher, positions.teacher_shard.group),
        positions,
        terms,
        announced,
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
        announced: torch.Tensor,
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
        found = []
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
            found.append([value.detach() for value in out])
            if not out.loss.requires_grad:
                continue
            trained = [leaf for leaf in leaves if leaf.requires_grad]
            own = iter(
                torch.autograd.grad(
                    out.loss, trained, announced[part].to(out.loss.dtype), materialize_grads=True
                )
            )
            every: tuple[torch.Tensor | slice, ...] = (rows, part, part)
            for gradient, places in zip(gradients, every, strict=True):
                if gradient is not None:
                    gradient[places] = next(own)
        ctx.save_for_backward(*gradients, announced, positions.rows)
        outputs = [torch.cat(values) for values in zip(*found, strict=True)]
        ctx.mark_non_differentiable(*outputs[1:])
        return tuple(outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor, *_: Any) -> tuple[Any, ...]:
        logits, onto_student, onto_teacher, announced, rows = ctx.saved_tensors
        scale = (grad / announced).masked_fill_(announced == 0, 0.0)[:, None]
        if logits is not None:
            slots = torch.full_like(logits[:, 0], len(rows), dtype=torch.int64)
            slots[rows] = torch.arange(len(rows), device=rows.device)
            logits = hand_over_chunks(logits, grad, announced, slots)
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
