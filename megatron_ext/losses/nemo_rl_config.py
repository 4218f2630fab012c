"""Configuration of ``CrossTokenizerDistillationLossFn``, under the names of NeMo RL's x_token."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal, TypeVar, get_args

from megatron_ext.errors import LossError, arguments_elsewhere
from megatron_ext.losses.checks import Numerics
from megatron_ext.losses.multi_teacher import TeacherMode
from megatron_ext.typed_mapping import build_config

SumWeightsMetric = Literal["ce", "entropy", "max_prob"]

Config = TypeVar("Config", "CrossTokenizerLossConfig", "TeacherLossConfig")
Built = TypeVar("Built")

_OF_BATCH: Final = (
    *("student_vocab_size", "teacher_vocab_size", "teacher_vocab_sizes"),
    "teacher_send_full_logits",
)
_PREFIX_KL: Final = (
    *("common_indices_from_subtoks", "kl_chunk_shift", "prefix_bidir_v3_loss_fn"),
    *("prefix_bidir_v3_last_pos_loss_fn", "prefix_bidir_v3_jsd_beta"),
    *("prefix_bidir_v3_position_0_kl", "prefix_bidir_v3_noise_filter_topk"),
)
"""NeMo RL's later loss, in place of ``gold_loss`` and ``xtoken_loss``."""

_SHARED_ELSEWHERE: Final = {
    "loss_type": "is gold_loss= and xtoken_loss=; without them KL, projected; chunked_ce is none: "
    "objective 'alm' of a TeacherLossConfig compares likelihoods of chunks",
    "projection_matrix_path": "is projection_matrix_path= of each TeacherLossConfig",
    "projection_matrix_paths": "is projection_matrix_path= of each TeacherLossConfig",
    "teacher_weights": "is weight= of each TeacherLossConfig",
    "teacher_gold_loss": "is gold_loss= of each TeacherLossConfig",
    "teacher_xtoken_loss": "is xtoken_loss= of each TeacherLossConfig",
    **dict.fromkeys(_OF_BATCH, "is not needed: each batch brings its vocabularies and targets"),
    **dict.fromkeys(_PREFIX_KL, "is none: objectives 'partition_kl' and 'byte_prefix' are nearest"),
    "projection_matrix_multiplier": "is not needed: a factor cancels in the loss",
    "project_teacher_to_student": "is not needed: the objective mined does so by itself",
    "learnable": "is loss.learned_projection of a run, or LearnedProjection",
}


@arguments_elsewhere(_SHARED_ELSEWHERE, project="NeMo RL")
@dataclass(frozen=True, slots=True, kw_only=True)
class CrossTokenizerLossConfig:
    """Options shared by all teachers.

    Raises:
        LossError: Options that contradict one another.
    """

    gold_loss: bool = False
    """Learn from teachers of another tokenizer by GOLD; False: by projected KL."""

    xtoken_loss: bool = False
    """With ``gold_loss``: by H-KL instead, whose match of the vocabularies is relaxed."""

    temperature: float = 1.0
    """Temperature of KD; its square is in the loss, once."""

    vocab_topk: int | None = None
    """Teacher tokens that projected KL compares. Proper: so many a chunk and the rest as one;
    None: all. ``nemo``: so many a microbatch, renormalised; None: 8192, as the original."""

    uncommon_topk: int | None = 8192
    """Largest probabilities of uncommon tokens that GOLD and H-KL compare; None: all."""

    reverse_kl: bool = False
    """KL(student || teacher) instead of KL(teacher || student)."""

    exact_token_match_only: bool = False
    """Projected KL over chunks alone whose two sides are equal byte by byte."""

    kl_loss_weight: float = 1.0
    """Weight of KD without ``dynamic_loss_scaling``."""

    ce_loss_scale: float = 0.1
    """Weight of cross-entropy without ``dynamic_loss_scaling``."""

    dynamic_loss_scaling: bool = True
    """Cross-entropy has weight 1, and KD is scaled to its size: by averages over the steps before,
    see ``MatchedWeighting``, and not by the microbatch itself, as the original does."""

    kd_loss_mode: TeacherMode = "sum"
    """Combination of several teachers, see ``MultiTeacherLossAggregator``."""

    sum_weights_metric: SumWeightsMetric | None = None
    """Mode ``sum``: weigh teachers by how well they know the text: ``ce`` by bits per byte,
    ``entropy``, ``max_prob``; all per byte. None: by their weights."""

    alpha: float = 1.0
    """Strength with which the weights follow the metric."""

    normalize_teacher_by_vocab: bool = False
    """Mode ``sum``: weigh by the logarithm of the vocabulary's size: ``ln V_min / ln V_i``; with
    ``nemo`` the inverse, as the original does."""

    numerics: Numerics = "proper"
    """``nemo``: value and gradient of the original's projected KL, GOLD and H-KL on a microbatch.
    Teachers of the student's tokenizer, weights and denominators are proper all the same."""

    def __post_init__(self) -> None:
        for option, value, choices in (
            ("kd_loss_mode", self.kd_loss_mode, get_args(TeacherMode)),
            (
                "sum_weights_metric",
                self.sum_weights_metric,
                (None, *get_args(SumWeightsMetric)),
            ),
            ("numerics", self.numerics, get_args(Numerics)),
        ):
            if value not in choices:
                raise LossError(
                    "unknown choice",
                    got=repr(value),
                    expected=f"one of {', '.join(map(str, choices))}",
                    where=option,
                )
        check_gold(gold_loss=self.gold_loss, xtoken_loss=self.xtoken_loss, where="xtoken_loss")
        # Also under dynamic scaling, which does not use them: the user may switch to them.
        for option in ("kl_loss_weight", "ce_loss_scale"):
            weight = getattr(self, option)
            if not 0 <= weight < math.inf:
                raise LossError(
                    "a weight that cannot be used",
                    got=weight,
                    expected="a finite number, >= 0",
                    where=option,
                )
        if self.kd_loss_mode != "sum":
            for option in ("sum_weights_metric", "normalize_teacher_by_vocab"):
                if getattr(self, option):
                    raise LossError(
                        "weighs the teachers of a sum",
                        got=f"kd_loss_mode {self.kd_loss_mode!r}",
                        expected="kd_loss_mode 'sum'",
                        where=option,
                    )


@dataclass(frozen=True, slots=True, kw_only=True)
class TeacherLossConfig:
    """One teacher.

    Raises:
        LossError: Options that contradict one another.
    """

    name: str | None = None
    """Name in inputs and metrics; None: ``t0``, ``t1``, in the order of the list."""

    projection_matrix_path: str | os.PathLike[str] | None = None
    """Projection from the student's vocabulary, which the maker of the inputs reads; None: the
    teacher has the student's tokenizer, unless ``objective`` says otherwise."""

    weight: float = 1.0
    """Weight of its KD in a sum, or of its logits in an average."""

    gold_loss: bool | None = None
    """Overrides the shared option of this name; None: the shared value."""

    xtoken_loss: bool | None = None
    """Overrides the shared option of this name; None: the shared value."""

    objective: str | None = None
    """Name in ``LOSS_REGISTRY``, in place of the objective that the other options choose."""

    options: Mapping[str, Any] = field(default_factory=dict)
    """Options of ``objective``, its temperature included: the shared ones do not apply to it."""

    def __post_init__(self) -> None:
        if self.options and self.objective is None:
            raise LossError(
                "options are of an objective that is named",
                got=", ".join(self.options),
                fix="name the objective",
                where="options",
            )
        for option in ("gold_loss", "xtoken_loss"):
            if getattr(self, option) is None:
                continue
            if self.objective is not None:
                raise LossError(
                    "chooses an objective beside the one that is named",
                    got=f"objective {self.objective!r}",
                    fix=f"leave {option} out",
                    where=option,
                )
            if self.projection_matrix_path is None:
                raise LossError(
                    "is for teachers of another tokenizer",
                    got="no projection_matrix_path",
                    fix=f"leave {option} out, or give the projection",
                    where=option,
                )


def check_gold(*, gold_loss: bool, xtoken_loss: bool, where: str) -> None:
    """Check that H-KL, a kind of GOLD, is not asked for without GOLD.

    Raises:
        LossError: It is.
    """
    if xtoken_loss and not gold_loss:
        raise LossError(
            "relaxes the match of GOLD, which is off",
            got="xtoken_loss true, gold_loss false",
            fix="set gold_loss too",
            where=where,
        )


def from_mapping(kind: type[Config], values: Config | Mapping[str, Any]) -> Config:
    """Build a configuration of ``kind`` from its keys.

    Raises:
        LossError: An unknown key, or a value of another type.
        ConfigError: A key of NeMo RL for which there is another here.
    """
    if isinstance(values, kind):
        return values
    if kind is CrossTokenizerLossConfig and isinstance(values, Mapping):
        # Refuses what of these it is called with.
        kind(**{key: values[key] for key in values if key in _SHARED_ELSEWHERE})
    assert not isinstance(values, (CrossTokenizerLossConfig, TeacherLossConfig))
    return built(kind, values, of=kind.__name__)


def built(kind: type[Built], values: Mapping[str, Any], *, of: str) -> Built:
    """Build a dataclass from its keys.

    Args:
        of: Owner of the keys, for errors.

    Raises:
        LossError: An unknown or missing key, or a value of another type.
    """

    def where(keys: tuple[str, ...]) -> str:
        return " of ".join((*reversed(keys), of))

    return build_config(kind, values, where, error=LossError)
