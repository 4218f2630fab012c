"""The loss of a run for a training loop of your own: logits of two models on one device.

B rows, T positions, V columns of a head.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, TypeAlias

import torch

from megatron_ext.data.batch import CrossTokenizerBatch
from megatron_ext.data.collator import CrossTokenizerCollator, Record, TeacherCTSpec
from megatron_ext.distributed.vocab_parallel import VocabShard
from megatron_ext.errors import LossError
from megatron_ext.losses import (
    DistillationInputs,
    KnownAhead,
    LossPart,
    LossPlan,
    MultiTeacherLossAggregator,
    Objective,
    SumCount,
    TeacherObjective,
    TeacherTargets,
)
from megatron_ext.losses.diagnostics import check_finite
from megatron_ext.projection import SparseProjection
from megatron_ext.projection.compressed_rows import check_built_for
from megatron_ext.tokenizers.from_huggingface import as_tokenizer
from megatron_ext.training.configuration.config import LossConfig
from megatron_ext.training.microbatch import Microbatch, MicrobatchWithTargets, uploaded
from megatron_ext.training.objective import RunConstants, make_objective, next_token_beside
from megatron_ext.training.teacher_term import TeacherTerm

Batch: TypeAlias = CrossTokenizerBatch | Mapping[str, torch.Tensor] | Sequence[Record]
"""A collator's batch, its ``tensors``, or records that ``CrossTokenizerLoss.collator`` takes."""

_TEACHER = "teacher"
_KD = f"kd/{_TEACHER}"


class MeasuredLoss(NamedTuple):
    """A loss with what a run logs of it."""

    loss: torch.Tensor
    """fp32 scalar with a graph."""

    metrics: dict[str, SumCount]
    """(sum, count) by name, without a graph: ``kd``, ``ce`` and what the objective measures. Sums
    and counts of several batches add up; a count of 0 has no mean."""


class CrossTokenizerLoss:
    """Mean loss of a student against a frozen teacher that has another tokenizer, from logits.

    ``kd_weight * KD / count + ce_weight * CE / tokens``, as a run (``megatron-ext distill``)
    computes it, on one device that holds all columns of both heads. Columns of a head beyond its
    tokenizer's ids are padding, without probability.

    Both models read the ``input_ids`` of one batch. Labels are shifted in it: logits at position
    ``t`` predict the label at position ``t``, so logits are passed whole, and not shifted.

    Args:
        student_tokenizer: The student's tokenizer, of this package or a fast one of transformers.
        teacher_tokenizer: The teacher's, alike; None for the student's.
        objective: Name in ``LOSS_REGISTRY``, of one that compares logits.
        kd_weight: Weight of the distillation term.
        ce_weight: Weight of the next-token cross-entropy on the student's labels.
        projection: A projection or its file, for objectives that read one; None builds it.
        max_length: Most label positions of a row of ``collator``, of either model.
        options: Options of the objective, such as ``temperature``.

    Attributes:
        collator: Makes batches of the pair from texts or conversations; rows are as long as the
            longest.
        objective: The objective, with its options.

    Raises:
        UnknownNameError: There is no such objective.
        LossError: The objective needs more than logits, or the student's tokenizer.
        ConfigError: The objective does not have an option, or cannot use its value.
        TokenizerError: A tokenizer is of neither package.
        ProjectionError: The projection is of another pair.
    """

    def __init__(
        self,
        student_tokenizer: Any,
        teacher_tokenizer: Any = None,
        objective: str = "alm",
        *,
        kd_weight: float = 1.0,
        ce_weight: float = 0.0,
        projection: SparseProjection | str | os.PathLike[str] | None = None,
        max_length: int = 2048,
        **options: Any,
    ) -> None:
        student = as_tokenizer(student_tokenizer)
        teacher = student if teacher_tokenizer is None else as_tokenizer(teacher_tokenizer)
        config = LossConfig(
            objective=objective, options=options, kd_weight=kd_weight, ce_weight=ce_weight
        )
        self.objective: Objective = make_objective(config, section="CrossTokenizerLoss")
        self.term_weights = {"kd": config.kd_weight, "ce": config.ce_weight}
        self._tokenizers = student, teacher
        self._check(objective)
        self._projection = self._opened(projection)
        spec = TeacherCTSpec(name=_TEACHER, tokenizer=teacher, max_length=max_length)
        self.collator = CrossTokenizerCollator(student, max_length, [spec], row_multiple=1)
        self._next_token = next_token_beside(config, [self.objective])
        self._aggregator = MultiTeacherLossAggregator(
            teachers={_TEACHER: TeacherObjective(objective=self.objective)}
        )
        self._constants: dict[tuple[Any, ...], RunConstants] = {}

    def __getstate__(self) -> dict[str, Any]:
        """State for a copy or a pickle, without the constants, which are made again: sparse tensors
        of torch cannot be copied."""
        return self.__dict__ | {"_constants": {}}

    def __call__(
        self,
        student_logits: torch.Tensor,
        teacher_logits: torch.Tensor,
        batch: Batch,
        *,
        teacher: str | None = None,
        counts: Mapping[str, torch.Tensor | int] | None = None,
    ) -> torch.Tensor:
        """The loss of ``measured``."""
        return self.measured(
            student_logits, teacher_logits, batch, teacher=teacher, counts=counts
        ).loss

    def measured(
        self,
        student_logits: torch.Tensor,
        teacher_logits: torch.Tensor,
        batch: Batch,
        *,
        teacher: str | None = None,
        counts: Mapping[str, torch.Tensor | int] | None = None,
    ) -> MeasuredLoss:
        """The mean loss over a batch, with its metrics.

        Waits for the device once, to check that the logits are finite. No collectives.

        Args:
            student_logits: [B, Ts, Vs] any float dtype, of the batch's ``student.input_ids``.
            teacher_logits: [B, Tt, Vt], of the teacher's; its graph is not followed.
            batch: A batch, its ``tensors``, or records, of which ``collator`` makes the batch that
                both logits must be of.
            teacher: Name of the teacher in a batch of several.
            counts: Denominators by term in place of the batch's own, for a loss that adds up over
                microbatches or processes: sums of what ``counts`` gives.

        Raises:
            LossError: Logits that do not fit the batch or the tokenizers, or are not finite.
            DataError: A batch without the teacher, or a mapping that is none.
        """
        sides = self._sides(batch, teacher)
        self._check_shapes(student_logits, teacher_logits, sides)
        device = student_logits.device
        shards = tuple(
            VocabShard(start=0, stop=logits.shape[-1], vocab_size=tokenizer.vocab_size)
            for logits, tokenizer in zip(
                (student_logits, teacher_logits), self._tokenizers, strict=True
            )
        )
        term = self._term(shards[0], shards[1], device)
        completions = term.completions(sides)
        microbatch = uploaded(Microbatch.of(sides, completions), device)
        targets = TeacherTargets(kind="logits", shard=shards[1], logits=teacher_logits.detach())
        (both,) = term.with_targets([microbatch], [{_TEACHER: targets}])
        student = DistillationInputs(
            student_logits=student_logits,
            student_shard=shards[0],
            labels=microbatch.student.labels,
        )
        inputs = term.inputs(both, student)
        check_finite(inputs[_TEACHER]).raise_if_bad()
        plan = self._plan(student, inputs, microbatch)
        loss = plan.loss(self._denominators(self._counts(term, both) if counts is None else counts))
        metrics: dict[str, SumCount] = {}
        for name, output in loss.outputs.items():
            shown = term.metric_name(name)
            metrics[shown] = (output.loss_sum.detach(), output.count)
            metrics |= {f"{shown}/{part}": value for part, value in output.metrics.items()}
        return MeasuredLoss(loss.total, metrics)

    def counts(self, batch: Batch, *, teacher: str | None = None) -> dict[str, torch.Tensor]:
        """Terms of the sums of a batch, ``kd`` and ``ce``, int64 scalars on the CPU; from data
        alone, so that they are known before the models have run."""
        sides = self._sides(batch, teacher)
        student, other = (
            VocabShard(start=0, stop=tokenizer.vocab_size, vocab_size=tokenizer.vocab_size)
            for tokenizer in self._tokenizers
        )
        term = self._term(student, other, torch.device("cpu"))
        microbatch = Microbatch.of(sides, {})
        return self._counts(term, *term.with_targets([microbatch], [{}]))

    def _counts(self, term: TeacherTerm, both: MicrobatchWithTargets) -> dict[str, torch.Tensor]:
        tokens = KnownAhead(labels=both.batch.recorded_labels)
        return {"kd": term.counts(both)[_KD], "ce": self._next_token.count_ahead(tokens)}

    def _denominators(
        self, counts: Mapping[str, torch.Tensor | int]
    ) -> dict[str, torch.Tensor | int]:
        named = counts if isinstance(counts, Mapping) else {}
        if not {"kd", "ce"} <= named.keys():
            raise LossError(
                "the loss lacks a denominator",
                got=", ".join(named) or ("none" if counts is named else type(counts).__name__),
                expected="kd and ce",
                fix="add up what CrossTokenizerLoss.counts gives for each batch",
            )
        return {_KD: counts["kd"], "ce": counts["ce"]}

    def _plan(
        self,
        student: DistillationInputs,
        inputs: Mapping[str, DistillationInputs],
        microbatch: Microbatch,
    ) -> LossPlan:
        parts = dict(self._aggregator(inputs))
        if self.term_weights["ce"]:
            # Samples of the student itself are no truth to learn.
            recorded = replace(student, labels=microbatch.recorded_labels)
            ce = LossPart(objective=self._next_token, inputs=recorded, term="ce", count_name="ce")
            parts = {"ce": ce, **parts}
        return LossPlan(parts=parts, term_weights=self.term_weights)

    def _term(self, student: VocabShard, teacher: VocabShard, device: torch.device) -> TeacherTerm:
        """The distillation term for heads of these widths; constants are kept for the next call."""
        key = (student.width, teacher.width, device)
        if key not in self._constants:
            # What is made in inference mode could not be used in training later.
            with torch.inference_mode(False):
                self._constants[key] = RunConstants.of(
                    self.objective.needs,
                    tokenizers=self._tokenizers,
                    shards=(student, teacher),
                    projection=self._projection,
                    device=device,
                )
        return TeacherTerm(aggregator=self._aggregator, constants={_TEACHER: self._constants[key]})

    def _opened(
        self, given: SparseProjection | str | os.PathLike[str] | None
    ) -> SparseProjection | None:
        method = self.objective.needs.projection
        if method is None and given is not None:
            raise LossError(
                f"the objective {self.objective.name} reads no projection",
                fix="leave projection out",
            )
        if method is None:
            return None
        if given is None:
            return SparseProjection.from_tokenizers(*self._tokenizers, method)
        if isinstance(given, SparseProjection):
            for role, tokenizer in zip(("student", "teacher"), self._tokenizers, strict=True):
                check_built_for(None, given.metadata, role, tokenizer)
            return given
        return SparseProjection.load(os.fspath(given), *self._tokenizers)

    def _check(self, name: str) -> None:
        """Check that the objective compares logits of this pair."""
        needs = self.objective.needs
        student, teacher = self._tokenizers
        if name == "next_token":
            raise LossError(
                "next_token reads no teacher",
                fix="name an objective that does, and set ce_weight for cross-entropy beside it",
            )
        if needs.hidden:
            raise LossError(
                f"the objective {name} compares hidden states, and this loss reads logits",
                fix="take another objective, or train with megatron-ext distill",
            )
        if needs.same_tokenizer and student.fingerprint() != teacher.fingerprint():
            raise LossError(
                f"the objective {name} needs a teacher with the student's tokenizer",
                got="another vocabulary",
                fix="take another objective, such as alm",
            )

    def _sides(self, batch: Batch, teacher: str | None) -> CrossTokenizerBatch:
        """The batch on the host, with the one teacher."""
        if isinstance(batch, Mapping):
            on_host = {name: value.cpu() for name, value in batch.items() if torch.is_tensor(value)}
            batch = CrossTokenizerBatch.of_tensors(on_host)
        sides = batch if isinstance(batch, CrossTokenizerBatch) else self.collator(batch)
        sides = sides.to("cpu")
        name = next(iter(sides.teachers), "") if teacher is None else teacher
        if name not in sides.teachers or (teacher is None and len(sides.teachers) > 1):
            raise LossError(
                "the batch lacks the teacher" if teacher else "the batch has not one teacher",
                got=teacher or f"{len(sides.teachers)} teachers",
                expected=f"one of {', '.join(sides.teachers) or 'none'}",
                fix="name one of them: teacher=NAME",
            )
        return replace(
            sides,
            teachers={_TEACHER: sides.teachers[name]},
            alignments={_TEACHER: sides.alignments[name]},
        )

    def _check_shapes(
        self, student: torch.Tensor, teacher: torch.Tensor, sides: CrossTokenizerBatch
    ) -> None:
        of_models = (
            ("student", student, sides.student, self._tokenizers[0]),
            ("teacher", teacher, sides.teachers[_TEACHER], self._tokenizers[1]),
        )
        for name, logits, side, tokenizer in of_models:
            if not (isinstance(logits, torch.Tensor) and logits.is_floating_point()):
                raise LossError(
                    f"the {name}'s logits are no tensor of floats",
                    got=getattr(logits, "dtype", type(logits).__name__),
                    expected="the logits of a model",
                    fix="pass model(input_ids).logits, not what the model returns",
                )
            rows = tuple(side.input_ids.shape)
            if logits.dim() != 3 or tuple(logits.shape[:2]) != rows:
                raise LossError(
                    f"the {name}'s logits are not those of the batch",
                    got=tuple(logits.shape),
                    expected=f"({rows[0]}, {rows[1]}, columns): one row of logits for every"
                    " position of the batch's input_ids",
                    fix="run the model on the input_ids of this batch, and pass its logits whole",
                )
            if logits.shape[-1] < tokenizer.vocab_size:
                raise LossError(
                    f"the {name}'s head has fewer columns than its tokenizer has ids",
                    got=logits.shape[-1],
                    expected=f"at least {tokenizer.vocab_size}",
                    fix="model.resize_token_embeddings(len(tokenizer)), or name the tokenizer that"
                    " the model was trained with",
                )
            largest = int(side.labels.amax()) if side.labels.numel() else 0
            if largest >= tokenizer.vocab_size:
                raise LossError(
                    f"the {name}'s ids are not those of its tokenizer",
                    got=f"the label {largest}",
                    expected=f"at most {tokenizer.vocab_size - 1}",
                    fix="make the batch with collator of this loss, or with its tokenizers",
                )
        if student.device != teacher.device:
            raise LossError(
                "the two models' logits are on different devices",
                got=f"{student.device} and {teacher.device}",
                fix="move the teacher's to the student's",
            )
