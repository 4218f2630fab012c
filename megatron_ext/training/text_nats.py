"""How well a model knows held-out text: the cross-entropy of its tokens, summed, in nats.

B batch, T tokens, Vp local columns, D hidden.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from megatron_ext.distributed.vocab_parallel import VocabShard
from megatron_ext.losses import DistillationInputs, Objective, TeacherTargets
from megatron_ext.training.agreement import first_choices


class TextScore(NamedTuple):
    """What a model makes of a microbatch."""

    nats: torch.Tensor
    """The sum, a scalar."""

    choices: torch.Tensor | None
    """[B, T] int64: its likeliest columns; None where they are not asked for, or not known."""


@dataclass(frozen=True, slots=True)
class TextNats:
    """Of logits that are there, or of hidden states and a head; without a graph."""

    next_token: Objective

    tile_rows: int | None = None
    """Positions whose logits are made at a time; all of a microbatch with None."""

    with_choices: bool = False
    """Whether first choices are asked for, too."""

    def of_logits(self, logits: torch.Tensor, labels: torch.Tensor, shard: VocabShard) -> TextScore:
        """The score for ``logits`` [B, T, Vp] and ``labels`` [B, T].

        Collectives: those of ``next_token``, and of ``first_choices``.
        """
        inputs = DistillationInputs(student_logits=logits, student_shard=shard, labels=labels)
        choices = first_choices(logits, shard) if self.with_choices else None
        return TextScore(self.next_token(inputs).loss_sum, choices)

    def of_hidden(
        self,
        hidden: torch.Tensor,
        head_weight: torch.Tensor,
        labels: torch.Tensor,
        shard: VocabShard,
    ) -> TextScore:
        """The same of ``hidden`` [B, T, D] @ ``head_weight`` [Vp, D] transposed, by tiles.

        Collectives: those of ``of_logits`` in each of the B T / ``tile_rows`` tiles.
        """
        rows, flat_labels = hidden.flatten(0, 1), labels.flatten()
        step = self.tile_rows or len(rows)
        tiles = [slice(start, start + step) for start in range(0, len(rows), step)]
        with torch.no_grad():
            scores = [
                self.of_logits((rows[tile] @ head_weight.t())[None], flat_labels[None, tile], shard)
                for tile in tiles
            ]
        nats = torch.stack([score.nats for score in scores]).sum()
        return TextScore(nats, _joined([score.choices for score in scores], labels.shape))

    def of_targets(self, targets: TeacherTargets, labels: torch.Tensor) -> TextScore:
        """The same of a teacher; of one that sends no logits without its choices."""
        if targets.label_log_probs is not None:
            said = targets.label_log_probs.masked_fill(labels < 0, 0.0)
            return TextScore(-said.float().sum(), None)
        hidden, weight = targets.hidden, targets.head_weight
        if self.tile_rows is not None and hidden is not None and weight is not None:
            return self.of_hidden(hidden, weight, labels, targets.shard)
        return self.of_logits(targets.to_logits(), labels, targets.shard)


def _joined(choices: Sequence[torch.Tensor | None], shape: torch.Size) -> torch.Tensor | None:
    known = [tile for tile in choices if tile is not None]
    return torch.cat(known, dim=1).view(shape) if known else None
