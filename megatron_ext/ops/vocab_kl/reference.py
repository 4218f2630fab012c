"""Divergence over one vocabulary straight from its formula. T rows, V columns."""

from __future__ import annotations

import torch

from megatron_ext.ops.divergence import divergence_reference


def vocab_kl_reference(
    student_logits: torch.Tensor,
    teacher_logits: torch.Tensor,
    *,
    temperature: float = 1.0,
    direction: str = "forward",
    mixture: float = 0.5,
) -> torch.Tensor:
    """``tau^2 * D`` of each row [T], of logits [T, V]; differentiable by autograd."""
    q = torch.softmax(student_logits / temperature, dim=-1)
    p = torch.softmax(teacher_logits / temperature, dim=-1)
    return temperature**2 * divergence_reference(p, q, direction=direction, mixture=mixture)
