"""``byte_prefix``: the student's next token against what its teacher says next, by common bytes.

B batch, Ts Tt tokens, Vps Vpt local columns, C chunks, S starts, M middles, E completions.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Final

import torch

from megatron_ext.alignment.alignment import ChunkClass
from megatron_ext.constants import NO_CHUNK
from megatron_ext.distributed.vocab_parallel import SLICE_ELEMENTS
from megatron_ext.errors import LossError
from megatron_ext.losses.base import DistillationInputs, KnownAhead, LossOutput
from megatron_ext.losses.checks import check_alignment, check_completions, check_student
from megatron_ext.losses.diagnostics import (
    class_metrics,
    over_chunks,
    read_rows,
    used_chunks,
)
from megatron_ext.losses.objective import (
    LOSS_REGISTRY,
    Evaluated,
    FusedObjective,
    Needs,
    Scale,
    in_fp32,
    label_scales,
)
from megatron_ext.losses.objectives.chunk_likelihood import labelled_ahead
from megatron_ext.losses.prefix_rows import PrefixCut, PrefixRows
from megatron_ext.losses.targets import TeacherTargets
from megatron_ext.ops.chunk_rows import index_sum
from megatron_ext.ops.divergence import Divergence, DivergenceOptions, check_divergence
from megatron_ext.ops.launch import Implementation, check_implementation
from megatron_ext.ops.partition_kl import (
    ChainRows,
    Chains,
    PartitionPlan,
    PartitionValues,
    RowMasses,
    SingleRows,
    evaluate_partition_kl,
)
from megatron_ext.ops.prefix_masses import PrefixColumns, PrefixTargets, TargetRows


@dataclass(frozen=True, slots=True, kw_only=True)
class BytePrefixLoss(FusedObjective):
    """``tau^2 * sum_i D(P_i || Q_i)`` over the student's rows in chunks, in nats, counting them.

    Q_i is what the student says next, over its whole vocabulary. P_i says the same of the teacher
    (``ops/prefix_masses``): each of its tokens counts for the student token that its bytes begin
    with; within a teacher token, only tokens that begin with what was said of it do. A
    label that spans several teacher tokens gets the product of their probabilities. What has no
    counterpart is one event, the rest. Zero, with zero gradient, where both models have one
    vocabulary and agree.

    A student token that is longer than the teacher's tokens has a target only where it is the
    label: elsewhere all of its mass counts for the shorter tokens.

    Metrics, a row: ``teacher_rest`` and ``student_rest`` (probability of the rest),
    ``top1_agreement`` (of the most probable event), ``middle`` (share of rows within a teacher
    token); and those of ``losses/diagnostics``, by chunk.
    Collectives: those of ``ops/prefix_masses`` and ``ops/partition_kl``.

    Teacher targets: ``logits`` and ``hidden``. A chunk of several tokens, one of which has no
    label, is left out.

    Raises:
        LossError: Invalid options; calling it without teacher, alignment, prefix rows or columns,
            or with ones that do not fit. NaN logits are not looked for: they make ``loss_sum`` NaN.

    Source: Byte-prefix marginalization (arXiv 2607.22334), which takes the longest student token
    where this takes that of the student's tokenizer.
    """

    name: ClassVar[str] = "byte_prefix"

    summary: ClassVar[str] = (
        "the student's next token, of its whole vocabulary, against its teacher's by common bytes"
    )

    temperature: float = 1.0
    """tau: masses of the events to the power of 1 / tau, normalised again."""

    direction: Divergence = "forward"
    """``forward``: KL(teacher || student). ``reverse``: KL(student || teacher).
    ``jensen_shannon``: of both to their mixture."""

    mixture: float = 0.5
    """Weight of the teacher in the mixture of ``jensen_shannon``."""

    smoothing: float = 0.0
    """Share of the teacher's mass at every row that is spread evenly over the events, below 1. A
    student token that the target lacks costs what the smallest normal number does, 87 nats, in a
    reverse KL; a share of 1e-3 makes that some 19."""

    implementation: Implementation = "auto"
    """``auto``, ``triton`` or ``torch``, see ``ops/launch``."""

    def __post_init__(self) -> None:
        check_divergence(
            self.name,
            temperature=self.temperature,
            direction=self.direction,
            mixture=self.mixture,
        )
        check_implementation(self.name, self.implementation)
        if not 0 <= self.smoothing < 1:
            raise LossError(
                f"the smoothing of {self.name} is not a share",
                got=self.smoothing,
                expected="at least 0 and below 1",
            )

    def evaluate(
        self,
        inputs: DistillationInputs,
        *,
        scale: Scale = 1.0,
        ce_scale: Scale | None = None,
        gradient: torch.Tensor | None = None,
    ) -> Evaluated:
        """``evaluate_partition_kl`` with targets of ``PrefixTargets``, some rows at a time."""
        rows, columns, teacher = self._rows(inputs)
        targets = PrefixTargets(
            teacher.to_logits().flatten(0, 1),
            TargetRows(
                start=rows.starts.teacher,
                middle=rows.middles.teacher,
                prefixes=rows.prefixes,
                pointers=rows.pointers,
                event_counts=rows.counts,
                spans=rows.spans,
            ),
            columns,
            shards=(inputs.student_shard, teacher.shard),
            smoothing=self.smoothing,
            implementation=self.implementation,
        )
        of_chunk = used_chunks(inputs)
        used = [of_chunk[side.chunk] for side in (rows.starts, rows.middles)]
        weight = [side * in_fp32(self.temperature**2) * scale for side in used]
        labels = label_weight = None
        if ce_scale is not None:
            labels, label_weight = inputs.labels.flatten(), label_scales(inputs, ce_scale)
        told = read_rows(inputs).flatten()
        logits, middles, values = inputs.student_logits.flatten(0, 1), targets.middles(), []
        for cut in rows.cuts(len(logits), _rows_at_once(logits)):
            plan, masses = self._part(inputs, cut, used[1], middles)
            values.append(
                evaluate_partition_kl(
                    logits[cut.rows],
                    targets.starts(cut.starts),
                    plan,
                    grad_scale=torch.cat([weight[0][cut.starts], weight[1][cut.middles]]),
                    labels=None if labels is None else labels[cut.rows],
                    ce_weight=1.0 if label_weight is None else label_weight[cut.rows],
                    gradient=None if gradient is None else gradient[cut.rows],
                    chain_masses=masses,
                    told=(told[cut.rows],),
                    implementation=self.implementation,
                )
            )
        token_loss = [part.token_loss for part in values if part.token_loss is not None]
        top_column = [part.top_column for part in values if part.top_column is not None]

        def bad() -> torch.Tensor:
            student = torch.cat([part.bad()[0] for part in values])
            return self.flags(inputs, student, targets.is_bad())

        return Evaluated(
            replace(self._output(inputs, values, torch.cat(used)), bad=bad),
            torch.cat(token_loss) if token_loss else None,
            torch.cat(top_column) if top_column else None,
        )

    def tells_bad(self, inputs: DistillationInputs) -> bool:
        """True: a row of NaN or +inf has no sum."""
        return True

    def count_ahead(self, known: KnownAhead) -> torch.Tensor:
        """Student rows of chunks with all their labels, of which those with other bytes on both
        sides have one; and one of each other chunk of one token a side.

        Exact with the teacher's labels, but for chunks of several tokens with a control token among
        them, which have one.
        """
        aligned = known.aligned
        ids = aligned.student_chunk_id.flatten()
        count = aligned.chunk_count
        sizes = torch.zeros(count + 1, dtype=torch.int64, device=ids.device)
        sizes.index_add_(0, torch.where(ids == NO_CHUNK, count, ids), torch.ones_like(ids))
        labelled = labelled_ahead(known)
        is_single = aligned.chunk_class == ChunkClass.ONE_TO_ONE
        rows = torch.where(labelled & aligned.is_exact, sizes[:-1], 1)
        rows = torch.where(labelled | is_single, rows, 0)
        return (rows if known.chunk_mask is None else rows * known.chunk_mask).sum()

    def _rows(self, inputs: DistillationInputs) -> tuple[PrefixRows, PrefixColumns, TeacherTargets]:
        check_student(inputs)
        _, teacher = check_alignment(inputs, objective=self.name, kinds=("logits", "hidden"))
        rows = check_completions(inputs, PrefixRows, objective=self.name)
        if inputs.prefix_columns is None:
            raise LossError(
                f"the objective {self.name} needs the columns of prefixes",
                got="none",
                fix="give PrefixTable.columns as prefix_columns",
            )
        return rows, inputs.prefix_columns, teacher

    def _part(
        self, inputs: DistillationInputs, cut: PrefixCut, used: torch.Tensor, masses: RowMasses
    ) -> tuple[PartitionPlan, RowMasses]:
        """Comparison of some rows: starts over the vocabulary, middles over their completions."""
        rows, columns = inputs.completions, inputs.prefix_columns
        assert isinstance(rows, PrefixRows)
        assert columns is not None
        own = rows.pointers[cut.middles.start : cut.middles.stop + 1]
        pointers = tuple(pointer - own[0] for pointer in own)
        events = slice(own[0], own[-1])
        starts = rows.starts.student[cut.starts] - cut.rows.start
        middles = rows.middles.student[cut.middles] - cut.rows.start
        number = torch.arange(len(middles), device=middles.device)
        nothing = number[:0]
        student = ChainRows(nothing, nothing, nothing, nothing, middles, rows.completion[events])
        plan = PartitionPlan(
            SingleRows(starts, torch.arange(len(starts), device=starts.device)),
            columns.starts.shared,
            Chains(
                student=student,
                teacher=student,
                completion_chain=number.repeat_interleave(
                    rows.counts[cut.middles], output_size=pointers[-1]
                ),
                completion_pointers=pointers,
                longest=0,
            ),
            used[cut.middles],
            inputs.student_shard,
            columns.starts.shard,
            DivergenceOptions(
                temperature=self.temperature, direction=self.direction, mixture=self.mixture
            ),
        )
        return plan, masses._replace(
            completion=masses.completion[events], last_rest=masses.last_rest[cut.middles]
        )

    def _output(
        self, inputs: DistillationInputs, values: list[PartitionValues], used: torch.Tensor
    ) -> LossOutput:
        """Output from the values of every part of the rows."""
        rows, alignment = inputs.completions, inputs.alignment
        assert isinstance(rows, PrefixRows)
        assert alignment is not None
        divergence, student_rest, teacher_rest, agreement = (
            torch.cat([part.singles[i] for part in values] + [part.chains[i] for part in values])
            for i in range(4)
        )
        chunk = torch.cat([rows.starts.chunk, rows.middles.chunk])
        loss = torch.where(used, self.temperature**2 * divergence, 0.0)
        chunk_loss = index_sum(loss, chunk, alignment.chunk_count)
        is_middle = torch.arange(len(chunk), device=chunk.device) >= len(rows.starts.chunk)
        means = {
            "teacher_rest": teacher_rest,
            "student_rest": student_rest,
            "top1_agreement": agreement,
            "middle": is_middle.to(loss.dtype),
        }
        of_chunk = torch.zeros_like(chunk_loss, dtype=torch.bool).index_fill_(0, chunk, True)
        return LossOutput(
            loss_sum=loss.sum(),
            count=used.sum(),
            chunk_loss=chunk_loss,
            metrics={name: over_chunks(part, used) for name, part in means.items()}
            | class_metrics(
                inputs,
                chunk_loss,
                used_chunks(inputs, of_chunk),
                implementation=self.implementation,
            ),
        )

    @property
    def needs(self) -> Needs:
        """The prefixes, and the match for control tokens."""
        return Needs(projection="retokenized", match=True, completions="prefixes")

    @property
    def why_no_linear_form(self) -> str | None:
        """None: each row is a term."""
        return None


def _rows_at_once(logits: torch.Tensor) -> int:
    """Student rows whose targets are in memory at a time, in fp32."""
    return max(1, _SLICES * SLICE_ELEMENTS[logits.device.type] // max(logits.shape[1], 1))


_SLICES: Final = 4
"""Slices of ``row_slices`` that are compared in one call."""

LOSS_REGISTRY.register("byte_prefix", BytePrefixLoss)
