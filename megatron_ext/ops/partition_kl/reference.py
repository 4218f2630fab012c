"""Partition KL straight from its definition, chunk by chunk and unsharded. T rows, V columns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from megatron_ext.ops.divergence import divergence_reference


class ReferenceChunk(NamedTuple):
    """One chunk: rows of both models, the tokens that they predict but for the last, and pairs."""

    student_rows: Sequence[int]
    teacher_rows: Sequence[int]
    student_prefix: Sequence[int]
    """Tokens at all student rows but the last."""
    teacher_prefix: Sequence[int]
    pairs: Sequence[tuple[int, int]]
    """Student and teacher tokens at the last rows that are one text behind the prefixes."""


def partition_kl_reference(
    student_logits: torch.Tensor,
    teacher_logits: torch.Tensor,
    chunks: Sequence[ReferenceChunk],
    *,
    temperature: float = 1.0,
    direction: str = "forward",
    mixture: float = 0.5,
) -> torch.Tensor:
    """D(P_c || Q_c) of each chunk; differentiable by autograd.

    Args:
        student_logits: [Ts, Vs]
        teacher_logits: [Tt, Vt]
    """
    q, p = torch.softmax(student_logits, dim=-1), torch.softmax(teacher_logits, dim=-1)
    found = []
    for chunk in chunks:
        sides = [
            _events(q, chunk.student_rows, chunk.student_prefix, [s for s, _ in chunk.pairs]),
            _events(p, chunk.teacher_rows, chunk.teacher_prefix, [t for _, t in chunk.pairs]),
        ]
        possible = (sides[0] > 0) | (sides[1] > 0)
        tempered = [events[possible] ** (1 / temperature) for events in sides]
        first, second = (events / events.sum() for events in tempered)
        found.append(divergence_reference(second, first, direction=direction, mixture=mixture))
    return torch.stack(found) if found else student_logits.sum() * torch.zeros(0)


def _events(
    probs: torch.Tensor, rows: Sequence[int], prefix: Sequence[int], last: Sequence[int]
) -> torch.Tensor:
    """Probability of the prefix followed by each of ``last``, and of anything else."""
    reached = probs.new_ones(())
    rest = probs.new_zeros(())
    for row, token in zip(rows, prefix, strict=False):
        rest = rest + reached * _apart(probs[row], [token])[1]
        reached = reached * probs[row, token]
    chosen, others = _apart(probs[rows[-1]], last)
    return torch.cat([reached * chosen, (rest + reached * others)[None]])


def _apart(row: torch.Tensor, chosen: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """The chosen columns of a row, and the sum of the others."""
    index = torch.tensor(list(chosen), dtype=torch.int64)
    others = torch.ones_like(row, dtype=torch.bool)
    others[index] = False
    return row[index], row[others].sum()
