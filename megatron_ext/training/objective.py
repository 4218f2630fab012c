"""The objective that a run names, with its options checked."""

from __future__ import annotations

from functools import partial
from typing import Any, Final

from megatron_ext.errors import ConfigError, LossError
from megatron_ext.losses import (
    LOSS_REGISTRY,
    DskdLoss,
    DskdProjectors,
    Objective,
)
from megatron_ext.training.config import LossConfig
from megatron_ext.training.config_file import build_config
from megatron_ext.training.run_plan import TeacherPlan

_PROJECTORS: Final = "projectors"
PROJECTOR_STARTS: Final = ("random", "heads")
"""Values of the option ``projectors`` of ``dskd``: from the run's seed, or by pseudo-inverses of
the models' heads."""


def make_objective(
    loss: LossConfig, projectors: DskdProjectors | None = None, *, section: str = "loss"
) -> Objective:
    """The objective of ``loss`` with its options.

    Args:
        projectors: Those of ``dskd``; None for a stand-in, which only serves to check and count.
        section: Of the configuration, which has the options; for errors.

    Raises:
        UnknownNameError: There is no such objective.
        ConfigError: An option that it does not have, or a value that it cannot use.
    """
    kind: Any = LOSS_REGISTRY[loss.objective]
    values = dict(loss.options)
    where = partial(_where, section)
    if loss.temperature is not None and loss.objective != "next_token":
        if "temperature" in values:
            raise ConfigError(
                "the temperature is given twice",
                where=where(("temperature",)),
                got=f"{values['temperature']}, and loss.temperature {loss.temperature}",
                fix="remove one of them",
            )
        values["temperature"] = loss.temperature
    if kind is DskdLoss:
        projector_start(loss, section=section)
        values[_PROJECTORS] = projectors or DskdProjectors(student_hidden=1, teacher_hidden=1)
    try:
        return build_config(kind, values, where)  # type: ignore[no-any-return]
    except LossError as error:
        raise ConfigError(str(error), where=where(())) from error


def teacher_objective(teacher: TeacherPlan, projectors: DskdProjectors | None = None) -> Objective:
    """The objective for one teacher.

    Args:
        projectors: As in ``make_objective``.

    Raises:
        ConfigError: An option that it does not have or cannot use.
    """
    return make_objective(teacher.loss, projectors, section=teacher.options_section)


def projector_start(loss: LossConfig, *, section: str = "loss") -> str:
    """Which of ``PROJECTOR_STARTS`` the options choose.

    Raises:
        ConfigError: Another.
    """
    start = loss.options.get(_PROJECTORS, PROJECTOR_STARTS[0])
    if start not in PROJECTOR_STARTS:
        raise ConfigError(
            "no such start of projectors",
            where=_where(section, (_PROJECTORS,)),
            got=repr(start),
            expected=f"one of {', '.join(PROJECTOR_STARTS)}",
        )
    return str(start)


def _where(section: str, keys: tuple[str, ...]) -> str:
    return ".".join((section, "options", *keys))
