"""The loss of a microbatch, each part of which is told beforehand what its sum is multiplied by.

B batch, Ts tokens, Vp local columns.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from megatron_ext.losses.base import LossOutput
from megatron_ext.losses.combined import PlannedPart
from megatron_ext.losses.linear.tile_evaluation import evaluate_tile, has_evaluation
from megatron_ext.losses.objectives.next_token import NextTokenLoss
from megatron_ext.ops.unit_gradient import hand_over

Scale = float | torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class AnnouncedLoss:
    """``sum over parts: scale * loss_sum``, which is ``CombinedOutput.total``."""

    total: torch.Tensor
    """fp32 scalar with a graph; the same on every tensor-parallel rank."""

    outputs: dict[str, LossOutput]
    """Of every part, in the order of the parts. Sums that were computed together have no graph."""

    scales: dict[str, Scale]


def announced_loss(
    parts: Mapping[str, PlannedPart],
    term_weights: Mapping[str, float],
    global_counts: Mapping[str, torch.Tensor | int],
    *,
    in_place: bool = False,
) -> AnnouncedLoss:
    """Compute the parts, with gradients that are written once, for the weights they will get.

    The cross-entropy goes with the first objective that reads the same logits and labels in one
    sweep (``losses/linear/evaluations.py``), forward and gradient together.

    Args:
        parts: By name; all read the same logits.
        term_weights: As of ``CombinedOutput``; by term.
        global_counts: The same, by ``count_name``.
        in_place: Whether the logits, which nobody reads afterwards, may become their gradient.

    Collectives: those of the objectives, in one order on every rank.
    """
    scales = {name: part.scale(term_weights, global_counts) for name, part in parts.items()}
    pair = _swept_together(parts, scales)
    is_alone = set(pair) == set(parts)
    outputs: dict[str, LossOutput] = {}
    shares = []
    if pair:
        together = {name: parts[name] for name in pair}
        swept = _Swept(together, scales, in_place=in_place and is_alone)
        shares.append(swept.total())
        outputs |= swept.outputs
    for name, part in parts.items():
        if name not in pair:
            scale = scales[name]
            told = replace(part.inputs, announced=1.0 if _is_zero(scale) else scale)
            outputs[name] = part.objective(told)
            shares.append(outputs[name].loss_sum * scale)
    return AnnouncedLoss(
        total=torch.stack(shares).sum(),
        outputs={name: outputs[name] for name in parts},
        scales=scales,
    )


def _is_zero(scale: Scale) -> bool:
    """Known on the host to be 0. Nothing is announced then, so that the part is measured."""
    return not isinstance(scale, torch.Tensor) and scale == 0


def _swept_together(parts: Mapping[str, PlannedPart], scales: Mapping[str, Scale]) -> list[str]:
    """The first objective that takes the cross-entropy along, and that; or nothing."""
    labelled = [name for name, part in parts.items() if isinstance(part.objective, NextTokenLoss)]
    if len(labelled) != 1 or _is_zero(scales[labelled[0]]):
        return []
    labels = parts[labelled[0]].inputs.labels
    for name, part in parts.items():
        is_fit = name not in labelled and has_evaluation(part.objective, part.inputs)
        if is_fit and part.inputs.labels is labels and not _is_zero(scales[name]):
            return [name, labelled[0]]
    return []


class _Swept:
    """An objective and a cross-entropy from one sweep over the logits."""

    def __init__(
        self, parts: Mapping[str, PlannedPart], scales: Mapping[str, Scale], *, in_place: bool
    ) -> None:
        self._objectives = {name: part.objective for name, part in parts.items()}
        self._scales = {name: scales[name] for name in parts}
        # Of the objective: the cross-entropy needs nothing that these have not.
        self._inputs = next(iter(parts.values())).inputs
        self._in_place = in_place
        self.outputs: dict[str, LossOutput] = {}

    def total(self) -> torch.Tensor:
        """fp32 scalar with a graph; fills ``outputs``."""
        logits = self._inputs.student_logits
        needed = logits.requires_grad and torch.is_grad_enabled()
        total: torch.Tensor = _TotalOfSweep.apply(logits, self, needed)
        return total

    def evaluate(
        self, logits: torch.Tensor, needs_gradient: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The total and its gradient over the logits, without a graph."""
        room = logits.detach().contiguous()
        if needs_gradient and not self._in_place and room.data_ptr() == logits.data_ptr():
            room = room.clone()
        found = evaluate_tile(
            self._objectives,
            self._scales,
            replace(self._inputs, student_logits=room),
            needs_gradient=needs_gradient,
        )
        self.outputs = found.outputs
        sums = [out.loss_sum * self._scales[name] for name, out in found.outputs.items()]
        return torch.stack(sums).sum(), found.gradient


class _TotalOfSweep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, swept: _Swept, needed: bool) -> torch.Tensor:
        total, gradient = swept.evaluate(logits, needed)
        if needed and gradient is not None and gradient.data_ptr() == logits.data_ptr():
            # A reader of the logits that comes later is an error of autograd, not a wrong number.
            torch.autograd.graph.increment_version(logits)
        ctx.save_for_backward(gradient)
        ctx.shape = logits.shape
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        (gradient,) = ctx.saved_tensors
        rows = grad.float().expand(len(gradient))
        return hand_over(gradient, rows, None).view(ctx.shape), None, None
