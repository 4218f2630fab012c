"""Sorted L1 straight from its formula, dense and unsharded. C rows, V columns."""

from __future__ import annotations

import torch


def sorted_l1_reference(
    student: torch.Tensor, teacher: torch.Tensor, *, largest: int | None = None
) -> torch.Tensor:
    """``sum_i |sort(student)_i - sort(teacher)_i|`` [C] over the ``largest`` places.

    Args:
        student: [C, Vs]
        teacher: [C, Vt]; the narrower side is filled up with zeros.
    """
    width = max(student.shape[1], teacher.shape[1])
    first, second = (
        torch.nn.functional.pad(side, (0, width - side.shape[1])).sort(
            dim=-1, descending=True, stable=True
        )[0]
        for side in (student, teacher)
    )
    return (first - second)[:, :largest].abs().sum(dim=-1)
