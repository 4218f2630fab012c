"""Operands, options and results of the projected KL.

T rows, C chunks, N entries, Vps Vpt local columns, Vt the teacher's vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from megatron_ext.ops.divergence import DivergenceOptions
from megatron_ext.ops.projected_kl.column_plan import ColumnPlan


class ProjectedKL(NamedTuple):
    """Result by chunk [C], replicated over the group."""

    chunk_loss: torch.Tensor
    """tau^2 D_c; the only one with a graph, if any."""

    teacher_entropy: torch.Tensor
    """Entropy of P_c in nats; 0 without diagnostics."""

    top1_agreement: torch.Tensor
    """bool: Q_c and P_c have the same largest column; False without diagnostics."""

    offsupport_mass: torch.Tensor
    """Teacher mass outside the projection's columns, summed over the chunk's rows."""

    rest_mass: torch.Tensor
    """Mass of P_c outside the top ``vocab_topk`` columns; 0 without the option."""

    token_loss: torch.Tensor | None = None
    """[Ts] cross-entropy of each label, 0 where there is none; None without the term."""

    top_column: torch.Tensor | None = None
    """int64 [Ts]: global column of the student's largest logit; None without the term."""

    student_log_sum: torch.Tensor | None = None
    """[Ts] logarithm of the student's sum, NaN where its row has NaN or +inf. Where a row of a
    chunk's teacher has, ``offsupport_mass`` is NaN."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProjectedKLOptions(DivergenceOptions):
    """Options of the comparison of P_c and Q_c."""

    vocab_topk: int | None = None
    """Number of columns compared a chunk, those of the largest teacher mass, with the rest as one;
    those that equal the last one within rounding are all kept. None: every column."""

    diagnostics: bool = True
    """Whether to compute ``teacher_entropy`` and ``top1_agreement``."""


class WeightedLabels(NamedTuple):
    """The term ``sum_i weight_i CE_i``, at temperature 1, of the student's labels."""

    label: torch.Tensor
    """int64 [Ts] over all shards; a negative one has no loss. One beyond the vocabulary gives NaN,
    since raising an error would have to wait for the device."""

    weight: torch.Tensor | float
    """fp32 [Ts], or the weight of all. A row at 0 gets no gradient, whatever it holds."""

    def weights(self) -> torch.Tensor:
        """[Ts], 0 where there is no label."""
        weight = self.weight
        if not isinstance(weight, torch.Tensor):
            weight = torch.full_like(self.label, weight, dtype=torch.float32)
        return weight.masked_fill(self.label < 0, 0.0)


class ShardedProjection(NamedTuple):
    """This rank's rows of W, and the mask of its reachable teacher columns."""

    weight: torch.Tensor
    """CSR [Vps, Vt], this rank's rows of the projection and all its columns."""

    weight_transposed: torch.Tensor
    """CSR [Vt, Vps], the same entries."""

    row_mass: torch.Tensor
    """[Vps], sum of each row of ``weight``."""

    reachable: torch.Tensor
    """bool [Vpt], this rank's teacher columns with an entry in any rank's ``weight``."""

    plan: ColumnPlan | None = None
    """Order in which kernels read the entries; None: kernels cannot run."""

    sum_weights: tuple[torch.Tensor, torch.Tensor] | None = None
    """Values of ``weight`` in the order of the plan's sums by column and by row; None: they are
    picked by each evaluation, as where they are learned."""

    @property
    def mapped(self) -> torch.Tensor:
        """bool [Vps]: this rank's student columns with an entry."""
        return self.row_mass > 0 if self.plan is None else self.plan.mapped

    @property
    def has_unit_rows(self) -> bool:
        """Whether every row on every rank is known to sum to 1 or 0."""
        return self.plan is not None and self.plan.has_unit_rows


class LearnedEntries(NamedTuple):
    """Learned entries of this rank's rows; ``value`` gets their gradient."""

    value: torch.Tensor
    """[N] with a graph; the same numbers as in ``weight``."""

    row: torch.Tensor
    """int64 [N] student column of this rank."""

    column: torch.Tensor
    """int64 [N] teacher column, over all shards."""


def entry_gradient(
    means: torch.Tensor,
    slope: torch.Tensor,
    scale: torch.Tensor,
    row: torch.Tensor,
    column: torch.Tensor,
) -> torch.Tensor:
    """Gradient [N], ``sum_c scale_c * means_c[row] * slope_c[column]`` (README, equation 11).

    Args:
        means: [C, Vps] the student's chunk means.
        slope: [C, Vt] dD_c/dQ~_c of every teacher column.
        scale: [C]; a chunk at 0 is ignored, NaN included.
    """
    weight = scale[:, None]
    terms = means[:, row].mul_(slope[:, column]).mul_(weight)
    return terms.masked_fill_(weight == 0, 0.0).sum(dim=0)


class ProjectedValues(NamedTuple):
    """Values of an evaluation, [C] each, over all shards."""

    value: torch.Tensor
    """D_c."""

    entropy: torch.Tensor
    agreement: torch.Tensor
    rest_mass: torch.Tensor


class RequestedOutputs(NamedTuple):
    """Gradients that an evaluation is asked for, and their scale."""

    gradient: torch.Tensor | None
    grad_scale: torch.Tensor
    """[C] fp32 or fp64."""

    cross_entropy: WeightedLabels | None
    learned: LearnedEntries | None
    entry_gradient: torch.Tensor | None
