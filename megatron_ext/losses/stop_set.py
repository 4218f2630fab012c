"""Stop tokens of a teacher that end a text alike: one event where the student has stopped.

B batch, Tt tokens, Vp local columns, K top-k, S stop tokens, L of them on this rank.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import NamedTuple

import torch

from megatron_ext.distributed.shard_collectives import all_reduce_max, all_reduce_sum
from megatron_ext.distributed.vocab_parallel import VocabShard, finite_peak


class TopK(NamedTuple):
    """The largest logits of every position, as ``TeacherTargets`` has them."""

    ids: torch.Tensor
    """int64 [B, Tt, K]"""

    logits: torch.Tensor
    """[B, Tt, K]"""

    normaliser: torch.Tensor
    """[B, Tt] fp32"""


@dataclass(frozen=True, slots=True)
class StopSet:
    """Tokens with which a teacher ends a text, whichever of them a template writes."""

    ids: torch.Tensor
    """int64 [S] columns over all shards, each once."""

    own: torch.Tensor
    """int64 [L]: which of them this rank has."""

    column: torch.Tensor
    """int64 [L]: this rank's column of each."""

    shard: VocabShard

    @classmethod
    def of(
        cls, ids: Collection[int], shard: VocabShard, device: torch.device | str = "cpu"
    ) -> StopSet:
        """The set cut to a rank's columns; ids beyond the vocabulary are left out."""
        known = sorted(token for token in set(ids) if 0 <= token < shard.vocab_size)
        own = [n for n, token in enumerate(known) if shard.start <= token < shard.stop]
        column = [known[n] - shard.start for n in own]
        parts = [torch.tensor(part, dtype=torch.int64).to(device) for part in (known, own, column)]
        return cls(parts[0], parts[1], parts[2], shard)

    @torch.no_grad()
    def merge_(self, logits: torch.Tensor, marks: torch.Tensor) -> torch.Tensor:
        """Merge in place in the rows of ``logits`` [..., Vp] whose mark [...] is not 0.

        Collectives: two all-reduces of [...].

        Args:
            marks: int64, see ``TeacherTargets.stop_marks``.
        """
        group = self.shard.group
        own = logits[..., self.column]
        wide = own.to(torch.promote_types(own.dtype, torch.float32))
        peak = wide.new_full(marks.shape, -torch.inf)
        if len(self.own):
            peak = wide.amax(dim=-1)
        peak = finite_peak(all_reduce_max(peak, group))
        total = all_reduce_sum((wide - peak[..., None]).exp().sum(dim=-1), group)
        whole = (peak + total.log())[..., None]
        is_label = marks[..., None] == self.ids[self.own] + 1
        merged = torch.where(is_label, whole, -torch.inf).to(own.dtype)
        logits[..., self.column] = torch.where(marks[..., None] > 0, merged, own)
        return logits

    def merge_topk(
        self, topk: TopK, label: torch.Tensor | None, labels: torch.Tensor, rows: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Logits [B, Tt, K] and log-probabilities of the labels [B, Tt] with stop tokens merged.

        Args:
            label: [B, Tt] log p of the labels, which may lie outside the K; None: not known.
            labels: int64 [B, Tt]
            rows: bool [B, Tt] rows whose label is one of the set.
        """
        ids, logits, normaliser = topk
        is_stop = (ids[..., None] == self.ids).any(dim=-1)
        is_label = ids == labels[..., None]
        known = logits.masked_fill(~is_stop, -torch.inf)
        if label is not None:
            # A label outside the K has a probability of its own.
            outside = torch.where(is_label.any(dim=-1), torch.nan, label).nan_to_num(-torch.inf)
            known = torch.cat([known, (outside + normaliser)[..., None].to(known.dtype)], dim=-1)
        whole = torch.logsumexp(known, dim=-1)
        merged = torch.where(is_label, whole[..., None], -torch.inf)
        merged = torch.where(rows[..., None] & is_stop, merged, logits)
        if label is not None:
            label = torch.where(rows, (whole - normaliser).to(label.dtype), label)
        return merged, label
