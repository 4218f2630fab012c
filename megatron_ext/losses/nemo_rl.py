"""Cross-entropy and KD from any number of teachers as one loss, under NeMo RL's names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import is_dataclass
from typing import Any, Final

import torch

from megatron_ext.errors import LossError, arguments_elsewhere
from megatron_ext.losses.base import DistillationInputs, KnownAhead
from megatron_ext.losses.multi_teacher import (
    MultiTeacherLossAggregator,
    TeacherObjective,
    VocabNormalisation,
)
from megatron_ext.losses.nemo_rl_config import (
    CrossTokenizerLossConfig,
    TeacherLossConfig,
    built,
    check_gold,
    from_mapping,
)
from megatron_ext.losses.objective import LOSS_REGISTRY
from megatron_ext.losses.objectives.next_token import NextTokenLoss
from megatron_ext.losses.plan import CombinedOutput, LossPart, LossPlan
from megatron_ext.losses.teacher_scores import TeacherMeasure
from megatron_ext.losses.weighting import FixedWeighting, LossWeighting, MatchedWeighting

NEMO_VOCAB_TOPK: Final = 8192
"""Columns of a microbatch in the original's projected KL, unless the call names another number."""

_MEASURES: Final[Mapping[str | None, TeacherMeasure | None]] = {
    None: None,
    "ce": "bits_per_byte",
    "entropy": "entropy",
    "max_prob": "max_prob",
}


@arguments_elsewhere(
    {
        "cfg": "is config=, and teachers= a list with a configuration for each teacher",
        "token_aligner": "is not needed: each batch brings its alignments",
    },
    project="NeMo RL",
)
class CrossTokenizerDistillationLossFn:
    """``w_kd * KD + w_ce * CE`` of a student and its teachers.

    Per global batch, on every rank that computes the loss:

    1. ``counts`` of every microbatch, from the data alone; added up, then ``reduce_counts``.
    2. With ``sum_weights_metric``: ``aggregator.scores`` of every microbatch after the teachers'
       forward passes; added up, ``reduce_scores``, ``aggregator.weights``. In the mode
       ``select_teacher``: ``aggregator.select`` and ``selected`` of every microbatch, before 1.
    3. Per microbatch: call it, and go backward from ``output.total(counts)``.
    4. ``observe`` what ``weighting.observes``: the sum of ``output.terms(counts)`` over
       microbatches and data- and context-parallel ranks, or norms of gradients
       (``LayerGradients``). A term whose count is 0 is left out.

    A configuration of NeMo RL's x_token loss works unchanged, but for its later loss
    (``prefix_bidir_v3_...``), which is refused. Each key documents its differences:
    objectives are proper unless ``numerics`` is ``nemo``, teachers are compared per byte, and
    dynamic scaling follows an average over steps.

    Args:
        config: Options shared by all teachers, or their mapping.
        teachers: One configuration, or mapping, a teacher; at least one.
        weighting: Weighting of KD against cross-entropy; None: chosen by ``config``.

    Raises:
        LossError: An unknown key, a value of another type, options that contradict one another,
            two teachers of one name, or no teacher.
        UnknownNameError: An unknown objective.
    """

    def __init__(
        self,
        config: CrossTokenizerLossConfig | Mapping[str, Any],
        teachers: Sequence[TeacherLossConfig | Mapping[str, Any]] = (),
        *,
        weighting: LossWeighting | None = None,
    ) -> None:
        self.config = from_mapping(CrossTokenizerLossConfig, config)
        if not isinstance(teachers, Sequence) or isinstance(teachers, str):
            raise LossError(
                "teachers are not in a list",
                got=type(teachers).__name__,
                fix="pass a list with a TeacherLossConfig, or its mapping, for each teacher",
            )
        self.teachers = _named([from_mapping(TeacherLossConfig, teacher) for teacher in teachers])
        self.aggregator = MultiTeacherLossAggregator(
            teachers={
                name: _teacher_objective(self.config, teacher)
                for name, teacher in self.teachers.items()
            },
            mode=self.config.kd_loss_mode,
            measure=_MEASURES[self.config.sum_weights_metric],
            alpha=self.config.alpha,
            vocab_normalisation=_normalisation(self.config),
        )
        self.weighting = weighting or _weighting(self.config)
        self._next_token = NextTokenLoss()

    def __call__(
        self,
        student: DistillationInputs,
        teachers: Mapping[str, DistillationInputs],
        *,
        step: int = 0,
        teacher_weights: torch.Tensor | None = None,
    ) -> CombinedOutput:
        """Compute the loss of one microbatch.

        Args:
            student: Logits and labels for cross-entropy; under context parallelism this rank's
                slices.
            teachers: By name, the student with each teacher; under context parallelism the
                inputs that ``ContextParallelPlan.inputs`` returns.
            step: Number of the global batch, from 0.
            teacher_weights: Result of ``aggregator.weights``, with a ``sum_weights_metric``.

        Returns:
            Parts ``ce`` and ``kd/<teacher>`` with metrics. Collectives: those of ``NextTokenLoss``
            and then of each teacher's objective.
        """
        ce = LossPart(objective=self._next_token, inputs=student, term="ce", count_name="ce")
        plan = LossPlan(
            parts={"ce": ce, **self.aggregator(teachers, weights=teacher_weights)},
            term_weights=self.weighting.weights(step),
        )
        return plan.outputs()

    def counts(
        self, student: KnownAhead, teachers: Mapping[str, KnownAhead]
    ) -> dict[str, torch.Tensor]:
        """Counts of one microbatch by name, int64 scalars, before the student has run."""
        tokens = self._next_token.count_ahead(student)
        return {"ce": tokens, **self.aggregator.counts(teachers)}

    def observe(self, values: Mapping[str, float]) -> None:
        """Pass a global batch's observed values to the weighting, see ``LossWeighting``."""
        self.weighting.observe(values)

    def state_dict(self) -> dict[str, Any]:
        """State that an exact resume needs; plain numbers."""
        return {"weighting": self.weighting.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore ``state``."""
        self.weighting.load_state_dict(state["weighting"])


def objective_of(
    config: CrossTokenizerLossConfig, teacher: TeacherLossConfig
) -> tuple[str, dict[str, Any]]:
    """Name in ``LOSS_REGISTRY`` and options of the objective for one teacher.

    Raises:
        LossError: Options that contradict one another.
    """
    if teacher.objective is not None:
        return teacher.objective, dict(teacher.options)
    direction = "reverse" if config.reverse_kl else "forward"
    shared: dict[str, Any] = {"temperature": config.temperature, "direction": direction}
    if teacher.projection_matrix_path is None:
        return "vocab_kl", shared
    gold = config.gold_loss if teacher.gold_loss is None else teacher.gold_loss
    xtoken = config.xtoken_loss if teacher.xtoken_loss is None else teacher.xtoken_loss
    check_gold(gold_loss=gold, xtoken_loss=xtoken, where="xtoken_loss of a teacher")
    shared["numerics"] = config.numerics
    if gold:
        if config.exact_token_match_only:
            raise LossError(
                "restricts projected KL, and a teacher is learned from by GOLD",
                fix="leave it out, or turn gold_loss off",
                where="exact_token_match_only",
            )
        return "hybrid_kl" if xtoken else "gold", shared | {"uncommon_topk": config.uncommon_topk}
    topk = config.vocab_topk
    if topk is None and config.numerics == "nemo":
        topk = NEMO_VOCAB_TOPK
    return "projected_kl", shared | {
        "vocab_topk": topk,
        "exact_token_match_only": config.exact_token_match_only,
    }


def _teacher_objective(
    config: CrossTokenizerLossConfig, teacher: TeacherLossConfig
) -> TeacherObjective:
    name, options = objective_of(config, teacher)
    constructor: Any = LOSS_REGISTRY[name]
    if isinstance(constructor, type) and is_dataclass(constructor):
        objective: Any = built(constructor, options, of=f"the objective {name}")
    else:
        objective = constructor(**options)
    return TeacherObjective(objective=objective, weight=teacher.weight)


def _named(teachers: Sequence[TeacherLossConfig]) -> dict[str, TeacherLossConfig]:
    names = [
        f"t{index}" if teacher.name is None else teacher.name
        for index, teacher in enumerate(teachers)
    ]
    for name in names:
        if names.count(name) > 1:
            raise LossError("teachers share a name", got=repr(name), fix="name each differently")
    return dict(zip(names, teachers, strict=True))


def _normalisation(config: CrossTokenizerLossConfig) -> VocabNormalisation:
    if not config.normalize_teacher_by_vocab:
        return "none"
    return "nemo" if config.numerics == "nemo" else "log_vocab"


def _weighting(config: CrossTokenizerLossConfig) -> LossWeighting:
    if config.dynamic_loss_scaling:
        return MatchedWeighting()
    return FixedWeighting(kd=config.kl_loss_weight, ce=config.ce_loss_scale)
