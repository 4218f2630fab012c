"""What of a run's loss can be known to be wrong before a model is built."""

from __future__ import annotations

from collections.abc import Mapping

from megatron_ext.errors import ConfigError
from megatron_ext.losses import Objective
from megatron_ext.tokenizers import MegatronTokenizerText
from megatron_ext.training.config import DistillConfig, ModelConfig
from megatron_ext.training.exclusions import check_exclusions
from megatron_ext.training.objective import make_objective, teacher_objective
from megatron_ext.training.run_plan import TeacherPlan
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
        teacher_objective(TeacherPlan.of(config, name))


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
    make_weighting(config.loss, train_iters=config.training.train_iters)
    objectives: dict[str, Objective] = {}
    plans = {name: TeacherPlan.of(config, name) for name in teachers}
    if config.distils:
        objectives = {name: teacher_objective(plan) for name, plan in plans.items()}
        make_aggregator(config.loss, plans, objectives)
    check_exclusions(config, "objectives", objectives=objectives)
    for name, objective in objectives.items():
        if objective.needs.same_tokenizer or config.loss.teacher_mode == "averaged_logits":
            _check_same_tokenizer(plans[name], tokenizer, teachers[name], student=config.student)


def _check_same_tokenizer(
    teacher: TeacherPlan,
    tokenizer: MegatronTokenizerText,
    other: MegatronTokenizerText,
    *,
    student: ModelConfig,
) -> None:
    """Check that both models see the same ids in rows of the same length.

    Args:
        tokenizer: The student's.
        other: The teacher's.
    """
    objective = teacher.loss.objective
    why = f"the objective {objective} needs a teacher"
    if teacher.loss.teacher_mode == "averaged_logits":
        why = "averaged logits need teachers"
    if tokenizer.fingerprint() != other.fingerprint():
        raise ConfigError(
            f"{why} with the student's tokenizer",
            where=f"{teacher.section}.tokenizer",
            got="another vocabulary",
            fix="take another loss.objective, see docs/losses.md",
        )
    ids, model = tokenizer.vocab_size, teacher.config.model
    compared = {
        "seq_length": (student.seq_length, model.seq_length),
        "make_vocab_size_divisible_by": (
            student.make_vocab_size_divisible_by,
            model.make_vocab_size_divisible_by,
        ),
        "vocab_size": (student.padded_ids(ids), model.padded_ids(ids)),
    }
    for key, (own, its) in compared.items():
        if own != its:
            raise ConfigError(
                f"the objective {objective} compares both models position by position and token "
                "by token",
                where=f"{teacher.section}.model.{key}",
                got=its,
                expected=f"{own}, as the student's",
            )
