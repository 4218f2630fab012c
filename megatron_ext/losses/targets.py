"""What a teacher hands to a loss. B batch, T tokens, Vp local vocabulary partition, D hidden."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from megatron_ext.distributed.vocab_parallel import VocabShard
from megatron_ext.errors import LossError

TargetKind = Literal["logits", "hidden"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TeacherTargets:
    """A frozen teacher's prediction at every position, free of temperature."""

    kind: TargetKind
    """``logits``: this rank's columns. ``hidden``: last hidden states and this rank's head rows."""

    shard: VocabShard
    """Teacher vocabulary range of this rank."""

    logits: torch.Tensor | None = None
    """[B, Tt, Vp]"""

    hidden: torch.Tensor | None = None
    """[B, Tt, D]: 2 D bytes a token in bf16, where full logits take 2 Vt."""

    head_weight: torch.Tensor | None = None
    """[Vp, D]"""

    def __post_init__(self) -> None:
        needed = {"logits": (self.logits,), "hidden": (self.hidden, self.head_weight)}[self.kind]
        if any(tensor is None for tensor in needed):
            raise LossError(
                f"teacher targets of kind {self.kind!r} lack their tensors",
                expected="logits" if self.kind == "logits" else "hidden and head_weight",
            )

    def to_logits(self) -> torch.Tensor:
        """This rank's logits [B, Tt, Vp], computed from the hidden states where need be."""
        if self.logits is not None:
            return self.logits
        assert self.hidden is not None
        assert self.head_weight is not None
        with torch.no_grad():
            return torch.matmul(self.hidden, self.head_weight.t())
