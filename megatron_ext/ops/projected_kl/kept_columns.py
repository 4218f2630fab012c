"""Columns of a chunk that are compared one by one with ``vocab_topk``, and the rest as one. README.

T rows, C chunks, C' of a slice, Vp local columns.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

import torch

from megatron_ext.distributed.shard_collectives import all_reduce_sum, gather_columns
from megatron_ext.distributed.vocab_parallel import LogSumExp, row_slices
from megatron_ext.ops.chunk_rows import ChunkedLogits
from megatron_ext.ops.divergence import ProjectedTerms, projected_terms
from megatron_ext.ops.launch import Implementation
from megatron_ext.ops.model_rows import ModelRows, chunk_means
from megatron_ext.ops.projected_kl.operands import ProjectedKLOptions
from megatron_ext.ops.sorted_l1.comparison import Candidates, select_largest
from megatron_ext.ops.sorted_l1.kernel_steps import capacity_of, select_by_kernel

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_ROUNDING: Final = 2.0**-15
"""Share of a probability by which two count as equal: more than any two ways to compute it differ
by, and less than two bf16 logits do."""


class KeptColumns(NamedTuple):
    """Which columns of each chunk are compared one by one, and the masses of all others."""

    threshold: torch.Tensor
    """fp32 [C]: least ``P_c`` of a column that is."""

    rest: torch.Tensor
    """fp32 [2, C]: ``P_c`` and ``Q~_c`` of the others, over all shards; filled in by an
    evaluation."""

    def terms(self, mass: torch.Tensor, options: ProjectedKLOptions) -> ProjectedTerms:
        """Term of D of the others as one, [C] each, for ``mass`` [C], ``M_c``."""
        p, q = self.rest[..., None]
        terms = projected_terms(p, q, mass[:, None], options.direction, options.mixture)
        return ProjectedTerms(*(part[:, 0] for part in terms))


def kept_columns(
    teacher: ChunkedLogits,
    lse: LogSumExp,
    reachable: torch.Tensor,
    options: ProjectedKLOptions,
    implementation: Implementation,
) -> KeptColumns | None:
    """The columns of ``options.vocab_topk``, with rests of 0; None where every column is kept.

    Args:
        lse: [T] of the teacher's rows over the ``reachable`` columns, bool [Vp].
        implementation: ``triton`` or ``cpu``.

    Collectives: those of ``kept_threshold``, a slice of chunks.
    """
    places, shard = options.vocab_topk, teacher.shard
    if places is None or places >= shard.vocab_size:
        return None
    by_kernel, group = implementation == "triton", shard.group
    model = ModelRows(
        teacher.logits, teacher.rows, shard, options.temperature, lse, lse, not by_kernel
    )
    excluded = shard.excluded_columns(teacher.logits.device, reachable)
    candidates = Candidates.of(places, shard.width, excluded, group=group, by_loops=not by_kernel)
    threshold = lse.peak.new_empty(teacher.rows.chunk_count)
    widest = capacity_of(places, shard.width) if by_kernel else shard.width
    for chunks in row_slices(len(threshold), widest, device=threshold.device):
        if by_kernel:
            top = select_by_kernel(model, chunks, places, excluded)
        else:
            top = select_largest(chunk_means(model, [], chunks), candidates)
        threshold[chunks] = kept_threshold(top.values, places, group)
    return KeptColumns(threshold, torch.zeros_like(threshold).expand(2, -1).contiguous())


def kept_threshold(p: torch.Tensor, places: int, group: ProcessGroup | None) -> torch.Tensor:
    """Largest probability number ``places`` of each chunk [C], over all shards' ``p`` [C, K].

    Columns below it make up the rest; those that equal it within rounding are all kept, so that
    the choice depends neither on the layout nor on the implementation. One all-gather of
    [C, places].
    """
    local = p.topk(min(places, p.shape[-1]), dim=-1).values
    everywhere = gather_columns(local, group)
    least = everywhere.topk(min(places, everywhere.shape[-1]), dim=-1).values[:, -1]
    return least * (1 - _ROUNDING)


def pool_rest(
    p: torch.Tensor, projected: torch.Tensor, rest: torch.Tensor, group: ProcessGroup | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """``p`` and ``projected`` with pooled masses in the columns of ``rest``, and these masses [2,
    C].

    The masses are sums over the pooled columns, not one minus the others: a small rest stays exact.
    One all-reduce of [2, C].
    """
    sides = (p, projected)
    local = torch.stack([torch.where(rest, side, 0.0).sum(dim=-1) for side in sides])
    pooled = all_reduce_sum(local, group)
    p, projected = (
        torch.where(rest, mass[:, None], side) for mass, side in zip(pooled, sides, strict=True)
    )
    return p, projected, pooled
