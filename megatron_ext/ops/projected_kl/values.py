"""What a projected KL is called with and what it says. T rows, C chunks, Vps Vpt local columns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from megatron_ext.ops.divergence import DivergenceOptions


class ProjectedKL(NamedTuple):
    """What is known of each chunk [C], replicated over the group."""

    chunk_loss: torch.Tensor
    """tau^2 D_c; the only one with a graph, if any."""

    teacher_entropy: torch.Tensor
    """Entropy of P_c in nats; 0 without diagnostics."""

    top1_agreement: torch.Tensor
    """bool: Q_c and P_c have the same largest column; False without diagnostics."""

    offsupport_mass: torch.Tensor
    """Teacher mass on columns the projection cannot reach, summed over the chunk's rows."""

    teacher_rows: torch.Tensor
    """int64: teacher rows in the chunk."""

    rest_mass: torch.Tensor
    """Mass of P_c outside the top ``vocab_topk`` columns; 0 without the option."""

    token_loss: torch.Tensor | None = None
    """[Ts] cross-entropy of each label, 0 where there is none; None without the term."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProjectedKLOptions(DivergenceOptions):
    """How P_c and Q_c are compared."""

    vocab_topk: int | None = None
    """Compare on so many columns a chunk, those of the largest teacher mass, and on the rest as
    one; of equals at the end all are kept. None: on every column."""

    diagnostics: bool = True
    """Whether to say ``teacher_entropy`` and ``top1_agreement``."""


class WeightedLabels(NamedTuple):
    """The term ``sum_i weight_i CE_i``, at temperature 1, of the student's labels."""

    label: torch.Tensor
    """int64 [Ts] over all shards; a negative one has no loss. One beyond the vocabulary gives NaN,
    since to raise the host would have to wait for the device."""

    weight: torch.Tensor
    """fp32 [Ts]. A row at 0 gets no gradient, whatever it holds."""
