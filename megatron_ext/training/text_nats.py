"""How well a model knows held-out text: the cross-entropy of its tokens, summed, in nats.

B batch, T tokens, Vp local columns, D hidden.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from megatron_ext.distributed.vocab_parallel import VocabShard
from megatron_ext.losses import DistillationInputs, Objective, TeacherTargets


@dataclass(frozen=True, slots=True)
class TextNats:
    """Of logits that are there, or of hidden states and a head; without a graph."""

    next_token: Objective

    tile_rows: int | None = None
    """Positions whose logits are made at a time; all of a microbatch with None."""

    def of_logits(
        self, logits: torch.Tensor, labels: torch.Tensor, shard: VocabShard
    ) -> torch.Tensor:
        """The sum, a scalar, for ``logits`` [B, T, Vp] and ``labels`` [B, T].

        Collectives: those of ``next_token``.
        """
        inputs = DistillationInputs(student_logits=logits, student_shard=shard, labels=labels)
        return self.next_token(inputs).loss_sum

    def of_hidden(
        self,
        hidden: torch.Tensor,
        head_weight: torch.Tensor,
        labels: torch.Tensor,
        shard: VocabShard,
    ) -> torch.Tensor:
        """The same of ``hidden`` [B, T, D] @ ``head_weight`` [Vp, D] transposed, by tiles.

        Collectives: those of ``next_token`` in each of the B T / ``tile_rows`` tiles.
        """
        rows, flat_labels = hidden.flatten(0, 1), labels.flatten()
        step = self.tile_rows or len(rows)
        tiles = [slice(start, start + step) for start in range(0, len(rows), step)]
        with torch.no_grad():
            sums = [
                self.of_logits((rows[tile] @ head_weight.t())[None], flat_labels[None, tile], shard)
                for tile in tiles
            ]
        return torch.stack(sums).sum()

    def of_targets(self, targets: TeacherTargets, labels: torch.Tensor) -> torch.Tensor:
        """The same of a teacher."""
        hidden, weight = targets.hidden, targets.head_weight
        if self.tile_rows is not None and hidden is not None and weight is not None:
            return self.of_hidden(hidden, weight, labels, targets.shard)
        return self.of_logits(targets.to_logits(), labels, targets.shard)
