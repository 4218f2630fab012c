"""Both models' rows as probabilities that are made when they are needed. T rows, C chunks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch

from megatron_ext.distributed.vocab_parallel import (
    LogSumExp,
    VocabShard,
    merge_log_sum_exp,
    row_slices,
    scaled_logits,
)
from megatron_ext.ops.chunk_rows import ChunkedLogits, ChunkRows
from megatron_ext.ops.implementation import Implementation
from megatron_ext.ops.softmax_statistics import row_statistics


class ModelRows(NamedTuple):
    """One model's logits, which rows a chunk has, and what makes them probabilities."""

    logits: torch.Tensor
    """[T, Vp] without a graph, any float dtype; rows may be strided."""

    rows: ChunkRows

    shard: VocabShard

    temperature: float

    lse: LogSumExp
    """[T] over every shard, of ``logits / temperature``."""

    member_mass: torch.Tensor
    """[T]: probability of the columns that ``pair_of_models`` was asked about; 1 for all."""

    def probabilities(self, row: torch.Tensor) -> torch.Tensor:
        """``softmax(logits / temperature)`` [T', Vp] of rows int64 [T'], 0 in padding."""
        excluded = self.shard.excluded_columns(self.logits.device)
        scaled = scaled_logits(self.logits[row], self.temperature, excluded)
        return scaled.sub_(self.lse.peak[row, None]).sub_(self.lse.log_sum[row, None]).exp_()

    def mean_over_rows(self, values: torch.Tensor) -> torch.Tensor:
        """Mean of ``values`` [T] over the rows of each chunk [C], 0 where there is none."""
        # In the order of rows: index_add_ on a GPU would add in another order each time.
        sums = torch.segment_reduce(
            values[self.rows.order.long()],
            "sum",
            offsets=self.rows.offsets.long(),
            initial=0,
            unsafe=True,
        )
        return sums / self.rows.sizes().clamp(min=1)


def pair_of_models(
    student: ChunkedLogits,
    teacher: ChunkedLogits,
    *,
    temperature: float,
    members: tuple[torch.Tensor, torch.Tensor] | None = None,
    implementation: Implementation = "auto",
) -> tuple[ModelRows, ModelRows]:
    """The student's and the teacher's rows; each model's logits are read once.

    Args:
        members: bool [Vps] and [Vpt], columns whose probability is asked for.

    Two all-reduces of [Ts + Tt], twice as long with ``members``.
    """
    pair = (student, teacher)
    sums = 1 if members is None else 2
    found = [
        row_statistics(
            model.logits.detach(),
            model.shard,
            temperature=temperature,
            members=None if members is None else members[number],
            with_column=False,
            implementation=implementation,
        )
        for number, model in enumerate(pair)
    ]
    peak, total = (
        torch.cat([getattr(part, name)[:sums].flatten() for part in found])
        for name in ("peak", "total")
    )
    merged = merge_log_sum_exp(peak, total, student.shard.group)
    lengths = [sums * len(model.logits) for model in pair]
    models = []
    for model, *lse in zip(pair, *(part.split(lengths) for part in merged), strict=True):
        peaks, log_sums = (part.view(sums, -1) for part in lse)
        mass = ((peaks[-1] - peaks[0]) + log_sums[-1] - log_sums[0]).exp_()
        whole = LogSumExp(peaks[0].contiguous(), log_sums[0].contiguous())
        logits = model.logits.detach()
        models.append(ModelRows(logits, model.rows, model.shard, temperature, whole, mass))
    return models[0], models[1]


def host_offsets(*models: ModelRows) -> list[list[int]]:
    """``ChunkRows.offsets`` of each model on the host, which waits for the device once."""
    ends: list[list[int]] = torch.stack([model.rows.offsets for model in models]).tolist()
    return ends


def rows_of(model: ModelRows, ends: list[int], chunks: slice) -> Iterator[torch.Tensor]:
    """int64 [T'] of the rows of these chunks, few enough at a time for a temporary [T', Vp].

    Args:
        ends: This model's of ``host_offsets``.
    """
    first, last = ends[chunks.start], ends[chunks.stop]
    for part in row_slices(last - first, model.shard.width, device=model.logits.device):
        yield model.rows.order[first + part.start : first + part.stop].long()
