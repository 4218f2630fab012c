"""Whether the options of an objective mean something."""

from __future__ import annotations

import math
from typing import Literal

from megatron_ext.errors import LossError

Numerics = Literal["proper", "nemo"]
"""``proper``: distributions stay distributions, see ``docs/losses.md``. ``nemo``: value and
gradient of NeMo RL's x_token losses, for comparison with runs that used them."""


def why_nemo(numerics: Numerics) -> str | None:
    """Why an objective with these numerics cannot be cut; None: it can."""
    if numerics == "nemo":
        return "numerics nemo, which choose columns for the whole microbatch"
    return None


def check_temperature(objective: str, temperature: float) -> None:
    """Raises LossError where it is no positive number."""
    if not (math.isfinite(temperature) and temperature > 0):
        raise LossError(
            f"the temperature of {objective} must be positive", got=temperature, expected="above 0"
        )


def check_choice(objective: str, option: str, value: object, choices: tuple[object, ...]) -> None:
    """Raises LossError where ``value`` is none of the choices."""
    if value not in choices:
        raise LossError(
            f"unknown {option} of the objective {objective}",
            got=repr(value),
            expected=f"one of {', '.join(map(str, choices))}",
        )


def check_count(objective: str, option: str, value: int | None) -> None:
    """Raises LossError where ``value`` is below 1; None stands for all."""
    if value is not None and value < 1:
        raise LossError(
            f"{option} of the objective {objective} compares nothing",
            got=value,
            expected="at least 1, or None for all",
        )
