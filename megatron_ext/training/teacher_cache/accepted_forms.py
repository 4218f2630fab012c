"""Which cached targets an objective can learn from, told before a run starts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from megatron_ext.errors import ConfigError
from megatron_ext.losses import (
    AlmLoss,
    DskdLoss,
    Objective,
    PartitionKLLoss,
    StrictTopKLoss,
    VocabKLLoss,
)
from megatron_ext.teachers.targets.form import FormKind
from megatron_ext.training.config import DistillConfig
from megatron_ext.training.objective import projector_start
from megatron_ext.training.teacher_cache.files.manifest import Manifest

_FORMS: Final[Mapping[type, tuple[FormKind, ...]]] = {
    AlmLoss: ("label", "hidden"),
    PartitionKLLoss: ("topk", "hidden"),
    VocabKLLoss: ("topk", "hidden"),
    StrictTopKLoss: ("topk", "hidden"),
}
"""Smallest first. Every other objective reads all of the teacher's logits: ``hidden``."""


def accepted_forms(objective: Objective) -> tuple[FormKind, ...]:
    """The kinds that an objective takes at its options, the smallest first."""
    forms = _FORMS.get(type(objective), ("hidden",))
    if isinstance(objective, VocabKLLoss | StrictTopKLoss) and objective.temperature != 1.0:
        keeps_tail = isinstance(objective, VocabKLLoss) or objective.tail == "bucket"
        # A log-normaliser tells the tail of its own temperature.
        return tuple(form for form in forms if form != "topk") if keeps_tail else forms
    return forms


def check_cached_targets(
    config: DistillConfig,
    name: str,
    objective: Objective,
    manifest: Manifest,
) -> None:
    """Check that what a teacher's cache keeps is what the run reads.

    Raises:
        ConfigError: The objective, or how teachers are combined, needs more.
    """
    loss, kind = config.loss, manifest.form.kind
    its = config.named_teachers[name]
    where, own = f"{config.section_of(name)}.cache", loss.of_teacher(its)
    forms = accepted_forms(objective)
    if kind not in forms:
        at = "" if kind not in _FORMS.get(type(objective), ()) else " at its temperature"
        raise ConfigError(
            f"the objective {own.objective} cannot use cached targets of this form{at}",
            where=where,
            got=str(manifest.form),
            expected=" or ".join(forms),
            fix="cache the teacher in that form, or take another objective, see docs/teachers.md",
        )
    if isinstance(objective, DskdLoss) and projector_start(own) == "heads":
        raise ConfigError(
            "projectors that start from the heads need the teacher's model",
            where=where,
            got="a cache",
            fix="set the option projectors to random, or leave the cache out",
        )
    combined = {
        "loss.teacher_mode": (loss.teacher_mode, "sum"),
        "loss.teacher_weights": (loss.teacher_weights, "static"),
    }
    for key, (value, plain) in combined.items():
        if value != plain and kind != "hidden":
            raise ConfigError(
                f"{key} {value} reads the teacher's logits, which this cache does not have",
                where=where,
                got=str(manifest.form),
                expected="hidden",
            )
    if config.training.vocabulary_layout != "original":
        raise ConfigError(
            "cached targets are in the order of the ids",
            where=where,
            got=f"training.vocabulary_layout {config.training.vocabulary_layout}",
            expected="original",
        )
