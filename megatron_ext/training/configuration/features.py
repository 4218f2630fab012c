"""Features of a run that the table of exclusions names, and their detection in a configuration."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Final, Literal

from megatron_ext.errors import ConfigError

if TYPE_CHECKING:
    from megatron_ext.losses import Objective
    from megatron_ext.teachers.target_form import TargetForm
    from megatron_ext.training.configuration.config import (
        DistillConfig,
        LossConfig,
        TeacherConfig,
    )

Stage = Literal["configuration", "objectives", "targets", "megatron_lm"]
"""Stage of a start at which a row is checked: the latest part of the run that it reads."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """A run and one teacher of it, in which features are looked for."""

    config: DistillConfig

    teacher_name: str | None = None
    """None in a run without teachers."""

    objectives: Mapping[str, Objective] = field(default_factory=dict)
    """By teacher; empty before they are made."""

    forms: Mapping[str, TargetForm] = field(default_factory=dict)
    """Forms of targets by teacher, of those not on the student's ranks; empty before they are
    known."""

    @property
    def teacher(self) -> TeacherConfig | None:
        """Section of the teacher."""
        return None if self.teacher_name is None else self.config.named_teachers[self.teacher_name]

    @property
    def objective(self) -> Objective | None:
        """Objective of the teacher; None before it is made."""
        return self.objectives.get(self.teacher_name or "")

    @property
    def loss(self) -> LossConfig | None:
        """The loss against the teacher; None in a run that does not distil."""
        teacher = self.teacher if self.config.distils else None
        return None if teacher is None else self.config.loss.of_teacher(teacher)

    def place(self, key: str) -> str:
        """A key with its placeholders replaced by the teacher's sections."""
        if self.teacher is None or self.teacher_name is None:
            return key
        section = self.config.section_of(self.teacher_name)
        targets = "cache" if self.teacher.cache is not None else "serving.targets"
        for placeholder, replacement in (
            ("{options}", f"{section if self.teacher.options else 'loss'}.options"),
            ("{targets}", f"{section}.{targets}"),
            ("{teacher}", section),
        ):
            key = key.replace(placeholder, replacement)
        return key


@dataclass(frozen=True, slots=True, kw_only=True)
class Feature:
    """Something that a run may ask for."""

    name: str
    """Name in the documentation."""

    value: Callable[[Setting], object]
    """Value with which a run asks for it; None where the run does not."""

    key: str | None = None
    """Key of the configuration; ``{teacher}`` stands for the section of a teacher."""

    off: object = None
    """Value of the key without the feature."""

    def requested(self, setting: Setting) -> str | None:
        """The run's request for the feature, for an error; None where there is none."""
        value = self.value(setting)
        if value is None or value is False or value == ():
            return None
        return _shown(value) if self.key is None else f"{setting.place(self.key)} {_shown(value)}"


@dataclass(frozen=True, slots=True)
class Exclusion:
    """Two features that a run cannot combine, and why."""

    feature: Feature
    """The feature that the error begins with."""

    other: Feature
    why: str
    remedy: str
    stage: Stage = "configuration"

    def check(self, setting: Setting) -> None:
        """Refuse a run that asks for both.

        Raises:
            ConfigError: It does.
        """
        feature = self.feature.requested(setting)
        other = None if feature is None else self.other.requested(setting)
        if feature is None or other is None:
            return
        keys = [(one.key, one.off) for one in (self.feature, self.other) if one.key is not None]
        raise ConfigError(
            self.why,
            where=setting.place(keys[0][0]),
            got=f"{feature} with {other}",
            expected=" or ".join(f"{setting.place(key)} {_shown(off)}" for key, off in keys),
            fix=self.remedy,
        )


def key_feature(key: str, *, off: object = False, only: tuple[object, ...] = ()) -> Feature:
    """The feature that a key has another value than ``off``, or one of ``only``."""
    shown = key.replace("{teacher}", "teacher")
    name = f"`{shown}`"
    if only:
        name = " or ".join(f"`{shown}: {value}`" for value in only)
    elif off is not None and off is not False:
        name = f"`{shown}` other than `{off}`"

    def value(setting: Setting) -> object:
        section: Any = setting.config
        path = key
        if key.startswith("{teacher}."):
            section, path = setting.teacher, key.removeprefix("{teacher}.")
        configured = None if section is None else attrgetter(path)(section)
        if only:
            return configured if configured in only else None
        is_off = not configured if off in (None, False) else configured == off
        return None if is_off else configured

    return Feature(name=name, key=key, off=off, value=value)


def _shown(value: object) -> str:
    if isinstance(value, (tuple, Mapping)):
        return ", ".join(map(str, value)) or "none"
    if isinstance(value, bool):
        return str(value).lower()
    return "none" if value is None else str(value)


def _whole_sequences(setting: Setting) -> str | None:
    why = _of_objective(setting, "why_no_context_parallel")
    return None if why is None else f"of {why}"


def _no_linear_form(setting: Setting) -> str | None:
    why = _of_objective(setting, "why_no_linear_form")
    return None if why is None else f"the objective {why}"


def _of_objective(setting: Setting, reason: str) -> str | None:
    """The objective of the teacher and its reason, an attribute of the objective."""
    loss, objective = setting.loss, setting.objective
    why = None if objective is None else getattr(objective, reason)
    return None if loss is None or why is None else f"{loss.objective}: {why}"


def _nothing_to_lay_out_by(setting: Setting) -> str | None:
    if any(objective.needs.projection for objective in setting.objectives.values()):
        return None
    return f"the objective {setting.config.loss.objective}"


def _nothing_that_learns(setting: Setting) -> str | None:
    if any(objective.learns_projection for objective in setting.objectives.values()):
        return None
    names = [type(objective).__name__ for objective in setting.objectives.values()]
    return ", ".join(names) or "no objective with a teacher"


def _several_teachers(setting: Setting) -> str | None:
    count = len(setting.config.named_teachers) if setting.config.distils else 0
    return f"{count} teachers" if count > 1 else None


def _word_begins(setting: Setting) -> str | None:
    loss, objective = setting.loss, setting.objective
    if loss is None or objective is None or not objective.needs.boundary:
        return None
    return f"the objective {loss.objective}"


def _without_logits(setting: Setting) -> str | None:
    form = setting.forms.get(setting.teacher_name or "")
    return None if form is None or form.kind == "hidden" else str(form)


def _student_layers(setting: Setting) -> str | None:
    """Pairs of layers whose student's layer is below the last."""
    objective = setting.objective
    if objective is None:
        return None
    last = (-1, setting.config.student.num_layers)
    lower = [list(pair) for pair in objective.needs.layers if pair[0] not in last]
    return f"layers {lower}" if lower else None


def _starts_from_heads(setting: Setting) -> str | None:
    starts = _reads_heads(setting) and setting.loss and setting.loss.options.get("projectors")
    return "projectors heads" if starts == "heads" else None


def _reads_heads(setting: Setting) -> str | None:
    loss = setting.loss
    return "loss.objective dskd" if loss is not None and loss.objective == "dskd" else None


def _fraction(setting: Setting) -> float | None:
    factor = setting.config.student.rotary_seq_len_interpolation_factor
    return None if factor is None or factor.is_integer() else factor


def _teacher_experts(setting: Setting) -> int | None:
    """Experts of the teacher, if its model is on the student's ranks."""
    teacher = setting.teacher
    if teacher is None or not setting.config.distils or teacher.cache is not None:
        return None
    is_here = teacher.library == "megatron" and not teacher.is_remote
    return teacher.model.num_experts if is_here else None


def _experts_over_replicas(setting: Setting) -> str | None:
    if setting.config.student.num_experts is None:
        return None
    layout = setting.config.parallel.layout
    return layout.shown_experts if layout.shares_experts_over_replicas else None


def _frozen_layers(setting: Setting) -> tuple[str, ...] | None:
    parts, lora = setting.config.training.trainable, setting.config.lora
    return None if lora or parts is None or "layers" in parts else parts


LAYOUT: Final = key_feature("training.vocabulary_layout", off="original", only=("co_sharded",))
LINEAR: Final = key_feature("loss.linear")
LEARNED: Final = key_feature("loss.learned_projection")
MODE: Final = key_feature("loss.teacher_mode", off="sum")
DYNAMIC: Final = key_feature("loss.teacher_weights", off="static")
BY_GRADIENTS: Final = key_feature("loss.weighting", off="fixed", only=("gradient_magnitude",))
MATCHED: Final = key_feature("loss.weighting", off="fixed", only=("matched",))
KD_WEIGHT: Final = key_feature("loss.kd_weight", off=1.0)
CE_WEIGHT: Final = key_feature("loss.ce_weight", off=1.0)
NO_CROSS_ENTROPY: Final = key_feature("loss.ce_weight", off=1.0, only=(0.0,))
NO_DISTILLATION: Final = key_feature("loss.kd_weight", off=1.0, only=(0.0,))
RECOMPUTED: Final = key_feature("training.recompute_granularity", off=None)
RECOMPUTED_WHOLE: Final = key_feature("training.recompute_granularity", off=None, only=("full",))
LOWER_LAYERS: Final = Feature(
    name="an objective that reads states of the student below its last layer",
    key="{options}",
    off="without them",
    value=_student_layers,
)
FROZEN_LAYERS: Final = Feature(
    name="`training.trainable` without `layers`, and no `lora`",
    key="training.trainable",
    value=_frozen_layers,
)
TRAINABLE: Final = key_feature("training.trainable", off=None)
LORA: Final = Feature(
    name="`lora`",
    key="lora",
    value=lambda setting: setting.config.lora and f"of rank {setting.config.lora.rank}",
)
CONTEXT: Final = key_feature("parallel.context_parallel_size", off=1)
SEQUENCE: Final = key_feature("parallel.sequence_parallel")
INTERLEAVED: Final = key_feature("parallel.virtual_pipeline_model_parallel_size", off=1)
LATE_GATHER: Final = key_feature("parallel.overlap_param_gather")
ROLLOUTS: Final = Feature(
    name="`data.rollouts`",
    key="data.rollouts",
    value=lambda setting: setting.config.data.rollouts and "there",
)
OWN_ROLLOUTS: Final = Feature(
    name="`data.rollouts` without `engine`",
    key="data.rollouts",
    value=lambda s: s.config.data.rollouts and not s.config.data.rollouts.engine and "by itself",
)
SOURCES: Final = key_feature("{teacher}.sources", off=None)
SERVED_ROLLOUTS: Final = Feature(
    name="`data.rollouts.engine`",
    key="data.rollouts.engine",
    value=lambda s: s.config.data.rollouts and s.config.data.rollouts.engine and "there",
)
NO_START: Final = Feature(
    name="no `initial_checkpoint`",
    value=lambda setting: None if setting.config.initial_checkpoint else "random first weights",
)
LINEAR_CROSS_ENTROPY: Final = Feature(
    name="`loss.linear` with a `ce_weight` other than `0`",
    key="loss.linear",
    off=False,
    value=lambda s: s.config.loss.linear and s.config.loss.ce_weight != 0,
)
TASKS: Final = key_feature("evaluation.tasks", off=None)
REMOTE: Final = key_feature("{teacher}.placement", off="student_ranks")
ON_OTHER_DEVICES: Final = key_feature(
    "{teacher}.placement", off="student_ranks", only=("own_ranks", "server")
)
OWN_RANKS: Final = key_feature("{teacher}.placement", off="student_ranks", only=("own_ranks",))
CACHE: Final = key_feature("{teacher}.cache", off=None)
ENGINE: Final = Feature(
    name="`teacher.engine`",
    key="{teacher}.engine",
    value=lambda setting: (
        setting.teacher and setting.teacher.engine and setting.teacher.engine.kind
    ),
)
WORD_BEGINS: Final = Feature(name="an objective that reads where words begin", value=_word_begins)
OFFLOAD: Final = key_feature("{teacher}.offload")
WEIGHT_PRECISION: Final = key_feature("{teacher}.weight_precision", off=None)
AVERAGE: Final = key_feature("{teacher}.ema_decay", off=None)
TRANSFORMERS: Final = key_feature("{teacher}.library", off="megatron", only=("huggingface",))
TEACHER: Final = Feature(
    name="`teacher`",
    key="teacher",
    value=lambda setting: None if setting.config.teacher is None else "as a section",
)
TEACHERS: Final = key_feature("teachers", off=None)
PROJECTION: Final = key_feature("projection", off=None)
TEACHERS_PROJECTION: Final = key_feature("{teacher}.projection", off=None)
SEVERAL: Final = Feature(name="several teachers", value=_several_teachers)
NO_TEACHER: Final = Feature(
    name="an objective without a teacher",
    value=lambda s: None if s.config.distils else f"the objective {s.config.loss.objective}",
)
NO_PROJECTION: Final = Feature(
    name="an objective without a projection", value=_nothing_to_lay_out_by
)
NO_LEARNER: Final = Feature(
    name="an objective that learns no projection", value=_nothing_that_learns
)
NO_LINEAR_FORM: Final = Feature(name="an objective without a linear form", value=_no_linear_form)
WHOLE_SEQUENCES: Final = Feature(
    name="an objective or an option that needs whole sequences",
    key="{options}",
    off="without it",
    value=_whole_sequences,
)
STUDENT_CAP: Final = key_feature("student.logit_cap", off=None)
TEACHER_CAP: Final = Feature(
    name="`logit_cap` of a teacher",
    key="{teacher}.model.logit_cap",
    value=lambda setting: setting.teacher and setting.teacher.model.logit_cap,
)
READS_HEADS: Final = Feature(name="an objective that reads heads: `dskd`", value=_reads_heads)
LATENT: Final = key_feature("student.kv_lora_rank", off=None)
STUDENT_EXPERTS: Final = key_feature("student.num_experts", off=None)
TEACHER_EXPERTS: Final = Feature(
    name="`num_experts` of a teacher on the student's ranks",
    key="{teacher}.model.num_experts",
    value=_teacher_experts,
)
EXPERTS_OVER_REPLICAS: Final = Feature(
    name="a student's experts shared by replicas", value=_experts_over_replicas
)
STARTS_FROM_HEADS: Final = Feature(
    name="the option `projectors: heads` of `dskd`",
    key="{options}",
    off="without it",
    value=_starts_from_heads,
)
NO_LOGITS: Final = Feature(
    name="cached or remote targets that are not `hidden`",
    key="{targets}",
    off="hidden",
    value=_without_logits,
)
HELD_OUT: Final = Feature(
    name="`data.validation` under Megatron-LM's loop",
    key="data.validation",
    value=lambda setting: setting.config.data.validation if setting.config.distils else None,
)
FRACTION: Final = Feature(
    name="a `rotary_seq_len_interpolation_factor` that is not a whole number",
    key="student.rotary_seq_len_interpolation_factor",
    value=_fraction,
)
WINDOW: Final = Feature(
    name="a `window_size` below `seq_length`",
    key="student.window_size",
    value=lambda s: s.config.student.window_size if s.config.student.has_window else None,
)
MEGATRON_LM: Final = Feature(name="Megatron-LM's loop", value=lambda _: "Megatron-LM's loop")
