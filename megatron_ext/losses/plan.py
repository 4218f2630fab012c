"""The loss of a microbatch: weighted parts, each divided by its global count.

Ts tokens, Vp local columns.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import reduce
from typing import TYPE_CHECKING

import torch

from megatron_ext.distributed.shard_collectives import all_reduce_sum
from megatron_ext.losses.base import DistillationInputs, LossOutput, SumCount
from megatron_ext.losses.fused_evaluation import evaluate_together, fuses, weighted_sum
from megatron_ext.losses.linear import LinearDistillation
from megatron_ext.losses.microbatch_tiles import MicrobatchTiles
from megatron_ext.losses.objective import FusedObjective, Objective, Scale, is_zero
from megatron_ext.losses.objectives.next_token import NextTokenLoss
from megatron_ext.ops.unit_gradient import kept_gradient

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

Count = torch.Tensor | int


@dataclass(frozen=True, slots=True, kw_only=True)
class LossPart:
    """One objective on one microbatch, with the weight and the count of its sum."""

    objective: Objective

    inputs: DistillationInputs

    term: str
    """Term of the loss that it belongs to, ``kd`` or ``ce``."""

    count_name: str
    """Name of the count that divides its sum. Parts of one name share one mean and add their
    counts."""

    weight: float | torch.Tensor = 1.0
    """Weight of its mean in the term; as a tensor, a scalar without a graph."""

    def scale(self, term_weights: Mapping[str, float], global_counts: Mapping[str, Count]) -> Scale:
        """Factor of its sum in the loss; no wait for the device.

        A float where it is known on the host, as for a weight of 0; else an fp32 scalar.
        """
        if is_zero(self.weight) or term_weights[self.term] == 0:
            return 0.0
        weight = term_weights[self.term] * self.weight
        count = _divisor(global_counts[self.count_name])
        # An integer count would be divided by in torch's default dtype.
        scale = weight / (count.float() if isinstance(count, torch.Tensor) else count)
        return scale.float() if isinstance(scale, torch.Tensor) else scale


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """A microbatch's share of the loss of the global batch."""

    total: torch.Tensor
    """``sum over parts: scale * loss_sum``, fp32 scalar with a graph; the same on every
    tensor-parallel rank."""

    outputs: dict[str, LossOutput]
    """Output of every part, in the order of the parts. Sums computed together have no graph."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossPlan:
    """``sum over terms: w_term * (sum over parts: w_part * loss_sum / N[count_name])``.

    Counts of parts differ, so that one (sum, count) is not enough: each teacher has its own chunks,
    and cross-entropy has tokens. ``N`` are the counts over the whole global batch, all
    microbatches, data- and context-parallel ranks, known before the student runs
    (``Objective.count_ahead``, ``reduce_counts``). With them the losses of the microbatches add up
    to that of the global batch, whatever the layout.
    """

    parts: Mapping[str, LossPart]
    """Parts by name; all read the same logits."""

    term_weights: Mapping[str, float]
    """Weight by term."""

    def loss(self, global_counts: Mapping[str, Count], *, in_place: bool = False) -> Loss:
        """The loss from logits, with gradients that are written once, already weighted.

        The cross-entropy and the first ``FusedObjective`` that reads the same labels share one
        pass over the logits, value and gradient together.

        Args:
            global_counts: By ``count_name``; a count of 0 divides by 1.
            in_place: Whether the gradient may overwrite the logits, which are not read again.

        Collectives: those of the objectives, in one order on every rank.
        """
        scales = self._scales(global_counts)
        pair = _fused_pair(self.parts, scales)
        outputs: dict[str, LossOutput] = {}
        shares = []
        if pair:
            total, outputs = self._fused(
                pair, scales, in_place=in_place and set(pair) == set(self.parts)
            )
            shares.append(total)
        alone = [name for name in self.parts if name not in pair]
        scaled = [name for name in alone if not self._only_measures(name, scales)]
        for name in sorted(alone, key=scaled.__contains__):
            part = self.parts[name]
            inputs = replace(
                part.inputs,
                # The gradient is written for a scale that is not 0.
                grad_scale=1.0 if is_zero(scales[name]) else scales[name],
                in_place=in_place and not pair and scaled == [name],
            )
            with torch.set_grad_enabled(torch.is_grad_enabled() and name in scaled):
                outputs[name] = part.objective(inputs)
            shares.append(outputs[name].loss_sum * scales[name])
        return Loss(
            total=reduce(torch.add, shares), outputs={name: outputs[name] for name in self.parts}
        )

    def loss_from_hidden(
        self,
        global_counts: Mapping[str, Count],
        forms: Mapping[str, LinearDistillation],
        tiles: Mapping[str, MicrobatchTiles],
    ) -> Loss:
        """As ``loss``, of parts whose inputs have hidden states and heads instead of logits.

        Args:
            forms: Linear forms of parts that are cut alike; together they cover all parts.
            tiles: Tiles of this microbatch for each form.

        Collectives: those of the objectives' forwards and backwards in every tile.
        """
        scales = self._scales(global_counts)
        outputs: dict[str, LossOutput] = {}
        totals = []
        for name, form in forms.items():
            # The first objective's inputs have all that a cross-entropy needs.
            first = next(iter(form.objectives))
            output = form(
                self.parts[first].inputs,
                tiles[name],
                {part: scales[part] for part in form.objectives},
            )
            totals.append(output.total)
            outputs |= output.parts
        return Loss(
            total=reduce(torch.add, totals), outputs={name: outputs[name] for name in self.parts}
        )

    def outputs(self) -> CombinedOutput:
        """Evaluate every part alone, with a graph of its own; the collectives of the objectives."""
        outputs = {name: part.objective(part.inputs) for name, part in self.parts.items()}
        return CombinedOutput(plan=self, outputs=outputs)

    def _scales(self, global_counts: Mapping[str, Count]) -> dict[str, Scale]:
        return {
            name: part.scale(self.term_weights, global_counts) for name, part in self.parts.items()
        }

    def _only_measures(self, name: str, scales: Mapping[str, Scale]) -> bool:
        """Whether a part has the weight 0 beside another one, and no parameters of its own."""
        is_alone = len(self.parts) == 1
        is_cross_entropy = isinstance(self.parts[name].objective, NextTokenLoss)
        return is_zero(scales[name]) and is_cross_entropy and not is_alone

    def _fused(
        self, pair: tuple[str, ...], scales: Mapping[str, Scale], *, in_place: bool
    ) -> tuple[torch.Tensor, dict[str, LossOutput]]:
        """Total with a graph, and outputs without one, of parts that share a pass."""
        # The objective's inputs have all that the cross-entropy needs.
        inputs = self.parts[pair[0]].inputs
        objectives = {name: self.parts[name].objective for name in pair}
        outputs: dict[str, LossOutput] = {}

        def evaluate(rows: torch.Tensor, gradient: torch.Tensor | None) -> tuple[torch.Tensor]:
            detached = replace(inputs, student_logits=rows.view(inputs.student_logits.shape))
            outputs.update(evaluate_together(objectives, scales, detached, gradient=gradient))
            return (weighted_sum(outputs, scales),)

        fused = objectives[pair[0]]
        assert isinstance(fused, FusedObjective)
        (total,) = kept_gradient(
            inputs.student_logits,
            evaluate,
            in_place=in_place,
            implementation=fused.implementation,
        )
        return total, outputs


@dataclass(frozen=True, slots=True, kw_only=True)
class CombinedOutput:
    """Outputs of a plan's parts, evaluated one by one: for a weighting that reads each term's
    gradient, and where the global counts come after the forward."""

    plan: LossPlan

    outputs: Mapping[str, LossOutput]
    """Output by part."""

    def counts(self) -> dict[str, torch.Tensor]:
        """This microbatch's count by ``count_name``, int64 scalars."""
        counts: dict[str, torch.Tensor] = {}
        for name, part in self.plan.parts.items():
            counts[part.count_name] = counts.get(part.count_name, 0) + self.outputs[name].count
        return counts

    def terms(self, global_counts: Mapping[str, Count]) -> dict[str, torch.Tensor]:
        """This microbatch's share of each term's mean, fp32 scalars with a graph.

        A count of 0 adds 0. Terms are without ``term_weights``; added
        over microbatches and replicas they are what a ``LossWeighting`` observes.
        """
        terms: dict[str, torch.Tensor] = {}
        for name, part in self.plan.parts.items():
            divisor = _divisor(global_counts[part.count_name])
            mean = part.weight * (self.outputs[name].loss_sum / divisor)
            terms[part.term] = terms[part.term] + mean if part.term in terms else mean
        return terms

    def total(self, global_counts: Mapping[str, Count]) -> torch.Tensor:
        """This microbatch's share of the loss, an fp32 scalar with a graph."""
        weights = self.plan.term_weights
        weighted = [weights[name] * mean for name, mean in self.terms(global_counts).items()]
        return reduce(torch.add, weighted)

    def metrics(self) -> dict[str, SumCount]:
        """(sum, count) of each part, ``part``, of its metrics, ``part/metric``, and
        ``part/weight``."""
        metrics: dict[str, SumCount] = {}
        for name, output in self.outputs.items():
            metrics[name] = (output.loss_sum.detach(), output.count)
            metrics |= {f"{name}/{metric}": value for metric, value in output.metrics.items()}
            one = torch.ones_like(output.count)
            weight = torch.as_tensor(self.plan.parts[name].weight, dtype=torch.float32)
            metrics[f"{name}/weight"] = (one * weight, one)
        return metrics


def _fused_pair(parts: Mapping[str, LossPart], scales: Mapping[str, Scale]) -> tuple[str, ...]:
    """Names of the first part that evaluates the cross-entropy with itself, and of that; or ().

    They are evaluated together where both have a weight above 0 and read the same labels.
    """
    labelled = [name for name, part in parts.items() if isinstance(part.objective, NextTokenLoss)]
    if len(labelled) != 1 or is_zero(scales[labelled[0]]):
        return ()
    labels = parts[labelled[0]].inputs.labels
    for name, part in parts.items():
        is_other = name not in labelled and part.inputs.labels is labels
        if is_other and fuses(part.objective, part.inputs) and not is_zero(scales[name]):
            return name, labelled[0]
    return ()


def reduce_counts(
    counts: Mapping[str, torch.Tensor], group: ProcessGroup | None
) -> dict[str, torch.Tensor]:
    """Sum counts over the group.

    Args:
        counts: A rank's counts over its microbatches, int64 scalars on one device; the same names
            in the same order on every rank.
        group: Data-parallel ranks, context-parallel ones included; None for one rank.

    Returns:
        int64 scalars. One all-reduce of 8 bytes a name.
    """
    if not counts:
        return {}
    totals = all_reduce_sum(torch.stack(list(counts.values())), group)
    return dict(zip(counts, totals.unbind(), strict=True))


def _divisor(count: Count) -> Count:
    return count.clamp(min=1) if isinstance(count, torch.Tensor) else max(count, 1)
