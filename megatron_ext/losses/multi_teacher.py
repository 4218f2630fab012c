"""Several teachers at once: summed, averaged, or one selected for each sample.

B batch, Ts Tt tokens, Vp local columns, C chunks, S samples, P teachers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, get_args

import torch

from megatron_ext.constants import IGNORE_INDEX
from megatron_ext.distributed.vocab_parallel import accumulation_dtype
from megatron_ext.errors import LossError, arguments_elsewhere
from megatron_ext.losses.base import DistillationInputs, KnownAhead, Over
from megatron_ext.losses.checks import check_student
from megatron_ext.losses.objective import Objective
from megatron_ext.losses.plan import LossPart
from megatron_ext.losses.targets import TeacherTargets
from megatron_ext.losses.teacher_scores import (
    TeacherMeasure,
    TeacherText,
    best_teacher,
    dynamic_weights,
    sample_scores,
)
from megatron_ext.losses.vocabulary_match import row_samples


def averaged_inputs(
    inputs: Mapping[str, DistillationInputs], weights: Sequence[float]
) -> DistillationInputs:
    """First teacher's inputs with ``sum_i w_i z_i / sum_i w_i`` [B, T, Vp] as logits, fp32.

    A teacher of weight 0 is skipped. Padding is 0. Collectives: those of
    ``TeacherTargets.logits_over``; every rank averages its own columns.

    Raises:
        LossError: A teacher that reads other tokens than the student, or targets without logits.
    """
    total = sum(weights)
    mean: torch.Tensor | None = None
    for (name, teacher_inputs), weight in zip(inputs.items(), weights, strict=True):
        targets = _same_tokenizer(teacher_inputs, name)
        if weight == 0:
            continue
        shard = teacher_inputs.student_shard
        logits = targets.logits_over(shard).detach()
        if mean is None:
            shape = (*logits.shape[:-1], shard.width)
            mean = logits.new_zeros(shape, dtype=accumulation_dtype(logits.dtype))
        ids = slice(0, shard.valid_width)
        mean[..., ids].add_(logits[..., ids], alpha=weight / total)
    first = next(iter(inputs.values()))
    targets = TeacherTargets(kind="logits", shard=first.student_shard, logits=mean)
    return replace(first, teacher=targets)


def teacher_targets(inputs: DistillationInputs, name: str) -> TeacherTargets:
    """Targets of the teacher ``name``.

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
        and targets.shard.vocab_size == student.vocab_size
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


def restricted(known: KnownAhead, is_chosen: torch.Tensor, over: Over) -> KnownAhead:
    """Restrict ``known`` to the chosen samples.

    Args:
        is_chosen: [S] bool.
        over: ``chunks``: chunks of other samples leave the chunk mask. ``tokens``: their labels
            become ``IGNORE_INDEX``.

    Raises:
        LossError: There is no alignment, and ``over`` is ``chunks``.
    """
    alignment = known.alignment
    if over == "tokens":
        cu_seqlens = None if alignment is None else alignment.student_cu_seqlens
        is_kept = is_chosen[row_samples(known.labels, cu_seqlens)].view_as(known.labels)
        return replace(known, labels=torch.where(is_kept, known.labels, IGNORE_INDEX))
    if alignment is None:
        raise LossError("chunks of some samples need an alignment", got="none")
    mask = is_chosen[alignment.sample]
    return replace(known, chunk_mask=mask if known.chunk_mask is None else known.chunk_mask & mask)


TeacherMode = Literal["sum", "averaged_logits", "select_teacher"]

VocabNormalisation = Literal["none", "log_vocab", "nemo"]
"""Weight of a teacher with ``V_i`` tokens, ``V_min`` the fewest of any teacher. ``log_vocab``:
``ln V_min / ln V_i``, since the divergence of two unrelated distributions grows with the logarithm
of what they choose from. ``nemo``: ``ln V_i / ln V_min``, as the original multiplies."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TeacherObjective:
    """Objective and weight of one teacher."""

    objective: Objective

    weight: float = 1.0


_TEACHERS = "is teachers={name: TeacherObjective(objective=..., weight=...)}; leave out None"


@arguments_elsewhere(
    {
        **dict.fromkeys(("loss_fns", "teacher_loss_fns", "weights", "teacher_weights"), _TEACHERS),
        "normalize_by_vocab": "is vocab_normalisation='log_vocab', or 'nemo' for theirs",
        "cfg": "is not needed",
    },
    project="NeMo RL",
    positional=_TEACHERS,
)
@dataclass(frozen=True, slots=True, kw_only=True)
class MultiTeacherLossAggregator:
    """The KD term of several teachers, each with its own targets, alignment and objective.

    - ``sum``: ``sum_i w_i * KD_i``, where ``KD_i`` is teacher i's sum over its own global count.
      ``w_i`` are the static weights, or ``softmax(alpha * score_i)`` where there is a ``measure``;
      times the vocabulary normalisation.
    - ``averaged_logits``: one KD against ``sum_i w_i z_i / sum_i w_i``. Only teachers with the
      student's tokenizer, and one objective for all; never a silent sum instead.
    - ``select_teacher``: every sample is distilled from the teacher that gives its text the fewest
      bits per byte. The sum over all samples is divided by the teachers' joint count.

    Once per global batch, after the teachers' forward passes and before the student's: add
    ``scores`` up over the microbatches, ``reduce_scores`` over the data-parallel group, and turn
    them into ``weights``, which all microbatches then share. A weight taken from one microbatch
    would make the loss depend on how the batch is cut.

    Raises:
        LossError: No teacher; weights that are negative, not finite, or of which none is positive;
            options that a mode does not have.
    """

    teachers: Mapping[str, TeacherObjective]
    """Teachers by name, in the order of ``weights``."""

    mode: TeacherMode = "sum"

    measure: TeacherMeasure | None = None
    """Measure that weights follow in mode ``sum``, see ``losses/teacher_scores``; None: static
    ones."""

    alpha: float = 1.0
    """Strength with which weights follow the scores; 0: equal weights."""

    vocab_normalisation: VocabNormalisation = "none"

    term: str = field(default="kd", repr=False)
    """Term of the loss that the parts belong to; names of parts begin with it."""

    def __post_init__(self) -> None:
        _check_choices(self)
        weights = self._static()
        if not all(math.isfinite(weight) and weight >= 0 for weight in weights):
            raise LossError(
                "a teacher's weight cannot be used", got=weights, expected="finite numbers, >= 0"
            )
        if not any(weights):
            raise LossError(
                "no teacher has a weight above 0", got=weights, fix="give one a positive weight"
            )
        if self.mode != "sum" and (self.measure or self.vocab_normalisation != "none"):
            raise LossError(
                "dynamic weights and vocabulary normalisation are of the mode 'sum'",
                got=f"mode {self.mode!r}, measure {self.measure!r}, "
                f"vocab_normalisation {self.vocab_normalisation!r}",
                fix="leave them out, or set the mode to 'sum'",
            )
        if self.mode == "select_teacher" and len(set(weights)) > 1:
            raise LossError(
                "the mode 'select_teacher' chooses by bits per byte and has no weights",
                got=weights,
                fix="leave the weights out",
            )
        first, *others = self._objectives()
        if self.mode == "averaged_logits" and any(other != first for other in others):
            raise LossError(
                "averaged logits are compared by one objective",
                got=", ".join(objective.name for objective in self._objectives()),
                expected="one, with the same options, and teachers with the student's tokenizer",
                fix="give all teachers the same, or set the mode to 'sum'",
            )

    def __call__(
        self, inputs: Mapping[str, DistillationInputs], *, weights: torch.Tensor | None = None
    ) -> dict[str, LossPart]:
        """Parts of one microbatch, named ``kd/<teacher>``, or ``kd/average``.

        Args:
            inputs: By teacher, the student with that teacher's targets, alignment, projection and
                match. In mode ``select_teacher`` restricted by ``selected``.
            weights: [P] fp32 from ``weights``; None for the static ones.

        Returns:
            Parts for a ``LossPlan``. No collectives but those of averaging.

        Raises:
            LossError: Inputs of other teachers, or missing dynamic weights.
        """
        self._check_names(inputs)
        if self.mode == "averaged_logits":
            average = averaged_inputs(
                {name: inputs[name] for name in self.teachers}, self._static()
            )
            return {self.part_name("average"): self._part("average", average, 1.0)}
        if self.measure is not None and weights is None:
            raise LossError(
                "the weights of the teachers follow their scores and were not given",
                fix="pass weights=aggregator.weights(totals) of the global batch",
            )
        normalisation = self._normalisation(inputs)
        parts = {}
        for index, (name, teacher) in enumerate(self.teachers.items()):
            weight = teacher.weight if weights is None else weights[index]
            if self.mode == "select_teacher":
                weight = 1.0
            part = self._part(name, inputs[name], weight * normalisation[name])
            parts[self.part_name(name)] = part
        return parts

    def part_name(self, name: str) -> str:
        """Name of a teacher's part."""
        return f"{self.term}/{name}"

    def scores(self, texts: Mapping[str, TeacherText]) -> torch.Tensor:
        """Nats and bytes [P, 2] fp64 of one microbatch, to be summed; see ``sample_scores``.

        Raises:
            LossError: Static weights, or texts of other teachers.
        """
        if self.measure is None:
            raise LossError("static weights need no scores", fix="set measure")
        self._check_names(texts)
        return torch.stack(
            [sample_scores(texts[name], self.measure).sum(dim=0) for name in self.teachers]
        )

    def weights(self, totals: torch.Tensor) -> torch.Tensor:
        """Weights [P] fp32 from nats and bytes [P, 2] of the global batch. No collectives."""
        assert self.measure is not None
        return dynamic_weights(totals, self.measure, alpha=self.alpha)

    def select(self, texts: Mapping[str, TeacherText]) -> torch.Tensor:
        """Index [S] of each sample's best teacher; collectives of ``sample_scores``, P times."""
        self._check_names(texts)
        return best_teacher([sample_scores(texts[name], "bits_per_byte") for name in self.teachers])

    def selected(
        self, known: Mapping[str, KnownAhead], choice: torch.Tensor
    ) -> dict[str, KnownAhead]:
        """Restrict each teacher's chunks or labels to the samples that chose it.

        Args:
            known: By teacher, with whole alignments also under context parallelism. Labels of the
                packed layout are of whole rows too, and their samples those of the alignment.
            choice: [S] from ``select``.
        """
        self._check_names(known)
        return {
            name: restricted(known[name], choice == index, teacher.objective.sums_over)
            for index, (name, teacher) in enumerate(self.teachers.items())
        }

    def counts(self, known: Mapping[str, KnownAhead]) -> dict[str, torch.Tensor]:
        """Counts of one microbatch by ``count_name``, before the student has run."""
        self._check_names(known)
        if self.mode == "averaged_logits":
            name, teacher = next(iter(self.teachers.items()))
            count = teacher.objective.count_ahead(known[name])
            return {self._count_name("average"): count}
        counts: dict[str, torch.Tensor] = {}
        for name, teacher in self.teachers.items():
            key = self._count_name(name)
            count = teacher.objective.count_ahead(known[name])
            counts[key] = counts[key] + count if key in counts else count
        return counts

    def _static(self) -> list[float]:
        return [teacher.weight for teacher in self.teachers.values()]

    def _objectives(self) -> list[Objective]:
        return [teacher.objective for teacher in self.teachers.values()]

    def _count_name(self, name: str) -> str:
        return self.term if self.mode == "select_teacher" else self.part_name(name)

    def _part(
        self, name: str, inputs: DistillationInputs, weight: float | torch.Tensor
    ) -> LossPart:
        teacher = self.teachers.get(name)
        return LossPart(
            # An average has the one objective of all.
            objective=self._objectives()[0] if teacher is None else teacher.objective,
            inputs=inputs,
            term=self.term,
            count_name=self._count_name(name),
            weight=weight,
        )

    def _normalisation(self, inputs: Mapping[str, DistillationInputs]) -> dict[str, float]:
        """Factor of each teacher for its vocabulary."""
        if self.vocab_normalisation == "none":
            return dict.fromkeys(self.teachers, 1.0)
        logs = {
            name: math.log(teacher_targets(inputs[name], name).shard.vocab_size) for name in inputs
        }
        least = min(logs.values())
        ratios = {name: least / value for name, value in logs.items()}
        if self.vocab_normalisation == "log_vocab":
            return ratios
        return {name: 1 / ratio for name, ratio in ratios.items()}

    def _check_names(self, given: Mapping[str, object]) -> None:
        if set(given) != set(self.teachers):
            raise LossError(
                "inputs are of other teachers",
                got=", ".join(given) or "none",
                expected=", ".join(self.teachers),
            )


def _check_choices(aggregator: MultiTeacherLossAggregator) -> None:
    if not aggregator.teachers:
        raise LossError("there is no teacher to learn from", fix="name at least one")
    for option, value, choices in (
        ("mode", aggregator.mode, get_args(TeacherMode)),
        ("measure", aggregator.measure, (None, *get_args(TeacherMeasure))),
        ("vocab_normalisation", aggregator.vocab_normalisation, get_args(VocabNormalisation)),
    ):
        if value not in choices:
            raise LossError(
                f"unknown {option} of several teachers",
                got=repr(value),
                expected=f"one of {', '.join(map(str, choices))}",
            )
    if not math.isfinite(aggregator.alpha):
        raise LossError("alpha must be a finite number", got=aggregator.alpha)
