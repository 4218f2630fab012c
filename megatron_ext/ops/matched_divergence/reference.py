"""The matched divergence straight from its formula, dense and unsharded. C chunks, N matches."""

from __future__ import annotations

import torch

from megatron_ext.ops.divergence import divergence_reference


def matched_divergence_reference(
    student: torch.Tensor,
    teacher: torch.Tensor,
    *,
    common_student: torch.Tensor,
    common_teacher: torch.Tensor,
    direction: str = "forward",
    mixture: float = 0.5,
) -> torch.Tensor:
    """The divergence [C] of ``student`` [C, Vs] from ``teacher`` [C, Vt] (README, 1 to 4).

    Args:
        common_student: int64 [N]
        common_teacher: int64 [N], the teacher's column of each.
    """
    with_rest = len(common_student) < min(student.shape[1], teacher.shape[1])
    q = _folded(student, common_student, with_rest)
    p = _folded(teacher, common_teacher, with_rest)
    return divergence_reference(p, q, direction=direction, mixture=mixture)


def _folded(probs: torch.Tensor, common: torch.Tensor, with_rest: bool) -> torch.Tensor:
    """Matched columns, and the mass of the others where it counts, as one distribution."""
    matched = probs[:, common]
    if with_rest:
        rest = probs.sum(dim=-1, keepdim=True) - matched.sum(dim=-1, keepdim=True)
        matched = torch.cat([matched, rest], dim=-1)
    return matched / matched.sum(dim=-1, keepdim=True)
