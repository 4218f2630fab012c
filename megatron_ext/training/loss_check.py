"""What of a run's loss can be known to be wrong before a model is built."""

from __future__ import annotations

from collections.abc import Mapping

from megatron_ext.errors import ConfigError, LossError
from megatron_ext.losses import Objective
from megatron_ext.losses.linear import LinearDistillation
from megatron_ext.tokenizers import MegatronTokenizerText
from megatron_ext.training.config import DistillConfig
from megatron_ext.training.context_check import check_context_parallel
from megatron_ext.training.objective import make_objective
from megatron_ext.training.teacher_term import make_aggregator
from megatron_ext.training.term_weighting import make_weighting


def check_objectives(config: DistillConfig) -> None:
    """Check that objectives have their names and options, whatever the run then does with them.

    Raises:
        ConfigError: An option that one does not have or cannot use.
        UnknownNameError: There is no such objective.
    """
    # Also where nothing distils: a wrong name or option is an error.
    make_objective(config.loss)
    for name in config.named_teachers if config.distils else ():
        teacher_objective(config, name)


def check_loss(
    config: DistillConfig,
    tokenizer: MegatronTokenizerText,
    teachers: Mapping[str, MegatronTokenizerText],
) -> None:
    """Check what objectives, which ``check_objectives`` found right, ask of the run.

    Args:
        teachers: Tokenizers by name.

    Raises:
        ConfigError: Something does not go together.
    """
    make_weighting(config)
    objectives: dict[str, Objective] = {}
    if config.distils:
        objectives = {name: teacher_objective(config, name) for name in teachers}
        make_aggregator(config, objectives)
    _check_layout(config, objectives)
    _check_learned(config, objectives)
    _check_linear(config, objectives)
    check_context_parallel(config, objectives)
    for name, objective in objectives.items():
        if objective.needs.same_tokenizer or config.loss.teacher_mode == "averaged_logits":
            _check_same_tokenizer(config, name, tokenizer, teachers[name])


def teacher_objective(config: DistillConfig, name: str) -> Objective:
    """The objective for one teacher, without parameters of its own.

    Raises:
        ConfigError: An option that it does not have or cannot use.
    """
    teacher = config.named_teachers[name]
    section = config.section_of(name) if teacher.options or teacher.objective else "loss"
    return make_objective(config.loss.of_teacher(teacher), section=section)


def _check_layout(config: DistillConfig, objectives: Mapping[str, Objective]) -> None:
    if config.training.vocabulary_layout == "original":
        return
    where, got = "training.vocabulary_layout", config.training.vocabulary_layout
    if len(objectives) > 1:
        raise ConfigError(
            "vocabularies are laid out for a pair",
            where=where,
            got=f"{got}, with {len(objectives)} teachers",
            expected="original",
        )
    if not any(objective.needs.projection for objective in objectives.values()):
        raise ConfigError(
            f"the objective {config.loss.objective} has no projection to lay the vocabularies out "
            "by",
            where=where,
            got=got,
            expected="original",
            fix="remove it, or take an objective with a projection, see docs/losses.md",
        )


def _check_learned(config: DistillConfig, objectives: Mapping[str, Objective]) -> None:
    if not config.loss.learned_projection:
        return
    where = "loss.learned_projection"
    if not any(objective.learns_projection for objective in objectives.values()):
        raise ConfigError(
            "no objective learns a projection",
            where=where,
            got=", ".join(type(objective).__name__ for objective in objectives.values()) or "none",
            expected="projected_kl with proper numerics",
        )
    if config.training.vocabulary_layout != "original":
        raise ConfigError(
            "a learned projection is in the order of the ids",
            where=where,
            got=f"training.vocabulary_layout {config.training.vocabulary_layout}",
            expected="original",
        )


def _check_linear(config: DistillConfig, objectives: Mapping[str, Objective]) -> None:
    loss = config.loss
    if not loss.linear:
        return
    for key, got, expected in (
        ("loss.teacher_mode", loss.teacher_mode, "sum"),
        ("loss.learned_projection", loss.learned_projection, False),
        ("training.vocabulary_layout", config.training.vocabulary_layout, "original"),
    ):
        if got != expected:
            raise ConfigError(
                "the linear form does not go with it",
                where=key,
                got=got,
                expected=expected,
                fix="change it, or leave loss.linear out",
            )
    if loss.weighting == "gradient_magnitude":
        raise ConfigError(
            "the linear form has one gradient of all terms, and the weighting asks for each",
            where="loss.weighting",
            got=loss.weighting,
            fix="take another weighting, or leave loss.linear out",
        )
    try:
        for name, objective in objectives.items():
            LinearDistillation(objectives={name: objective})
    except LossError as error:
        raise ConfigError(str(error), where="loss.linear") from error


def _check_same_tokenizer(
    config: DistillConfig, name: str, tokenizer: MegatronTokenizerText, other: MegatronTokenizerText
) -> None:
    teacher, section = config.named_teachers[name], config.section_of(name)
    objective = config.loss.of_teacher(teacher).objective
    why = f"the objective {objective}"
    if config.loss.teacher_mode == "averaged_logits":
        why = "averaged logits"
    if tokenizer.fingerprint() != other.fingerprint():
        raise ConfigError(
            f"{why} needs a teacher with the student's tokenizer"
            if why.startswith("the")
            else f"{why} need teachers with the student's tokenizer",
            where=f"{section}.tokenizer",
            got="another vocabulary",
            fix="take another loss.objective, see docs/losses.md",
        )
    ids = tokenizer.vocab_size
    compared = {
        "seq_length": (config.student.seq_length, teacher.model.seq_length),
        "make_vocab_size_divisible_by": (
            config.student.make_vocab_size_divisible_by,
            teacher.model.make_vocab_size_divisible_by,
        ),
        "vocab_size": (config.student.padded_ids(ids), teacher.model.padded_ids(ids)),
    }
    for key, (own, its) in compared.items():
        if own != its:
            raise ConfigError(
                f"the objective {objective} compares both models position by position and token "
                "by token",
                where=f"{section}.model.{key}",
                got=its,
                expected=f"{own}, as the student's",
            )
