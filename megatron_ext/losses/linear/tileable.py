"""Which objectives are a sum over tiles of whole chunks, or over labels."""

from __future__ import annotations

from typing import Final

from megatron_ext.errors import LossError
from megatron_ext.losses.base import Objective
from megatron_ext.losses.objectives.alm import AlmLoss
from megatron_ext.losses.objectives.gold import GoldLoss
from megatron_ext.losses.objectives.mined import MinedLoss
from megatron_ext.losses.objectives.next_token import NextTokenLoss
from megatron_ext.losses.objectives.partition_kl import PartitionKLLoss
from megatron_ext.losses.objectives.projected_kl import ProjectedKLLoss
from megatron_ext.losses.objectives.strict_topk import StrictTopKLoss
from megatron_ext.losses.objectives.uld import ULDLoss
from megatron_ext.losses.objectives.vocab_kl import VocabKLLoss

_OVER_CHUNKS: Final = (
    AlmLoss,
    GoldLoss,
    MinedLoss,
    PartitionKLLoss,
    ProjectedKLLoss,
    StrictTopKLoss,
    ULDLoss,
)
_OVER_LABELS: Final = (NextTokenLoss, VocabKLLoss)


def check_tileable(name: str, objective: Objective) -> None:
    """Check that each chunk's part of the loss depends on the rows of the chunk alone.

    Raises:
        LossError: It is not so, or not known.
    """
    why = _why_not(objective)
    if why is not None:
        raise LossError(
            f"the objective {name} has no linear form",
            got=f"{type(objective).__name__}: {why}",
            expected="a sum over chunks or labels, each from rows of its own",
            fix="call it with logits",
        )


def reads_labels(objective: Objective) -> bool:
    """Whether it uses rows that have a label and are in no chunk."""
    return isinstance(objective, _OVER_LABELS)


def compares_tokens(objective: Objective) -> bool:
    """Whether it compares models of one tokenizer, position by position."""
    return isinstance(objective, VocabKLLoss)


def _why_not(objective: Objective) -> str | None:
    if not isinstance(objective, _OVER_CHUNKS + _OVER_LABELS):
        return "it needs all positions, or hidden states"
    if getattr(objective, "numerics", "proper") == "nemo":
        return "the nemo numerics look at the whole microbatch"
    if isinstance(objective, AlmLoss) and (objective.debias or objective.merge != "none"):
        return "debias and merge look at the row behind a chunk"
    if isinstance(objective, ULDLoss) and objective.alignment == "position":
        return "it pairs the positions of a sample"
    return None
