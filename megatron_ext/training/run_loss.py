"""Checks of a run's loss before a model is built, and the weighting of its terms."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, Literal

import torch

from megatron_ext.distributed.process_groups import ProcessGroups
from megatron_ext.errors import ConfigError, LossError
from megatron_ext.losses import (
    FixedWeighting,
    GradientMagnitudeWeighting,
    LayerGradients,
    LossWeighting,
    MatchedWeighting,
    Objective,
    ScheduledWeighting,
)
from megatron_ext.tokenizers import MegatronTokenizerText
from megatron_ext.training.configuration.config import DistillConfig, LossConfig
from megatron_ext.training.configuration.exclusions import check_exclusions
from megatron_ext.training.objective import (
    lower_layers,
    make_objective,
    reads_student_ids,
    teacher_objective,
)
from megatron_ext.training.run_plan import TeacherPlan
from megatron_ext.training.teacher_term import make_aggregator
from megatron_ext.typed_mapping import build_config

if TYPE_CHECKING:
    from megatron.core.models.gpt import GPTModel

_TERMS: Final = ("kd", "ce")

_SECTION: Final = "loss.weighting_options"


def make_weighting(loss: LossConfig, *, train_iters: int) -> LossWeighting:
    """The weighting of a run of ``train_iters`` steps, before the first.

    Raises:
        ConfigError: The weighting does not have an option, or cannot use its value.
    """
    for name in loss.weighting_options:
        if name.startswith("_") or name in ("kd", "ce", "terms"):
            raise ConfigError(
                "no such option of a weighting",
                where=f"{_SECTION}.{name}",
                fix="weights are loss.kd_weight and loss.ce_weight",
            )
    weights = {"kd": loss.kd_weight, "ce": loss.ce_weight, "steps": train_iters}
    values = {name: weights[name] for name in _OF_LOSS[loss.weighting]}
    try:
        weighting: LossWeighting = build_config(
            _KINDS[loss.weighting],
            {**values, **loss.weighting_options},
            lambda keys: ".".join((_SECTION, *keys)),
        )
    except LossError as error:
        raise ConfigError(str(error), where=_SECTION) from error
    return weighting


def layer_gradients(gpt: GPTModel, groups: ProcessGroups) -> LayerGradients:
    """Measures of the terms' gradients over the matrices of a last stage's last layer that learn.

    With adapters these are theirs, but for those with a partial gradient on each rank.
    """
    matrices = [
        weight
        for weight in gpt.decoder.layers[-1].parameters()
        if weight.dim() > 1
        and weight.requires_grad
        and not getattr(weight, "sequence_parallel", False)
    ]
    return LayerGradients(matrices, _TERMS, tp_group=groups.tp, dp_group=groups.dp_cp)


def observe(
    weighting: LossWeighting,
    metrics: Mapping[str, float | None],
    gradients: LayerGradients | None,
    groups: ProcessGroups,
    *,
    has_both: bool,
) -> None:
    """Update the weighting, alike on every rank, with the last stage's values of a global batch.

    A step in which a term counts nothing is skipped.

    Args:
        metrics: Means of the terms, on the last stage.
        gradients: Gradients of the terms, on the last stage, where the weighting follows them.
        has_both: Whether both terms count anything, on the last stage.

    Collectives: none for a weighting that observes nothing; else one broadcast over the stages,
    and those of ``LayerGradients.norms``.
    """
    if weighting.observes == "nothing":
        return
    observed = torch.zeros(len(_TERMS) + 1, dtype=torch.float64, device=groups.device)
    if groups.is_last_stage:
        values = metrics if gradients is None else gradients.norms()
        of_terms = [values[name] for name in _TERMS] if has_both else [0.0] * len(_TERMS)
        observed = observed.new_tensor([float(has_both), *of_terms])
    is_complete, *shared = groups.broadcast_from_last_stage(observed).tolist()
    if is_complete:
        weighting.observe(dict(zip(_TERMS, shared, strict=True)))


_KINDS: Final[Mapping[str, type[Any]]] = {
    "fixed": FixedWeighting,
    "scheduled": ScheduledWeighting,
    "matched": MatchedWeighting,
    "gradient_magnitude": GradientMagnitudeWeighting,
}

_OF_LOSS: Final[Mapping[str, tuple[str, ...]]] = {
    "fixed": ("kd", "ce"),
    "scheduled": ("kd", "ce", "steps"),
    "matched": ("ce",),
    "gradient_magnitude": (),
}
"""Options that each weighting takes from the section ``loss`` and the number of steps."""


def with_vocabulary_layout(config: DistillConfig, *, on_gpu: bool) -> DistillConfig:
    """``config`` with the layout that ``training.vocabulary_layout: auto`` stands for.

    That is ``co_sharded`` on a GPU, whose kernels then read both models side by side, and under
    tensor parallelism, where ranks then exchange few columns; unless something excludes it. On one
    rank of a CPU it changes the time of a loss by less than a tenth.
    """
    if config.training.vocabulary_layout != "auto":
        return config

    def under(layout: Literal["original", "co_sharded"]) -> DistillConfig:
        return replace(config, training=replace(config.training, vocabulary_layout=layout))

    pays = on_gpu or config.parallel.tensor_model_parallel_size > 1
    if not (pays and config.distils):
        return under("original")
    return _if_possible(lambda: under("co_sharded")) or under("original")


def _if_possible(made: Callable[[], DistillConfig]) -> DistillConfig | None:
    """The configuration, unless something of the run excludes a part of it."""
    try:
        config = made()
        plans = {name: TeacherPlan.of(config, name) for name in config.named_teachers}
        objectives = {name: teacher_objective(plan) for name, plan in plans.items()}
        check_exclusions(config, "objectives", objectives=objectives)
    except ConfigError:
        return None
    return config


_WHOLE_LOGITS: Final = 1 << 26
"""Bytes of a microbatch's logits in fp32 from which on a CPU is better off with tiles of them."""

_TILE_LOGITS: Final = 1 << 27
"""Bytes of a tile's logits on a CPU: memory counts for more than the longest products."""


def with_linear_form(config: DistillConfig, *, on_gpu: bool, vocab_size: int) -> DistillConfig:
    """``config`` with the form of the loss that ``loss.linear`` stands for where it is not given.

    That is the linear one on a CPU, which then makes no logits of rows without a loss, unless
    logits are small or something excludes it. On a GPU it trades time for memory, which a user
    decides.

    Args:
        vocab_size: Ids of the student's tokenizer.
    """
    if config.loss.linear is not None:
        return config
    rows = config.training.micro_batch_size * config.student.seq_length
    row_bytes = 4 * config.student.padded_ids(vocab_size)
    is_large = rows * row_bytes >= _WHOLE_LOGITS
    whole = replace(config, loss=replace(config.loss, linear=False))
    # Samples have labels of their own, and their engines are measured by logits.
    if on_gpu or not is_large or not config.distils or config.data.rollouts is not None:
        return whole
    tile_rows = min(config.loss.linear_tile_rows, max(_TILE_LOGITS // row_bytes, 1))
    loss = replace(config.loss, linear=True, linear_tile_rows=tile_rows)
    return _if_possible(lambda: replace(config, loss=loss)) or whole


def check_objectives(config: DistillConfig) -> None:
    """Check the names and options of objectives, also of those that the run does not use.

    Raises:
        ConfigError: An objective does not have an option, or cannot use its value.
        UnknownNameError: There is no such objective.
    """
    # Also where nothing distils: a wrong name or option is an error.
    make_objective(config.loss)
    for name in config.named_teachers if config.distils else ():
        teacher_objective(TeacherPlan.of(config, name))


def check_loss(
    config: DistillConfig,
    tokenizer: MegatronTokenizerText,
    teachers: Mapping[str, MegatronTokenizerText],
) -> None:
    """Check that the run meets the needs of its objectives, after ``check_objectives``.

    Args:
        teachers: Tokenizers by name.

    Raises:
        ConfigError: Objectives, weighting, models and tokenizers do not go together.
    """
    make_weighting(config.loss, train_iters=config.training.train_iters)
    objectives: dict[str, Objective] = {}
    plans = {name: TeacherPlan.of(config, name) for name in teachers}
    if config.distils:
        objectives = {name: teacher_objective(plan) for name, plan in plans.items()}
        make_aggregator(config.loss, plans, objectives)
    check_exclusions(config, "objectives", objectives=objectives)
    for name in objectives:
        if plans[name].config.ema_decay is not None:
            why = "an average of the student is a teacher"
            _check_same_ids(why, plans[name], tokenizer, teachers[name])
        if reads_student_ids(plans[name]):
            _check_same_tokenizer(plans[name], tokenizer, teachers[name])
        _check_layers(plans[name])


def _check_layers(teacher: TeacherPlan) -> None:
    """Check that both models have the layers whose states are compared, the student's where the
    loss is."""
    lower_layers(teacher, of_student=False)
    parallel, count = teacher.parallel, teacher.student.num_layers
    stages = parallel.pipeline_model_parallel_size * parallel.virtual_pipeline_model_parallel_size
    first = count - count // stages + 1
    for layer in lower_layers(teacher, of_student=True):
        if layer < first:
            raise ConfigError(
                "states of the student are compared on the last stage of its pipeline",
                where=f"{teacher.options_section}.options.layers",
                got=f"layer {layer} of {count} over {stages} stages",
                expected=f"layers {first} to {count}, or -1 to -{count // stages}",
                fix="compare a later layer, or set parallel.pipeline_model_parallel_size to 1",
            )


def _check_same_ids(
    why: str,
    teacher: TeacherPlan,
    tokenizer: MegatronTokenizerText,
    other: MegatronTokenizerText,
) -> None:
    """Check that a teacher has the student's vocabulary; ``why`` begins the error."""
    if tokenizer.fingerprint() == other.fingerprint():
        return
    is_average = teacher.config.ema_decay is not None
    key = "teacher_mode" if teacher.loss.teacher_mode == "averaged_logits" else "objective"
    raise ConfigError(
        f"{why} with the student's tokenizer",
        where=f"{teacher.section}.tokenizer",
        got="another vocabulary",
        fix="leave the section out"
        if is_average
        else f"take another loss.{key}, see docs/losses.md",
    )


def _check_same_tokenizer(
    teacher: TeacherPlan,
    tokenizer: MegatronTokenizerText,
    other: MegatronTokenizerText,
) -> None:
    """Check that both models read the same ids, in sequences of one length.

    Args:
        tokenizer: The student's.
        other: The teacher's.
    """
    objective = teacher.loss.objective
    why = f"the objective {objective} needs a teacher"
    if teacher.loss.teacher_mode == "averaged_logits":
        why = "averaged logits need teachers"
    _check_same_ids(why, teacher, tokenizer, other)
    length, of_student = teacher.config.model.seq_length, teacher.student.seq_length
    if length != of_student:
        raise ConfigError(
            f"the objective {objective} compares both models position by position",
            where=f"{teacher.section}.model.seq_length",
            got=length,
            expected=f"{of_student}, as the student's",
        )
