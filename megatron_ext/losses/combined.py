"""Several losses with counts of their own, and the one place where they are divided."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from megatron_ext.distributed.shard_collectives import all_reduce_sum
from megatron_ext.losses.base import DistillationInputs, LossOutput, Objective, SumCount

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class LossPart:
    """One objective's sum on one microbatch, and what becomes of it."""

    output: LossOutput

    term: str
    """The term of the loss that it belongs to, ``kd`` or ``ce``."""

    count_name: str
    """What divides it. Parts of one name are parts of one mean, divided by all their counts."""

    weight: float | torch.Tensor = 1.0
    """Weight of its mean in the term; as a tensor, a scalar without a graph."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedPart:
    """A ``LossPart`` before it is computed."""

    objective: Objective

    inputs: DistillationInputs

    term: str

    count_name: str

    weight: float | torch.Tensor = 1.0

    def scale(
        self, term_weights: Mapping[str, float], global_counts: Mapping[str, torch.Tensor | int]
    ) -> float | torch.Tensor:
        """What its sum is multiplied by in ``CombinedOutput.total``; no wait for the device.

        A float where that is known on the host, as where a weight is 0; else an fp32 scalar.
        """
        is_weightless = not isinstance(self.weight, torch.Tensor) and self.weight == 0
        if is_weightless or term_weights[self.term] == 0:
            return 0.0
        count = global_counts[self.count_name]
        divisor = count.clamp(min=1) if isinstance(count, torch.Tensor) else max(count, 1)
        scale = term_weights[self.term] * self.weight / divisor
        return scale.float() if isinstance(scale, torch.Tensor) else scale

    def compute(self) -> LossPart:
        """The part; the collectives of its objective."""
        return LossPart(
            output=self.objective(self.inputs),
            term=self.term,
            count_name=self.count_name,
            weight=self.weight,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class CombinedOutput:
    """``sum over terms: w_term * (sum over parts: w_part * loss_sum / N[count_name])``.

    Counts of parts differ, so that no single (sum, count) can say this: each teacher has its own
    chunks, and cross-entropy has tokens. ``N`` are the counts over the whole global batch, all
    microbatches, data- and context-parallel ranks; see ``reduce_counts``. With them ``total`` of
    the microbatches add up to the loss of the global batch, whatever the layout.
    """

    parts: Mapping[str, LossPart]

    term_weights: Mapping[str, float]

    def counts(self) -> dict[str, torch.Tensor]:
        """This microbatch's count by ``count_name``, int64 scalars."""
        counts: dict[str, torch.Tensor] = {}
        for part in self.parts.values():
            count = part.output.count
            counts[part.count_name] = counts.get(part.count_name, 0) + count
        return counts

    def terms(self, global_counts: Mapping[str, torch.Tensor | int]) -> dict[str, torch.Tensor]:
        """This microbatch's share of each term's mean, fp32 scalars with a graph.

        A count of 0 adds 0: nobody has anything to sum. Terms are without ``term_weights``; added
        over microbatches and replicas they are what a ``LossWeighting`` observes.
        """
        terms: dict[str, torch.Tensor] = {}
        for part in self.parts.values():
            count = global_counts[part.count_name]
            divisor = count.clamp(min=1) if isinstance(count, torch.Tensor) else max(count, 1)
            mean = part.weight * (part.output.loss_sum / divisor)
            terms[part.term] = terms[part.term] + mean if part.term in terms else mean
        return terms

    def total(self, global_counts: Mapping[str, torch.Tensor | int]) -> torch.Tensor:
        """This microbatch's share of the loss, an fp32 scalar with a graph."""
        weighted = [self.term_weights[n] * mean for n, mean in self.terms(global_counts).items()]
        return torch.stack(weighted).sum()

    def metrics(self) -> dict[str, SumCount]:
        """``part``: its sum and count; ``part/metric``: each of its metrics; ``part/weight``."""
        found: dict[str, SumCount] = {}
        for name, part in self.parts.items():
            output = part.output
            found[name] = (output.loss_sum.detach(), output.count)
            found |= {f"{name}/{metric}": value for metric, value in output.metrics.items()}
            one = torch.ones_like(output.count)
            found[f"{name}/weight"] = (one * torch.as_tensor(part.weight, dtype=torch.float32), one)
        return found


def reduce_counts(
    counts: Mapping[str, torch.Tensor], group: ProcessGroup | None
) -> dict[str, torch.Tensor]:
    """Counts over the group, of what a rank added up over its microbatches.

    Args:
        counts: int64 scalars on one device; the same names in the same order on every rank.
        group: Data-parallel ranks, context-parallel ones included; None for one rank.

    Returns:
        int64 scalars. One all-reduce of 8 bytes a name.
    """
    if not counts:
        return {}
    totals = all_reduce_sum(torch.stack(list(counts.values())), group)
    return dict(zip(counts, totals.unbind(), strict=True))
