"""What is measured: objectives, and the ways there are to compute each."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch.nn import functional

from megatron_ext.losses import (
    LOSS_REGISTRY,
    DistillationInputs,
    LossPart,
    LossPlan,
)
from megatron_ext.ops.vocab_kl import vocab_kl_reference

from .counted_bytes import Teacher
from .eager_recipe import eager_cross_entropy, eager_projected_kl, eager_vocab_kl

Loss = Callable[[DistillationInputs], torch.Tensor]
"""Inputs -> a scalar with a graph."""


class NotThereError(Exception):
    """A way to compute an objective that this machine or version does not have; why."""


@dataclass(frozen=True, kw_only=True)
class Objective:
    """One loss under all its implementations."""

    name: str
    terms: tuple[tuple[str, dict[str, Any]], ...]
    """Registered objectives, with their options, that are added up."""

    teacher: Teacher = "logits"
    """See ``counted_bytes``."""

    same_vocabulary: bool = False
    needs_completions: bool = False
    others: dict[str, Callable[[], Loss]] = field(default_factory=dict)
    """Implementations beside ``triton`` and ``torch`` by name; made before they are timed."""

    @property
    def implementations(self) -> tuple[str, ...]:
        """Names, ours first."""
        return ("triton", "torch", *self.others)

    def loss(self, implementation: str) -> Loss:
        """How to compute it so.

        Raises:
            NotThereError: It cannot be computed so here.
        """
        if implementation in self.others:
            return self.others[implementation]()
        return self.added(implementation) if len(self.terms) == 1 else self.planned(implementation)

    def planned(self, implementation: str, *, in_place: bool = False) -> Loss:
        """The sum of the terms, as a run computes it.

        Raises:
            NotThereError: One of them cannot be computed so.
        """
        objectives = {
            name: _objective(name, options, implementation) for name, options in self.terms
        }
        weights = dict.fromkeys(objectives, 1.0)

        def total(inputs: DistillationInputs) -> torch.Tensor:
            parts = {
                name: LossPart(objective=each, inputs=inputs, term=name, count_name="one")
                for name, each in objectives.items()
            }
            plan = LossPlan(parts=parts, term_weights=weights)
            return plan.loss({"one": 1}, in_place=in_place).total

        return total

    def added(self, implementation: str) -> Loss:
        """The sum of the terms, each by an operation of its own.

        Raises:
            NotThereError: One of them cannot be computed so.
        """
        terms = [_objective(name, options, implementation) for name, options in self.terms]

        def total(inputs: DistillationInputs) -> torch.Tensor:
            losses = [term(inputs).loss_sum for term in terms]
            return losses[0] if len(losses) == 1 else torch.stack(losses).sum()

        return total


def _objective(name: str, options: dict[str, Any], implementation: str) -> Any:
    constructor = LOSS_REGISTRY[name]
    known = {field.name for field in dataclasses.fields(constructor)}  # type: ignore[arg-type]
    if implementation == "triton" and "implementation" not in known:
        raise NotThereError(f"{name} has no kernels")
    if "implementation" in known:
        return constructor(**options, implementation=implementation)
    return constructor(**options)


def _compiled(loss: Loss) -> Callable[[], Loss]:
    """``torch.compile`` of a loss, where there is a compiler."""

    def make() -> Loss:
        torch._dynamo.reset()
        compiled: Loss = torch.compile(loss, dynamic=False)
        return compiled

    return make


def plain_vocab_kl(inputs: DistillationInputs) -> torch.Tensor:
    """The reference of ``vocab_kl`` in fp32."""
    assert inputs.teacher is not None
    assert inputs.teacher.logits is not None
    width = inputs.student_shard.valid_width
    sides = (inputs.student_logits, inputs.teacher.logits)
    return vocab_kl_reference(*(side[..., :width].float() for side in sides)).sum()


def plain_projected_kl(inputs: DistillationInputs) -> torch.Tensor:
    """The formula of projected KL (``ops/projected_kl``, equations 1 to 6) in fp32, with autograd.

    Segment sums by ``index_add`` and the projection by its entries: the reference multiplies by a
    dense ``[Vs, Vt]``, which at 128,256 by 151,669 is 78 GB.
    """
    assert inputs.teacher is not None
    assert inputs.teacher.logits is not None
    assert inputs.alignment is not None
    assert inputs.projection is not None
    alignment, projection = inputs.alignment, inputs.projection
    count = alignment.chunk_count
    reachable = projection.reachable.nonzero()[:, 0]
    student = inputs.student_logits.flatten(0, 1)[:, : inputs.student_shard.valid_width]
    teacher = inputs.teacher.logits.flatten(0, 1)[:, reachable]
    p = _means(functional.softmax(teacher.float(), -1), alignment.teacher_chunk_id, count)
    q = _means(functional.softmax(student.float(), -1), alignment.student_chunk_id, count)
    weight = projection.weight
    counts = weight.crow_indices().diff()
    row = torch.repeat_interleave(torch.arange(len(counts), device=counts.device), counts)
    projected = q.new_zeros(count, projection.reachable.shape[0])
    projected = projected.index_add(1, weight.col_indices().long(), q[:, row] * weight.values())
    projected = projected[:, reachable]
    log_q = (projected / projected.sum(-1, keepdim=True)).clamp(min=1e-37).log()
    return (torch.xlogy(p, p) - p * log_q).sum()


def _means(probs: torch.Tensor, chunk_id: torch.Tensor, count: int) -> torch.Tensor:
    slots = torch.where(chunk_id < 0, count, chunk_id).flatten()
    total = probs.new_zeros(count + 1, probs.shape[-1]).index_add(0, slots, probs)
    sizes = torch.zeros_like(total[:, 0]).index_add(0, slots, torch.ones_like(probs[:, 0]))
    return total[:count] / sizes[:count, None]


def _eager_both(inputs: DistillationInputs) -> torch.Tensor:
    return eager_projected_kl(inputs) + eager_cross_entropy(inputs)


def _in_place() -> Loss:
    return OBJECTIVES[0].planned("triton", in_place=True)


def _two_operations() -> Loss:
    return OBJECTIVES[0].added("triton")


OBJECTIVES: Final = (
    Objective(
        name="projected_kl + next_token",
        terms=(("projected_kl", {}), ("next_token", {})),
        others={
            "eager": lambda: _eager_both,
            "triton, in place": _in_place,
            "triton, two operations": _two_operations,
        },
    ),
    Objective(
        name="projected_kl",
        terms=(("projected_kl", {}),),
        others={"eager": lambda: eager_projected_kl, "compiled": _compiled(plain_projected_kl)},
    ),
    Objective(name="partition_kl", terms=(("partition_kl", {}),), needs_completions=True),
    Objective(
        name="vocab_kl",
        terms=(("vocab_kl", {}),),
        same_vocabulary=True,
        others={"eager": lambda: eager_vocab_kl, "compiled": _compiled(plain_vocab_kl)},
    ),
    Objective(name="hybrid_kl", terms=(("hybrid_kl", {}),)),
    Objective(name="hybrid_kl + next_token", terms=(("hybrid_kl", {}), ("next_token", {}))),
    Objective(name="gold", terms=(("gold", {}),)),
    Objective(name="uld", terms=(("uld", {}),)),
    Objective(name="uld + next_token", terms=(("uld", {}), ("next_token", {}))),
    Objective(name="strict_topk", terms=(("strict_topk", {}),)),
    Objective(name="strict_topk + next_token", terms=(("strict_topk", {}), ("next_token", {}))),
    Objective(name="alm", terms=(("alm", {}),), teacher="statistics"),
    Objective(
        name="alm + next_token",
        terms=(("alm", {}), ("next_token", {})),
        teacher="statistics",
    ),
    Objective(
        name="next_token",
        terms=(("next_token", {}),),
        teacher="none",
        others={"eager": lambda: eager_cross_entropy},
    ),
)
