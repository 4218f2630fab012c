"""ULD: sorted probabilities of both models compared, by chunk or by position.

B batch, Ts Tt tokens, C chunks, P pairs of positions.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar, Literal, NamedTuple, get_args

import torch

from megatron_ext.alignment.batch import AlignmentBatch
from megatron_ext.constants import IGNORE_INDEX, NO_CHUNK
from megatron_ext.errors import LossError
from megatron_ext.losses.base import DistillationInputs, KnownAhead, LossOutput, Over, SumCount
from megatron_ext.losses.checks import (
    check_alignment,
    check_choice,
    check_count,
    check_student,
    check_teacher,
    check_temperature,
)
from megatron_ext.losses.diagnostics import chunk_output
from megatron_ext.losses.matched_columns import chunked_pair, counted_rows
from megatron_ext.losses.objective import (
    LOSS_REGISTRY,
    Evaluated,
    FusedObjective,
    Needs,
    Scale,
    row_labels,
)
from megatron_ext.losses.targets import TeacherTargets
from megatron_ext.losses.vocabulary_match import row_samples
from megatron_ext.ops.chunk_rows import ChunkRows
from megatron_ext.ops.launch import Implementation, check_implementation
from megatron_ext.ops.sorted_l1 import evaluate_sorted_l1

PairedBy = Literal["chunks", "position"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ULDLoss(FusedObjective):
    """``tau^2 * sum_c sum_i |sort(Q_c)_i - sort(P_c)_i|`` over the ``top_u`` largest places.

    ``Q_c`` and ``P_c`` are the means of the student's and the teacher's distributions over the rows
    of chunk ``c``; the smaller vocabulary is padded with zeros. Between 0 and 2 a chunk, before
    ``tau^2``. It needs no map of the vocabularies and ignores token identity: it is 0, with a zero
    gradient, where both models agree, and also where they spread probability alike over different
    tokens.

    ``alignment="position"`` is the original: the k-th trained token of a sample's student side is
    compared with the k-th of its teacher side, up to the shorter, whatever texts they cover. It
    uses ``labels`` and ``teacher_labels``, from an alignment only the starts of packed samples, and
    counts pairs. Samples must be whole: not for sequences cut over context-parallel ranks.

    Metrics: ``discarded_mass``, an upper bound of each chunk's error, before ``tau^2``;
    over chunks also those of ``losses/diagnostics``. Teacher targets: ``logits``, ``hidden``.
    Collectives: those of ``ops/sorted_l1``, all in the forward: two all-reduces of [Ts + Tt], with
    the cross-entropy longer and one more of [Ts], and a slice of C' chunks one all-gather of
    [C', 2 ``top_u`` + 2] and all-reduces of its student rows.

    Source: Boizard et al., ULD (arXiv 2402.12030), there over full vocabularies and positions.

    Raises:
        LossError: Invalid options; calling it without teacher, or without the alignment or labels
            that it pairs by, or with ones that do not fit the logits. NaN logits make
            ``loss_sum`` NaN.
    """

    name: ClassVar[str] = "uld"
    summary: ClassVar[str] = (
        "sorted probabilities, whatever the tokens; for vocabularies without common tokens"
    )

    temperature: float = 1.0
    """tau, at which both models are compared."""

    top_u: int | None = 1024
    """Largest probabilities that are compared; None: all, which is exact."""

    alignment: PairedBy = "chunks"
    """Pairing of the two sides: by ``chunks`` or by ``position``."""

    implementation: Implementation = "auto"
    """``auto``, ``triton`` or ``torch``, see ``ops/launch``."""

    def __post_init__(self) -> None:
        check_temperature("uld", self.temperature)
        check_count("uld", "top_u", self.top_u)
        check_choice("uld", "alignment", self.alignment, get_args(PairedBy))
        check_implementation("uld", self.implementation)

    def evaluate(
        self,
        inputs: DistillationInputs,
        *,
        scale: Scale = 1.0,
        ce_scale: Scale | None = None,
        gradient: torch.Tensor | None = None,
    ) -> Evaluated:
        """``evaluate_sorted_l1``; its collectives."""
        check_student(inputs)
        if self.alignment == "position":
            teacher, rows, count = _paired_rows(inputs)
        else:
            _, teacher = check_alignment(inputs, objective="uld")
            rows, count = counted_rows(inputs), None
        weight = self.temperature**2
        each = torch.ones(
            rows[0].chunk_count, dtype=torch.float32, device=inputs.student_logits.device
        )
        l1 = evaluate_sorted_l1(
            *chunked_pair(inputs, teacher, rows),
            temperature=self.temperature,
            top_u=self.top_u,
            labels=row_labels(inputs, ce_scale),
            grad_scale=each * (weight * scale),
            gradient=gradient,
            implementation=self.implementation,
        )
        loss, discarded = weight * l1.chunk_loss, l1.discarded_mass
        if count is None:
            output = chunk_output(
                inputs,
                loss,
                means={"discarded_mass": discarded},
                implementation=self.implementation,
            )
        else:
            metrics: dict[str, SumCount] = {"discarded_mass": (discarded.sum(), count)}
            output = LossOutput(loss_sum=loss.sum(), count=count, metrics=metrics)
        assert l1.student_log_sum is not None
        assert l1.teacher_log_sum is not None
        bad = partial(self.flags, inputs, l1.student_log_sum, l1.teacher_log_sum)
        return Evaluated(replace(output, bad=bad), l1.cross_entropy, l1.top_column)

    def tells_bad(self, inputs: DistillationInputs) -> bool:
        """True: rows are normalised, and one of NaN or +inf has no sum."""
        return True

    def count_ahead(self, known: KnownAhead) -> torch.Tensor:
        """Number of chunks or pairs, int64 scalar; by position without the teacher's labels an
        upper bound, the number of the student's labels."""
        if self.alignment == "chunks":
            return known.chunks()
        if known.teacher_labels is None:
            return (known.labels != IGNORE_INDEX).sum()
        return _pairs(known.alignment, known.labels, known.teacher_labels)[1]

    @property
    def needs(self) -> Needs:
        """No inputs beside the common ones."""
        return Needs()

    @property
    def sums_over(self) -> Over:
        """Chunks; labels when paired by position."""
        return "tokens" if self.alignment == "position" else "chunks"

    @property
    def why_no_context_parallel(self) -> str | None:
        """Reason when paired by position."""
        if self.alignment == "position":
            return "alignment position, which counts along a sample"
        return None

    @property
    def why_no_linear_form(self) -> str | None:
        """Reason when paired by position: pairs are counted along a sample."""
        return self.why_no_context_parallel


def _paired_rows(
    inputs: DistillationInputs,
) -> tuple[TeacherTargets, tuple[ChunkRows, ChunkRows], torch.Tensor]:
    """Targets, rows of both sides by pair, as many as there could be, and the number of pairs."""
    teacher, labels = _check_positions(inputs)
    ids, count = _pairs(inputs.alignment, inputs.labels, labels)
    most = min(inputs.labels.numel(), labels.numel())
    return teacher, (ChunkRows.of(ids[0], most), ChunkRows.of(ids[1], most)), count


def _pairs(
    alignment: AlignmentBatch | None, labels: torch.Tensor, teacher_labels: torch.Tensor
) -> tuple[tuple[torch.Tensor, torch.Tensor], torch.Tensor]:
    """Pair index of each student and teacher row, flat, and the number of pairs, int64 scalar.

    Both sides of a sample have equally many paired rows, so a row's pair index is the number of
    paired rows before it.
    """
    sides = []
    for side_labels, cu_seqlens in (
        (labels, alignment.student_cu_seqlens if alignment else None),
        (teacher_labels, alignment.teacher_cu_seqlens if alignment else None),
    ):
        count = len(side_labels) if cu_seqlens is None else len(cu_seqlens) - 1
        sample = row_samples(side_labels, cu_seqlens)
        sides.append(_TrainedRows.of(side_labels, sample, count))
    counts = torch.minimum(sides[0].counts, sides[1].counts)
    paired = [side.trained & (side.place < counts[side.sample]) for side in sides]
    ids = [torch.where(side, side.cumsum(dim=0) - 1, NO_CHUNK) for side in paired]
    return (ids[0], ids[1]), counts.sum()


class _TrainedRows(NamedTuple):
    """Labelled rows of one side, [B * T], and their number in each sample [S]."""

    trained: torch.Tensor
    """bool: the row has a label."""

    sample: torch.Tensor
    """int64"""

    place: torch.Tensor
    """int64: trained rows of the same sample before it."""

    counts: torch.Tensor
    """int64 [S]: trained rows of each sample."""

    @classmethod
    def of(cls, labels: torch.Tensor, sample: torch.Tensor, samples: int) -> _TrainedRows:
        trained = labels.flatten() != IGNORE_INDEX
        one = trained.to(torch.int64)
        counts = one.new_zeros(samples).index_add_(0, sample, one)
        before = counts.cumsum(dim=0) - counts
        return cls(trained, sample, one.cumsum(dim=0) - one - before[sample], counts)


def _check_positions(inputs: DistillationInputs) -> tuple[TeacherTargets, torch.Tensor]:
    teacher, labels = inputs.teacher, inputs.teacher_labels
    if teacher is None or labels is None:
        raise LossError(
            "the objective uld by position needs a teacher and the teacher's labels",
            got="no teacher" if teacher is None else "no teacher_labels",
        )
    check_teacher(teacher, objective="uld", kinds=("logits", "hidden"))
    if labels.shape != teacher.positions or len(labels) != len(inputs.labels):
        raise LossError(
            "the teacher's labels do not fit its positions [B, Tt]",
            got=tuple(labels.shape),
            expected=(len(inputs.labels), teacher.positions[1]),
        )
    if inputs.chunk_mask is not None:
        raise LossError(
            "the objective uld by position has no chunks to leave out",
            got="a chunk_mask",
            fix="leave samples out by their labels, or use alignment='chunks'",
        )
    return teacher, labels


LOSS_REGISTRY.register("uld", ULDLoss)
