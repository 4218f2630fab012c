"""Objectives with a cross-entropy, from one sweep over a tile's logits and without a graph.

n rows, Vp local columns, C chunks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, NamedTuple

import torch

from megatron_ext.constants import IGNORE_INDEX
from megatron_ext.losses.base import DistillationInputs, LossOutput
from megatron_ext.losses.checks.input_check import (
    check_alignment,
    check_projection,
    check_same_tokenizer,
    check_student,
)
from megatron_ext.losses.diagnostics import used_chunks
from megatron_ext.losses.objectives.next_token import NextTokenLoss
from megatron_ext.losses.objectives.partition_kl import PartitionKLLoss
from megatron_ext.losses.objectives.projected_kl import ProjectedKLLoss
from megatron_ext.losses.objectives.vocab_kl import VocabKLLoss
from megatron_ext.ops.chunk_rows import ChunkRows
from megatron_ext.ops.partition_kl import evaluate_partition_kl
from megatron_ext.ops.projected_kl import (
    Comparing,
    CrossEntropy,
    evaluate_projected_kl,
)
from megatron_ext.ops.token_log_prob import evaluate_cross_entropy
from megatron_ext.ops.vocab_kl import evaluate_vocab_kl

Scale = float | torch.Tensor


class TileTask(NamedTuple):
    """What is wanted of one tile."""

    inputs: DistillationInputs
    """With logits [1, n, Vp]."""

    scale: Scale
    """What the objective's sum is multiplied by."""

    ce_scale: Scale | None
    """The same of the cross-entropy's; None: it is not wanted."""

    gradient: torch.Tensor | None
    """[n, Vp], receives the gradient of the scaled sums; can be the logits. None: not wanted."""

    @property
    def logits(self) -> torch.Tensor:
        """[n, Vp]"""
        return self.inputs.student_logits.flatten(0, 1)

    @property
    def labels(self) -> torch.Tensor:
        """int64 [n]"""
        return self.inputs.labels.flatten()

    def label_scales(self) -> torch.Tensor:
        """fp32 [n]: what the cross-entropy of each row is multiplied by."""
        assert self.ce_scale is not None
        return torch.where(self.labels != IGNORE_INDEX, 1.0, 0.0) * self.ce_scale


class TileValues(NamedTuple):
    """What is found, without a graph."""

    output: LossOutput
    """Of the objective."""

    token_loss: torch.Tensor | None
    """[n] cross-entropy of each label; None where it was not wanted."""


def projected_kl_values(objective: ProjectedKLLoss, task: TileTask) -> TileValues:
    """``ops.projected_kl``; its collectives."""
    inputs = task.inputs
    check_student(inputs)
    alignment, teacher = check_alignment(inputs, objective="projected_kl")
    projection = check_projection(inputs, objective="projected_kl")
    usable = alignment.is_exact if objective.exact_token_match_only else None
    values = evaluate_projected_kl(
        task.logits,
        teacher.to_logits().flatten(0, 1),
        student_rows=ChunkRows.of(alignment.student_chunk_id.flatten(), alignment.chunk_count),
        teacher_rows=ChunkRows.of(alignment.teacher_chunk_id.flatten(), alignment.chunk_count),
        projection=projection.operand(),
        student_shard=inputs.student_shard,
        teacher_shard=teacher.shard,
        comparing=Comparing(
            objective.temperature, objective.direction, objective.mixture, objective.vocab_topk
        ),
        announced=torch.where(used_chunks(inputs, usable), 1.0, 0.0) * task.scale,
        gradient=task.gradient,
        cross_entropy=_cross_entropy(task),
        implementation=objective.implementation,
    )
    return TileValues(objective.output(inputs, values, usable), values.token_loss)


def partition_kl_values(objective: PartitionKLLoss, task: TileTask) -> TileValues:
    """``ops.partition_kl``; its collectives."""
    events = objective.events(task.inputs)
    alignment = task.inputs.alignment
    assert alignment is not None
    weight = objective.chunk_weight(alignment, torch.float32)
    used = torch.where(used_chunks(task.inputs)[events.chunk] & events.usable, 1.0, 0.0)
    wanted: dict[str, Any] = {}
    if task.ce_scale is not None:
        wanted = {"labels": task.labels, "ce_weight": task.label_scales()}
    values = evaluate_partition_kl(
        task.logits,
        **events.arguments,
        announced=used * weight[events.chunk] * task.scale,
        gradient=task.gradient,
        **wanted,
    )
    parts = values.singles, values.chains
    return TileValues(objective.output(task.inputs, parts, events), values.token_loss)


def vocab_kl_values(objective: VocabKLLoss, task: TileTask) -> TileValues:
    """``ops.vocab_kl``; its collectives."""
    inputs = task.inputs
    check_student(inputs)
    teacher = check_same_tokenizer(inputs, objective="vocab_kl", kinds=("logits", "hidden"))
    wanted: dict[str, Any] = {}
    if task.ce_scale is not None:
        wanted = {"labels": task.labels, "label_announced": task.label_scales()}
    values = evaluate_vocab_kl(
        task.logits,
        teacher.to_logits().flatten(0, 1),
        student_shard=inputs.student_shard,
        teacher_shard=teacher.shard,
        temperature=objective.temperature,
        direction=objective.direction,
        mixture=objective.mixture,
        announced=torch.where(task.labels != IGNORE_INDEX, 1.0, 0.0) * task.scale,
        gradient=task.gradient,
        implementation=objective.implementation,
        **wanted,
    )
    means = {"teacher_entropy": values.teacher_entropy, "top1_agreement": values.top1_agreement}
    return TileValues(objective.output(inputs, values.row_loss, means), values.cross_entropy)


def next_token_values(objective: NextTokenLoss, task: TileTask) -> TileValues:
    """``ops.token_log_prob``, alone; its collectives."""
    check_student(task.inputs)
    values = evaluate_cross_entropy(
        task.logits,
        task.labels,
        task.inputs.student_shard,
        announced=torch.where(task.labels != IGNORE_INDEX, 1.0, 0.0) * task.scale,
        gradient=task.gradient,
        implementation=objective.implementation,
    )
    return TileValues(objective.output(task.inputs, values.row_loss, values.top_column), None)


EVALUATIONS: Final[dict[type[Any], Callable[[Any, TileTask], TileValues]]] = {
    ProjectedKLLoss: projected_kl_values,
    PartitionKLLoss: partition_kl_values,
    VocabKLLoss: vocab_kl_values,
    NextTokenLoss: next_token_values,
}
"""Objective -> how it is evaluated without a graph. Others run under autograd."""


def _cross_entropy(task: TileTask) -> CrossEntropy | None:
    return None if task.ce_scale is None else CrossEntropy(task.labels, task.label_scales())
