"""The matched divergence with a graph; ``evaluation.py`` has what it computes."""

from __future__ import annotations

import torch

from megatron_ext.ops.chunk_rows import ChunkedLogits
from megatron_ext.ops.implementation import Implementation
from megatron_ext.ops.matched_divergence.comparison import MatchedOptions
from megatron_ext.ops.matched_divergence.evaluation import evaluate_matched_divergence
from megatron_ext.ops.matched_divergence.matching import Matching
from megatron_ext.ops.matched_divergence.values import MatchedDivergence
from megatron_ext.ops.unit_gradient import kept_gradient


def matched_divergence(
    student: ChunkedLogits,
    teacher: ChunkedLogits,
    matching: Matching,
    options: MatchedOptions,
    *,
    grad_scale: torch.Tensor | None = None,
    in_place: bool = False,
    implementation: Implementation = "auto",
) -> MatchedDivergence:
    """``evaluate_matched_divergence`` with a graph from ``chunk_loss`` to the student's logits.

    Args:
        in_place: Write the gradient over the student's logits, which nobody may read afterwards.

    Keeps the gradient [Ts, Vps] for backward, which has no collectives.
    """

    def evaluate(logits: torch.Tensor, gradient: torch.Tensor | None) -> MatchedDivergence:
        return evaluate_matched_divergence(
            student._replace(logits=logits),
            teacher,
            matching,
            options,
            grad_scale=grad_scale,
            gradient=gradient,
            implementation=implementation,
        )

    values = kept_gradient(
        student.logits,
        evaluate,
        grad_scale=grad_scale,
        slots=student.rows.slots,
        in_place=in_place,
        implementation=implementation,
    )
    return MatchedDivergence(*values)
