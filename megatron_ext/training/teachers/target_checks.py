"""The form of a remote teacher's targets, and checks of cached and remote targets before a run."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Literal

from megatron_ext.errors import ConfigError
from megatron_ext.losses import Objective
from megatron_ext.teachers.target_form import FormKind, Precision, TargetForm
from megatron_ext.tokenizers import MegatronTokenizerText
from megatron_ext.training.configuration.config import DistillConfig
from megatron_ext.training.configuration.exclusions import check_exclusions
from megatron_ext.training.objective import teacher_objective
from megatron_ext.training.run_plan import TeacherPlan
from megatron_ext.training.teachers.identity import WEIGHTS, cache_identity
from megatron_ext.training.teachers.target_cache import TargetCache

if TYPE_CHECKING:
    from megatron_ext.training.inputs import Inputs


def served_form(teacher: TeacherPlan, tokenizer: MegatronTokenizerText) -> TargetForm:
    """The form of a remote teacher's targets, the same for the run and the server.

    Raises:
        ConfigError: ``top_k`` exceeds the vocabulary.
    """
    serving = teacher.config.serving
    precision: Precision | None = serving.target_precision
    if precision is None and serving.targets == "hidden":
        precision = teacher.training.precision
    return TargetForm.of(
        serving.targets,
        precision=precision,
        top_k=serving.top_k,
        hidden_size=teacher.config.model.hidden_size,
        vocab_size=tokenizer.vocab_size,
    )


def described(name: str, placement: str, form: TargetForm) -> str:
    """A line for the user: ``teacher big (server): hidden 64 in fp32, 256 bytes a token ...``."""
    parts = " + ".join(f"{width:,} {part}" for part, width in form.parts.items())
    return f"teacher {name} ({placement}): {form}, {form.bytes_per_token:,} bytes a token = {parts}"


def check_targets(
    config: DistillConfig,
    teacher: TeacherPlan,
    form: TargetForm,
    *,
    key: Literal["cache", "serving.targets"],
) -> None:
    """Check that the run can use targets of this form, cached or from a remote teacher.

    Args:
        key: Key of the teacher's section that sets the form.

    Raises:
        ConfigError: The objective, or the combination of teachers, needs more.
    """
    objective = teacher_objective(teacher)
    forms = objective.target_forms
    is_cache = key == "cache"
    targets = "cached targets" if is_cache else "targets of a remote teacher"
    if form.kind not in forms:
        at = " at its temperature" if form.kind in _at_temperature_1(objective) else ""
        raise ConfigError(
            f"the objective {teacher.loss.objective} cannot use {targets} of this form{at}",
            where=f"{teacher.section}.{key}",
            got=str(form),
            expected=" or ".join(forms) or "a teacher that runs on the student's ranks",
            fix=("cache the teacher" if is_cache else "have it send targets")
            + " in that form, or take another objective, see docs/teachers.md",
        )
    check_exclusions(config, "targets", forms={teacher.name: form})


def _at_temperature_1(objective: Objective) -> tuple[FormKind, ...]:
    if not hasattr(objective, "temperature"):
        return ()
    plain: Objective = dataclasses.replace(objective, temperature=1.0)  # type: ignore[type-var]
    return plain.target_forms


def check_served(config: DistillConfig, inputs: Inputs) -> None:
    """Check the form of each remote teacher's targets.

    Raises:
        ConfigError: An objective, or the combination of teachers, needs more than is sent.
    """
    for name, teacher in config.named_teachers.items():
        if teacher.is_remote:
            plan = TeacherPlan.of(config, name)
            form = served_form(plan, inputs.teachers[name].tokenizer)
            check_targets(config, plan, form, key="serving.targets")


def check_caches(config: DistillConfig, inputs: Inputs) -> None:
    """Check every cache of a run, except for the weights that it was made with.

    Raises:
        ConfigError: A cache is missing, of another identity, or of a form that an objective cannot
            use.
        CheckpointError: A cache is unfinished, cut off or damaged.
    """
    for name, teacher in config.named_teachers.items():
        if teacher.cache is None:
            continue
        cache = TargetCache(teacher.cache)
        manifest = cache.manifest
        check_targets(config, TeacherPlan.of(config, name), manifest.form, key="cache")
        weights = {WEIGHTS: manifest.identity[WEIGHTS]}
        manifest.check_same(cache_identity(config, inputs, name) | weights, cache.folder)
