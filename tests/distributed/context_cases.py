"""A microbatch cut over context-parallel ranks, for ``test_context_parallel.py`` to join again.

B batch, T tokens, V vocabularies.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist

from megatron_ext.distributed.context_parallel import SequenceLayout, SequenceOrder
from megatron_ext.losses import (
    LOSS_REGISTRY,
    BoundaryColumns,
    CompletionSource,
    DistillationInputs,
    Objective,
    TeacherTargets,
)
from megatron_ext.losses.context_parallel import ContextParallelPlan
from megatron_ext.losses.teacher_scores import TeacherText, sample_scores
from tests.losses.microbatch import Microbatch
from tests.losses.objective_cases import (
    AnyCompletions,
    prefix_table,
    repeat_table,
    repeated,
    spelled,
)

LENGTHS = (32, 16)
PADDING = (7, 1)

Chunks = Literal["scattered", "in order", "of the first rank", "of one token", "none"]
"""``in order``: spans that follow one another, some over several cuts of either side. ``of one
token``: on either side, most on different ranks."""

ObjectiveName = Literal[
    "projected_kl",
    "projected_kl with repeats",
    "alm",
    "partition_kl",
    "byte_prefix",
    "gold",
    "hybrid_kl",
    "uld",
    "mined",
    "strict_topk",
]

COMPLETIONS = AnyCompletions.from_token_bytes([b""] * 37, [b""] * 23)

GROUPS = {"2": (2, 1), "4": (4, 1), "2 x 2": (2, 2)}
"""Context-parallel and tensor-parallel sizes, the latter innermost."""


@dataclass(frozen=True, kw_only=True)
class Rank:
    """What one rank has of the whole."""

    loss_sum: torch.Tensor
    count: torch.Tensor
    chunk_loss: torch.Tensor
    chunks: torch.Tensor
    grad: torch.Tensor
    """[B, T of this rank, Vp]"""

    scores: torch.Tensor
    """[B, 2] of the teacher's text."""


def microbatch(chunks: Chunks) -> Microbatch:
    batch = Microbatch.random(batch=2, lengths=LENGTHS, chunks=0 if chunks == "none" else 5)
    if chunks in ("scattered", "none"):
        return batch
    spans = ([0, 1, 7, 9, 20, 32], [0, 3, 4, 5, 9, 16])
    if chunks == "of the first rank":
        spans = ([0, 1, 3, 5, 6, 7], [9, 11, 12, 13, 14, 15])
    places = tuple(list(pairwise(bounds)) for bounds in spans)
    if chunks == "of one token":
        rows = ([0, 9, 17, 25, 29], [4, 5, 7, 9, 14])
        places = tuple([(row, row + 1) for row in side] for side in rows)
    pairs = []
    for _ in range(2):
        ids = [torch.full((length,), -1) for length in LENGTHS]
        for side, own in zip(ids, places, strict=True):
            for chunk, (start, stop) in enumerate(own):
                side[start:stop] = chunk
        pairs.append((ids[0], ids[1]))
    return replace(batch, chunk_ids=pairs)


def whole_inputs(
    chunks: Chunks, objective: str = "partition_kl", **shards: Any
) -> DistillationInputs:
    """Everything that an objective looks at; some chunks are masked."""
    inputs = microbatch(chunks).inputs(padding=PADDING, **shards)
    labels = torch.arange(2 * LENGTHS[1]).view(2, -1) % 23
    labels[:, 3] = -100
    if objective == "byte_prefix":
        inputs = spelled(replace(inputs, teacher_labels=labels))
        labels = inputs.teacher_labels
    if objective.endswith("repeats"):
        inputs = repeated(replace(inputs, teacher_labels=labels))
        labels = inputs.teacher_labels
    student, teacher = inputs.student_shard, inputs.teacher.shard
    return replace(
        inputs,
        teacher_labels=labels,
        completions=_table(inputs, objective).of_batch(inputs.alignment, inputs.labels, labels),
        boundary=BoundaryColumns(
            student=torch.arange(student.start, student.stop) % 4 == 1,
            teacher=torch.arange(teacher.start, teacher.stop) % 4 == 1,
        ),
        chunk_mask=torch.arange(inputs.alignment.chunk_count) % 4 != 1,
    )


def _table(inputs: DistillationInputs, objective: str) -> CompletionSource:
    if objective.endswith("repeats"):
        return repeat_table((37, 23))
    return COMPLETIONS if inputs.prefix_columns is None else prefix_table((37, 23))


def held(layout: SequenceLayout, length: int, rank: int) -> torch.Tensor:
    """Positions of one sequence that a rank holds."""
    holders = layout.holders(np.array([0, length]))
    return torch.from_numpy(np.flatnonzero(holders == rank))


def on_this_rank(
    chunks: Chunks,
    order: SequenceOrder,
    kind: Literal["logits", "hidden"],
    objective: ObjectiveName,
    *,
    cp: tuple[int, int, Any],
    tp: tuple[int, int, Any],
) -> Rank:
    """An objective on the chunks that a rank owns; ``cp``, ``tp`` are rank, size and group."""
    cp_rank, cp_size, cp_group = cp
    layout = SequenceLayout(size=cp_size, order=order)
    whole = whole_inputs(chunks, objective, rank=tp[0], ranks=tp[1], group=tp[2])
    student = held(layout, LENGTHS[0], cp_rank)
    logits = whole.student_logits.detach()[:, student].clone().requires_grad_()
    teacher = held(layout, LENGTHS[1], cp_rank)
    teacher_rows = whole.teacher.logits[:, teacher]
    targets = TeacherTargets(kind="logits", shard=whole.teacher.shard, logits=teacher_rows)
    if kind == "hidden":
        head = torch.eye(teacher_rows.shape[-1])
        targets = TeacherTargets(
            kind="hidden", shard=targets.shard, hidden=teacher_rows, head_weight=head
        )
    plan = ContextParallelPlan.from_alignment(
        whole.alignment, student=layout, teacher=layout, rank=cp_rank, group=cp_group
    )
    slices = replace(
        whole,
        student_logits=logits,
        labels=whole.labels[:, student],
        teacher=targets,
        teacher_labels=whole.teacher_labels[:, teacher],
        completions=_table(whole, objective).of_batch(
            plan.alignment, *plan.labels(whole.labels, whole.teacher_labels)
        ),
    )
    output = objective_of(objective)(plan.inputs(slices))
    (grad,) = torch.autograd.grad(output.loss_sum, logits)
    assert output.chunk_loss is not None
    return Rank(
        loss_sum=output.loss_sum.detach(),
        count=output.count,
        chunk_loss=output.chunk_loss,
        chunks=plan.chunks,
        grad=grad,
        scores=sample_scores(text_of(slices, cp_group), "bits_per_byte"),
    )


def objective_of(name: ObjectiveName) -> Objective:
    options = {"repeat_weight": 0.7} if name.endswith("repeats") else {}
    return LOSS_REGISTRY[name.split()[0]](temperature=1.3, **options)


def text_of(inputs: DistillationInputs, group: Any = None) -> TeacherText:
    return TeacherText(
        targets=inputs.teacher,
        labels=inputs.teacher_labels,
        byte_counts=torch.tensor([40, 50]),
        context_group=group,
    )


Case = tuple[Chunks, SequenceOrder, Literal["logits", "hidden"], ObjectiveName]

CASES: tuple[Case, ...] = (
    ("scattered", "contiguous", "logits", "projected_kl"),
    ("scattered", "zigzag", "hidden", "projected_kl"),
    ("in order", "contiguous", "logits", "projected_kl"),
    ("in order", "zigzag", "logits", "projected_kl"),
    ("of the first rank", "contiguous", "logits", "projected_kl"),
    ("none", "zigzag", "logits", "projected_kl"),
    ("in order", "zigzag", "logits", "projected_kl with repeats"),
    ("of one token", "contiguous", "hidden", "projected_kl with repeats"),
    ("in order", "zigzag", "logits", "alm"),
    ("in order", "contiguous", "hidden", "alm"),
    ("in order", "zigzag", "hidden", "partition_kl"),
    ("in order", "zigzag", "logits", "gold"),
    ("in order", "contiguous", "hidden", "hybrid_kl"),
    ("in order", "zigzag", "hidden", "uld"),
    ("of one token", "zigzag", "logits", "mined"),
    ("of one token", "contiguous", "hidden", "strict_topk"),
    ("of one token", "zigzag", "logits", "partition_kl"),
    ("in order", "zigzag", "logits", "byte_prefix"),
    ("in order", "contiguous", "hidden", "byte_prefix"),
)


def on_every_layout(rank: int, found: Callable[..., Any], cases: Sequence[Any]) -> dict[str, Any]:
    """What is found of each case on every layout that four ranks make."""
    results = {}
    for name, (cp_size, tp_size) in GROUPS.items():
        cp, tp = make_groups(rank, cp_size, tp_size)
        results[name] = {case: found(*case, cp=cp, tp=tp) for case in cases}
    return results


def make_groups(
    rank: int, cp_size: int, tp_size: int
) -> tuple[tuple[int, int, Any], tuple[int, int, Any]]:
    """This rank's context-parallel and tensor-parallel groups; the rest are replicas."""
    found: dict[str, Any] = {"tp": None}
    for first in range(0, 4, cp_size * tp_size):
        for offset in range(tp_size):
            ranks = [first + offset + tp_size * part for part in range(cp_size)]
            group = dist.new_group(ranks)
            if rank in ranks:
                found["cp"] = group
        for part in range(cp_size if tp_size > 1 else 0):
            ranks = [first + tp_size * part + offset for offset in range(tp_size)]
            group = dist.new_group(ranks)
            if rank in ranks:
                found["tp"] = group
    return (rank // tp_size % cp_size, cp_size, found["cp"]), (rank % tp_size, tp_size, found["tp"])
