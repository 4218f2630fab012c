"""Diagnostics of a microbatch: metrics of a loss over chunks, and the check for NaN logits.

``class_metrics`` gives, each as a (sum, count) over the chunks of one microbatch:

- ``used/one_to_one`` and the other three classes: chunks in the sum, of the class's chunks;
- ``loss/one_to_one``: their share of the loss, of those chunks that are in the sum;
- ``loss/digits-1``, ``loss/Latin``: the same by text class and by script, where the inputs know
  them.

The names and their order are the same for every microbatch. No collectives: inputs and outputs are
replicated over the tensor-parallel group. B batch, T tokens, C chunks, Vp local columns.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import reduce
from typing import Final, NamedTuple

import torch

from megatron_ext.alignment.alignment import CHUNK_KINDS
from megatron_ext.alignment.audit.text_class import SCRIPTS, TEXT_CLASSES
from megatron_ext.constants import IGNORE_INDEX, NO_CHUNK
from megatron_ext.distributed.shard_collectives import all_reduce_max
from megatron_ext.distributed.vocab_parallel import VocabShard
from megatron_ext.errors import LossError
from megatron_ext.losses.base import DistillationInputs, LossOutput, SumCount
from megatron_ext.ops.launch import Implementation
from megatron_ext.ops.sums import ClassSums, CountedChunks, ReadRows, bad_rows, chunk_sums


def chunk_output(
    inputs: DistillationInputs,
    chunk_loss: torch.Tensor,
    *,
    usable: torch.Tensor | None = None,
    means: Mapping[str, torch.Tensor] | None = None,
    teacher_row_means: Mapping[str, torch.Tensor] | None = None,
    metrics: Mapping[str, SumCount] | None = None,
    implementation: Implementation = "auto",
) -> LossOutput:
    """Output of an objective that has a loss for every chunk.

    Args:
        inputs: Inputs of the objective, with an alignment.
        chunk_loss: [C] fp32 with a graph, the same on every tensor-parallel rank. Values of chunks
            that are not in the sum are ignored, NaN included.
        usable: bool [C], chunks that the objective can use; None: all. Chunks outside
            ``inputs.chunk_mask`` are left out as well.
        means: Name -> [C] of any dtype, averaged over the chunks in the sum.
        teacher_row_means: Name -> [C], sums of each chunk's teacher rows, averaged over these.
        metrics: Name -> (sum, count), passed on unchanged.
    """
    used = chunk_mask(inputs, usable)
    means, of_rows = means or {}, teacher_row_means or {}
    columns = [*means.values(), *of_rows.values()]
    counted = _counted(inputs, used)
    sums = chunk_sums(chunk_loss, columns, counted, implementation=implementation)
    counts = [*[sums.number] * len(means), *[sums.rows] * len(of_rows)]
    averages = dict(
        zip([*means, *of_rows], zip(sums.columns.unbind(), counts, strict=True), strict=True)
    )
    return LossOutput(
        loss_sum=sums.loss,
        count=sums.number,
        chunk_loss=sums.kept,
        metrics=averages
        | dict(metrics or {})
        | _class_metrics(sums.by_class)
        | _text_metrics(inputs, sums.kept, used, implementation),
    )


def used_chunks(inputs: DistillationInputs, usable: torch.Tensor | None = None) -> torch.Tensor:
    """bool [C]: chunks that are in ``inputs.chunk_mask`` and ``usable``; None stands for all."""
    mask = chunk_mask(inputs, usable)
    if mask is not None:
        return mask
    assert inputs.alignment is not None
    count, device = inputs.alignment.chunk_count, inputs.student_logits.device
    return torch.ones(count, dtype=torch.bool, device=device)


def chunk_mask(
    inputs: DistillationInputs, usable: torch.Tensor | None = None
) -> torch.Tensor | None:
    """``used_chunks``, but None for all, which nothing has to be masked for."""
    masks = [mask for mask in (inputs.chunk_mask, usable) if mask is not None]
    return reduce(torch.logical_and, masks) if masks else None


def _count(values: torch.Tensor, used: torch.Tensor | None) -> torch.Tensor:
    """Number of used chunks of ``values`` [C], int64 scalar."""
    return values.new_full((), len(values), dtype=torch.int64) if used is None else used.sum()


def over_chunks(values: torch.Tensor, used: torch.Tensor | None) -> SumCount:
    """Sum of ``values`` [C] over the used chunks, None for all, and their number."""
    return masked_sum(values, used), _count(values, used)


def masked_sum(values: torch.Tensor, used: torch.Tensor | None) -> torch.Tensor:
    """Sum of ``values`` [C] over the used chunks, None for all, in fp32 at least."""
    dtype = torch.float64 if values.dtype == torch.float64 else torch.float32
    kept = values.detach()
    if used is not None:
        kept = torch.where(used, kept, torch.zeros_like(kept))
    return kept.sum(dtype=dtype)


def class_metrics(
    inputs: DistillationInputs,
    chunk_loss: torch.Tensor,
    used: torch.Tensor | None,
    *,
    implementation: Implementation = "auto",
) -> dict[str, SumCount]:
    """Used chunks and their loss by class; the names are at the top of this file.

    Args:
        chunk_loss: [C] without a graph.
        used: bool [C]; None: all.
    """
    sums = chunk_sums(chunk_loss, (), _counted(inputs, used), implementation=implementation)
    return _class_metrics(sums.by_class) | _text_metrics(inputs, chunk_loss, used, implementation)


def _counted(inputs: DistillationInputs, used: torch.Tensor | None) -> CountedChunks:
    alignment = inputs.alignment
    assert alignment is not None
    classes, rows = alignment.chunk_class, alignment.teacher_offsets
    return CountedChunks(used, classes, len(CHUNK_KINDS), rows)


def _class_metrics(sums: ClassSums) -> dict[str, SumCount]:
    return _by_name("used", CHUNK_KINDS, sums.used, sums.chunks) | _by_name(
        "loss", CHUNK_KINDS, sums.loss, sums.counts
    )


def _text_metrics(
    inputs: DistillationInputs,
    chunk_loss: torch.Tensor,
    used: torch.Tensor | None,
    implementation: Implementation,
) -> dict[str, SumCount]:
    metrics: dict[str, SumCount] = {}
    for classes, names in (
        (inputs.chunk_text_class, tuple(TEXT_CLASSES)),
        (inputs.chunk_script, SCRIPTS),
    ):
        if classes is not None:
            sums = chunk_sums(
                chunk_loss,
                (),
                _counted(inputs, used)._replace(classes=classes, class_count=len(names)),
                implementation=implementation,
            ).by_class
            metrics |= _by_name("loss", names, sums.loss, sums.counts)
    return metrics


def _by_name(
    prefix: str, names: Sequence[str], sums: torch.Tensor, counts: torch.Tensor
) -> dict[str, SumCount]:
    return {
        f"{prefix}/{name}": (total, count)
        for name, total, count in zip(names, sums.unbind(), counts.unbind(), strict=True)
    }


ONE_TEACHER: Final = ("the teacher",)
"""The names of the teachers of a run with one or none."""


class FiniteCheck(NamedTuple):
    """Flags of non-finite numbers in one microbatch, on the device until they are asked for."""

    bad: torch.Tensor
    """int32 [teachers, 2], the same on every rank of the group: 1 where the student's numbers, or
    the teacher's, are bad on any rank."""

    teachers: tuple[str, ...] = ONE_TEACHER
    """Names for the error."""

    def merged(self, other: FiniteCheck) -> FiniteCheck:
        """Combine the flags of two microbatches, so that a step asks once."""
        return self._replace(bad=torch.maximum(self.bad, other.bad))

    def raise_if_bad(self, *, where: str | None = None) -> None:
        """Wait for the device and raise, on every rank alike.

        Args:
            where: Microbatch or iteration, for the error.

        Raises:
            LossError: A number was bad.
        """
        of_student, of_teachers = self.bad.T.tolist()
        bad = zip(("the student", *self.teachers), (any(of_student), *of_teachers), strict=True)
        sides = [f"{name}'s" for name, is_bad in bad if is_bad]
        if sides:
            raise LossError(
                f"{' and '.join(sides)} predictions hold NaN or infinity",
                got="at least one on at least one rank",
                expected="finite logits; -inf is allowed for masked tokens",
                fix="look for a learning rate that is too high, or a broken checkpoint",
                where=where,
            )


def check_finite(inputs: DistillationInputs) -> FiniteCheck:
    """Check every number that an objective reads, in one pass and one all-reduce of two flags.

    NaN and +inf are bad; -inf masks a token. Padding, and rows with neither label nor chunk, are
    ignored. This does not wait for the device; ``FiniteCheck.raise_if_bad`` does, once a step if
    asked so. Every rank calls it for every microbatch, whatever it holds.

    Collectives: one all-reduce of int32 [2] over the student's group.
    """
    teacher = inputs.teacher
    rows, device = read_rows(inputs), inputs.student_logits.device
    bad = torch.zeros(1, 2, dtype=torch.int32, device=device)
    bad[0, 0] = _is_bad(inputs.student_logits, rows, inputs.student_shard)
    if teacher is not None:
        its_rows = teacher_rows(inputs)
        for tensor in (teacher.logits, teacher.hidden, teacher.topk_logits):
            if tensor is not None:
                shard = teacher.shard if tensor is teacher.logits else None
                bad[0, 1] |= _is_bad(tensor, its_rows, shard)
        labels = teacher.label_log_probs
        if labels is not None and teacher.kind == "topk":
            # NaN of a model is in its logits too; here it is a label that is not known.
            labels = labels.masked_fill(labels.isnan(), 0)
        for vector in (teacher.log_normaliser, labels):
            if vector is not None:
                bad[0, 1] |= _is_bad(vector[..., None], its_rows, None)
    return FiniteCheck(all_reduce_max(bad, inputs.student_shard.group))


def bad_flags(
    inputs: DistillationInputs,
    student: torch.Tensor,
    teacher: torch.Tensor,
    *,
    is_cut: bool = False,
    implementation: Implementation = "auto",
) -> torch.Tensor:
    """``LossOutput.bad`` from what tells of bad numbers in rows, as ``ReadRows.told``.

    Args:
        student: [B Ts]
        teacher: [B Tt], or any vector that tells of rows that are read alone, if it ``is_cut``.
    """
    alignment, own, its = inputs.alignment, None, None
    if alignment is not None:
        own, its = alignment.student_chunk_id.flatten(), alignment.teacher_chunk_id.flatten()
    return bad_rows(
        ReadRows(student, inputs.labels.flatten(), own),
        ReadRows(teacher, chunk_id=None if is_cut else its),
        implementation=implementation,
    )


def teacher_rows(inputs: DistillationInputs) -> torch.Tensor:
    """bool [B, Tt]: rows of chunks, or all without an alignment."""
    assert inputs.teacher is not None
    if inputs.alignment is None:
        device = inputs.student_logits.device
        return torch.ones(inputs.teacher.positions, dtype=torch.bool, device=device)
    return inputs.alignment.teacher_chunk_id != NO_CHUNK


def read_rows(inputs: DistillationInputs) -> torch.Tensor:
    """bool [B, Ts]: student's rows with a label or in a chunk."""
    rows = inputs.labels != IGNORE_INDEX
    if inputs.alignment is None:
        return rows
    return rows | (inputs.alignment.student_chunk_id != NO_CHUNK)


def _is_bad(values: torch.Tensor, rows: torch.Tensor, shard: VocabShard | None) -> torch.Tensor:
    """1 where a used row [.., V] of ``values`` has NaN or +inf, else 0; int32 scalar.

    Each is the largest of its row, so one reduction reads the values once.
    """
    width = values.shape[-1] if shard is None else shard.valid_width
    if not width:
        return torch.zeros((), dtype=torch.int32, device=values.device)
    peak = values.detach()[..., :width].amax(dim=-1)
    return (~(peak < torch.inf) & rows).any().to(torch.int32)
