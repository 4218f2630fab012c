"""The teacher that a verb is about, of those that a run has."""

from __future__ import annotations

from megatron_ext.errors import ConfigError, UnknownNameError
from megatron_ext.training.config import DistillConfig


def named_teacher(config: DistillConfig, name: str | None, *, what_for: str) -> str:
    """Its name.

    Args:
        name: What the user gave; None: the one there is.
        what_for: What the verb would do with it: "there is no teacher to ...".

    Raises:
        ConfigError: There is none, or one of several is to be named.
        UnknownNameError: None of the run's is called so.
    """
    names = list(config.named_teachers)
    if not names:
        raise ConfigError(f"there is no teacher to {what_for}", fix="add a teacher section")
    if name is None and len(names) > 1:
        raise ConfigError(
            "there are several teachers", expected=f"--teacher and one of {', '.join(names)}"
        )
    if name is not None and name not in names:
        raise UnknownNameError(
            "there is no such teacher", got=name, expected=f"one of {', '.join(names)}"
        )
    return name or names[0]
