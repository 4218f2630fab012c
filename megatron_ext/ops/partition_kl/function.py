"""Partition KL over vocabulary shards. T rows, Vp local columns, C singles, H chains.

Equations and memory are in the README; ``reference.py`` says the same chunk by chunk.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from megatron_ext.distributed.vocab_parallel import VocabShard
from megatron_ext.ops.divergence import Divergence
from megatron_ext.ops.implementation import Implementation
from megatron_ext.ops.partition_kl.chain_masses import RowMasses
from megatron_ext.ops.partition_kl.chains import Chains, SingleRows, chunk_slots
from megatron_ext.ops.partition_kl.evaluation import evaluate_partition_kl
from megatron_ext.ops.partition_kl.shared_columns import SharedColumns
from megatron_ext.ops.partition_kl.values import Comparison, PartitionValues
from megatron_ext.ops.unit_gradient import hand_over_chunks


def partition_kl(
    student_logits: torch.Tensor,
    teacher: torch.Tensor | RowMasses,
    *,
    singles: SingleRows,
    shared: SharedColumns,
    chains: Chains,
    counted: torch.Tensor,
    student_shard: VocabShard,
    teacher_shard: VocabShard,
    temperature: float = 1.0,
    direction: Divergence = "forward",
    mixture: float = 0.5,
    announced: torch.Tensor | None = None,
    in_place: bool = False,
    implementation: Implementation = "auto",
) -> tuple[Comparison, Comparison]:
    """D(P_c || Q_c) over the events that both models have, by chunk (README, equations 1 to 8).

    Args:
        student_logits: [Ts, Vps], any float dtype, contiguous in its columns; the only argument
            with a gradient.
        teacher: Logits [Tt, Vpt], any float dtype. Or what the teacher gives the rows of the
            chains, the same on every rank; then there are no ``singles``.
        singles: Rows of chunks of one token a side.
        shared: The tokens over which these are compared.
        chains: Rows and completions of the other chunks. No student row is in two chunks.
        counted: bool [H]: chains to look at; the others have a divergence of 0.
        announced: [C + H] the gradients that the divergences will get, of the singles and then of
            the chains. Backward then has next to nothing to do where they do get them. A chunk
            announced at 0 has no gradient, whatever it gets. None: 1.
        in_place: Overwrite ``student_logits`` with their gradient, so that no other tensor of their
            size is made. Whoever has saved them for a backward of its own gets an error.

    Returns:
        Comparisons of the C singles and of the H chains.

    The gradient is made in forward and is all that is kept, [Ts, Vps] in the logits' dtype; none
    where the logits need none. Collectives: those of ``evaluate_partition_kl``; none in backward.

    Raises:
        LossError: See ``evaluate_partition_kl``.
    """
    evaluate = partial(
        evaluate_partition_kl,
        teacher=teacher,
        singles=singles,
        shared=shared,
        chains=chains,
        counted=counted,
        student_shard=student_shard,
        teacher_shard=teacher_shard,
        temperature=temperature,
        direction=direction,
        mixture=mixture,
        announced=announced,
        implementation=implementation,
    )
    room = _room(student_logits, in_place)
    slots = chunk_slots(singles.student, chains.student, len(student_logits))
    divergence, values = _PartitionKL.apply(
        student_logits, evaluate, room, announced, slots, implementation
    )
    first, second = divergence.split([len(singles.student), chains.chain_count])
    return (
        values.singles._replace(divergence=first),
        values.chains._replace(divergence=second),
    )


def _room(student_logits: torch.Tensor, in_place: bool) -> torch.Tensor | None:
    """Where the gradient is written; None if there is no need for it."""
    if not (torch.is_grad_enabled() and student_logits.requires_grad):
        return None
    logits = student_logits.detach()
    return logits if in_place else torch.empty_like(logits)


def _overwritten(logits: torch.Tensor, room: torch.Tensor | None) -> None:
    # Kernels write behind torch's back, which has to know to refuse a reader of the old values.
    # Tensors without rows all lie at 0.
    if room is not None and len(room) and room.data_ptr() == logits.data_ptr():
        torch.autograd.graph.increment_version(logits)


Evaluate = Callable[..., PartitionValues]


class _PartitionKL(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: torch.Tensor,
        evaluate: Evaluate,
        room: torch.Tensor | None,
        announced: torch.Tensor | None,
        slots: torch.Tensor,
        implementation: Implementation,
    ) -> tuple[torch.Tensor, PartitionValues]:
        values = evaluate(logits, gradient=room)
        _overwritten(logits, room)
        ctx.save_for_backward(room, announced, slots)
        ctx.implementation = implementation
        return values.divergences(), values

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor, _: Any) -> tuple[torch.Tensor | None, ...]:
        gradient, announced, slots = ctx.saved_tensors
        out = hand_over_chunks(gradient, grad, announced, slots, ctx.implementation)
        return out, *[None] * 5
