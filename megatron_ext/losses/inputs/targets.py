"""What a teacher hands to a loss.

B batch, Tt tokens, Vp local vocabulary partition, D hidden, K top-k.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

import torch

from megatron_ext.distributed.vocab_parallel import VocabShard
from megatron_ext.errors import LossError

TargetKind = Literal["logits", "hidden", "topk", "label"]

_TENSORS: Final[dict[TargetKind, tuple[str, ...]]] = {
    "logits": ("logits",),
    "hidden": ("hidden", "head_weight"),
    "topk": ("topk_ids", "topk_logits", "log_normaliser"),
    "label": ("label_log_probs",),
}
"""What a kind cannot do without."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TeacherTargets:
    """A frozen teacher's prediction at every position, free of temperature."""

    kind: TargetKind
    """``logits``: this rank's columns. ``hidden``: last hidden states and this rank's head rows.
    ``topk``: the largest logits of the whole vocabulary, the same on every rank, with what
    normalises them. ``label``: the log-probability of what came next, and no more."""

    shard: VocabShard
    """Teacher vocabulary range of this rank."""

    logits: torch.Tensor | None = None
    """[B, Tt, Vp]"""

    hidden: torch.Tensor | None = None
    """[B, Tt, D]: 2 D bytes a token in bf16, where full logits take 2 Vt."""

    head_weight: torch.Tensor | None = None
    """[Vp, D]"""

    topk_ids: torch.Tensor | None = None
    """[B, Tt, K] int64: global columns, each once in a row."""

    topk_logits: torch.Tensor | None = None
    """[B, Tt, K]: their logits."""

    log_normaliser: torch.Tensor | None = None
    """[B, Tt] fp32: log-sum-exp of all real columns' logits, so that the mass of the tail is exact;
    at temperature 1, the only one at which a tail is known."""

    label_log_probs: torch.Tensor | None = None
    """[B, Tt] fp32: log p of the token that each position predicts, 0 where it predicts none."""

    boundary_log_probs: torch.Tensor | None = None
    """[B, Tt] fp32: log p that the next token begins a word; kind ``label``, where known."""

    def __post_init__(self) -> None:
        missing = [name for name in _TENSORS[self.kind] if getattr(self, name) is None]
        if missing:
            raise LossError(
                f"teacher targets of kind {self.kind!r} lack their tensors",
                got=f"no {', '.join(missing)}",
                expected=" and ".join(_TENSORS[self.kind]),
            )

    @property
    def positions(self) -> torch.Size:
        """[B, Tt]"""
        first: torch.Tensor = getattr(self, _TENSORS[self.kind][0])
        return first.shape[:2]

    def to_logits(self) -> torch.Tensor:
        """This rank's logits [B, Tt, Vp], computed from the hidden states where need be.

        Raises:
            LossError: The targets are of a kind that does not have them.
        """
        if self.logits is not None:
            return self.logits
        if self.hidden is None or self.head_weight is None:
            raise LossError(
                "the objective needs all of the teacher's logits",
                got=f"targets of kind {self.kind!r}",
                expected="kind 'logits' or 'hidden'",
            )
        with torch.no_grad():
            return torch.matmul(self.hidden, self.head_weight.t())
