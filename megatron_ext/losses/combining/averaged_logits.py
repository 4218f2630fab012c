"""One teacher from several with the student's tokenizer. B batch, T tokens, Vp local columns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from megatron_ext.distributed.vocab_parallel import accumulation_dtype
from megatron_ext.errors import LossError
from megatron_ext.losses.base import DistillationInputs
from megatron_ext.losses.checks.input_check import check_student
from megatron_ext.losses.inputs.targets import TeacherTargets


def averaged_inputs(
    inputs: Mapping[str, DistillationInputs], weights: Sequence[float]
) -> DistillationInputs:
    """The first teacher's inputs with ``sum_i w_i z_i / sum_i w_i`` [B, T, Vp] as its logits, fp32.

    A teacher of weight 0 is not looked at. No collectives: every rank averages its own columns.

    Raises:
        LossError: A teacher that reads other tokens than the student, or targets without logits.
    """
    total = sum(weights)
    mean: torch.Tensor | None = None
    for (name, own), weight in zip(inputs.items(), weights, strict=True):
        targets = _same_tokenizer(own, name)
        if weight == 0:
            continue
        logits = targets.to_logits().detach()
        if mean is None:
            mean = torch.zeros_like(logits, dtype=accumulation_dtype(logits.dtype))
        mean.add_(logits, alpha=weight / total)
    first = next(iter(inputs.values()))
    targets = TeacherTargets(kind="logits", shard=first.student_shard, logits=mean)
    return replace(first, teacher=targets)


def teacher_targets(inputs: DistillationInputs, name: str) -> TeacherTargets:
    """The targets of the teacher ``name``.

    Raises:
        LossError: There are none.
    """
    if inputs.teacher is None:
        raise LossError("a teacher has no targets", where=f"teacher {name!r}")
    return inputs.teacher


def _same_tokenizer(inputs: DistillationInputs, name: str) -> TeacherTargets:
    check_student(inputs)
    targets, student = teacher_targets(inputs, name), inputs.student_shard
    is_same = (
        inputs.projection is None
        and targets.positions == inputs.labels.shape
        and (targets.shard.start, targets.shard.stop, targets.shard.vocab_size)
        == (student.start, student.stop, student.vocab_size)
    )
    if not is_same:
        raise LossError(
            "logits of teachers can be averaged only over the student's own tokenizer",
            got=f"{targets.shard.vocab_size} tokens at {tuple(targets.positions)} positions"
            + (" and a projection" if inputs.projection is not None else ""),
            expected=f"{student.vocab_size} at {tuple(inputs.labels.shape)} and no projection",
            fix="set the mode to 'sum'",
            where=f"teacher {name!r}",
        )
    return targets
