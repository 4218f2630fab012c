"""Two features of a run that do not go together, and how each is looked for in a run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Literal

from megatron_ext.errors import ConfigError

if TYPE_CHECKING:
    from megatron_ext.losses import Objective
    from megatron_ext.teachers.target_form import TargetForm
    from megatron_ext.training.config import DistillConfig, TeacherConfig

Stage = Literal["configuration", "objectives", "targets", "megatron_lm"]
"""What has been read when a row is checked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """A run, and one teacher of it, as features are looked for in them."""

    config: DistillConfig

    teacher_name: str | None = None
    """None of a run without teachers."""

    objectives: Mapping[str, Objective] = field(default_factory=dict)
    """By teacher; none before they are made."""

    forms: Mapping[str, TargetForm] = field(default_factory=dict)
    """By teacher, of those whose model is not on the student's ranks; likewise."""

    @property
    def teacher(self) -> TeacherConfig | None:
        """Section of the teacher."""
        return None if self.teacher_name is None else self.config.named_teachers[self.teacher_name]

    def place(self, key: str) -> str:
        """A key with the section that the teacher has in the configuration."""
        if self.teacher is None or self.teacher_name is None:
            return key
        section = self.config.section_of(self.teacher_name)
        targets = "cache" if self.teacher.cache is not None else "serving.targets"
        for placeholder, found in (
            ("{options}", f"{section if self.teacher.options else 'loss'}.options"),
            ("{targets}", f"{section}.{targets}"),
            ("{teacher}", section),
        ):
            key = key.replace(placeholder, found)
        return key


@dataclass(frozen=True, slots=True, kw_only=True)
class Feature:
    """Something that a run may ask for."""

    name: str
    """As the documentation calls it."""

    value: Callable[[Setting], object]
    """What the run asks for; None where it does not."""

    key: str | None = None
    """Key of the configuration that asks; ``{teacher}`` is the section of a teacher."""

    off: object = None
    """Value of the key with which the run does not ask."""

    def found(self, setting: Setting) -> str | None:
        """What the run asks for, for an error; None where it does not."""
        value = self.value(setting)
        if value in (None, ()):
            return None
        return _shown(value) if self.key is None else f"{setting.place(self.key)} {_shown(value)}"


@dataclass(frozen=True, slots=True)
class Exclusion:
    """Two features that no run has together."""

    feature: Feature
    """The one that the error is about."""

    other: Feature
    why: str
    remedy: str
    stage: Stage = "configuration"

    def check(self, setting: Setting) -> None:
        """Refuse a run that has both.

        Raises:
            ConfigError: It has.
        """
        found = self.feature.found(setting)
        other = None if found is None else self.other.found(setting)
        if found is None or other is None:
            return
        keys = [(its.key, its.off) for its in (self.feature, self.other) if its.key is not None]
        raise ConfigError(
            self.why,
            where=setting.place(keys[0][0]),
            got=f"{found} with {other}",
            expected=" or ".join(f"{setting.place(key)} {_shown(off)}" for key, off in keys),
            fix=self.remedy,
        )


def key_feature(key: str, *, off: object = False, only: tuple[str, ...] = ()) -> Feature:
    """A key with another value than ``off``, or with one of ``only``."""
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
        found = None if section is None else attrgetter(path)(section)
        if only:
            return found if found in only else None
        is_off = not found if off in (None, False) else found == off
        return None if is_off else found

    return Feature(name=name, key=key, off=off, value=value)


def _shown(value: object) -> str:
    if isinstance(value, (tuple, Mapping)):
        return ", ".join(value) or "none"
    if isinstance(value, bool):
        return str(value).lower()
    return "none" if value is None else str(value)
