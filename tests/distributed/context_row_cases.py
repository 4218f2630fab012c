"""Objectives over tokens, and over hidden states, of sequences cut over context-parallel ranks."""

from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from megatron_ext.distributed.context_parallel import SequenceLayout, SequenceOrder
from megatron_ext.losses import LOSS_REGISTRY, DistillationInputs, DskdProjectors
from megatron_ext.losses.context_parallel import ContextParallelPlan
from tests.distributed.context_cases import LENGTHS, PADDING, Chunks, held, microbatch
from tests.losses.microbatch import Microbatch, columns
from tests.losses.objective_cases import with_hidden_states

RowObjective = Literal["next_token", "vocab_kl", "dskd"]

RowCase = tuple[RowObjective, SequenceOrder, Chunks]

ROW_CASES: tuple[RowCase, ...] = (
    ("next_token", "zigzag", "none"),
    ("vocab_kl", "zigzag", "none"),
    ("vocab_kl", "contiguous", "none"),
    ("dskd", "zigzag", "of one token"),
    ("dskd", "contiguous", "of one token"),
    # The other ranks have no row.
    ("dskd", "contiguous", "of the first rank"),
)


@dataclass(frozen=True, kw_only=True)
class Rows:
    """What one rank has of the whole."""

    loss_sum: torch.Tensor
    count: int

    logits: torch.Tensor
    """Gradient [B, T of this rank, Vp]."""

    hidden: torch.Tensor
    """Gradient [B, T of this rank, D], the same on every tensor-parallel rank; zeros where the
    objective reads none."""

    projectors: list[torch.Tensor]
    """This rank's part of the gradients of DSKD's weights."""


def whole_rows(
    name: RowObjective, chunks: Chunks, *, tp: tuple[int, int, Any] = (0, 1, None)
) -> DistillationInputs:
    """Everything, of this tensor-parallel rank's columns."""
    rank, ranks, group = tp
    if name != "dskd":
        batch = Microbatch.random(batch=2, lengths=(LENGTHS[0],) * 2, vocabs=(37, 37), chunks=0)
        return batch.inputs(rank=rank, ranks=ranks, group=group, padding=(PADDING[0],) * 2)
    batch = microbatch(chunks)
    inputs = batch.inputs(rank=rank, ranks=ranks, group=group, padding=PADDING)
    of_hidden = with_hidden_states(batch, (0, 0))
    teacher_head = columns(of_hidden.teacher.head_weight.t(), inputs.teacher.shard).t()
    return replace(
        inputs,
        teacher=replace(
            of_hidden.teacher, shard=inputs.teacher.shard, head_weight=teacher_head.contiguous()
        ),
        student_hidden=of_hidden.student_hidden,
        student_head_weight=columns(of_hidden.student_head_weight.t(), inputs.student_shard).t(),
    )


def rows_of(
    name: RowObjective,
    order: SequenceOrder,
    chunks: Chunks,
    *,
    cp: tuple[int, int, Any] = (0, 1, None),
    tp: tuple[int, int, Any] = (0, 1, None),
) -> Rows:
    """An objective on what a rank holds; ``cp``, ``tp`` are rank, size and group."""
    rank, size, group = cp
    layout = SequenceLayout(size=size, order=order)
    whole = whole_rows(name, chunks, tp=tp)
    places = [held(layout, length, rank) for length in (LENGTHS[0], whole.teacher.positions[1])]
    logits = whole.student_logits.detach()[:, places[0]].clone().requires_grad_()
    teacher = {
        field: rows[:, places[1]]
        for field in ("logits", "hidden")
        if (rows := getattr(whole.teacher, field)) is not None
    }
    inputs = replace(
        whole,
        student_logits=logits,
        labels=whole.labels[:, places[0]],
        teacher=replace(whole.teacher, **teacher),
        teacher_labels=None,
    )
    trained: list[torch.Tensor] = [logits]
    options: dict[str, Any] = {}
    if name == "dskd":
        projectors = DskdProjectors(student_hidden=5, teacher_hidden=6)
        options = {"projectors": projectors, "gate": "none", "hidden_distance": "mse"}
        hidden = whole.student_hidden[:, places[0]].clone().requires_grad_()
        trained += [hidden, *options["projectors"].parameters()]
        plan = ContextParallelPlan.from_alignment(
            whole.alignment, student=layout, teacher=layout, rank=rank, group=group
        )
        inputs = plan.inputs(replace(inputs, student_hidden=hidden))
    output = LOSS_REGISTRY[name](**options)(inputs)
    grads = torch.autograd.grad(output.loss_sum, trained, materialize_grads=True)
    return Rows(
        loss_sum=output.loss_sum.detach(),
        count=int(output.count),
        logits=grads[0],
        hidden=grads[1] if name == "dskd" else torch.zeros(2, len(places[0]), 0),
        projectors=list(grads[2:]),
    )
