"""Checks of numbers in any section of the configuration."""

from __future__ import annotations

from megatron_ext.errors import ConfigError


def check_positive(config: object, *names: str) -> None:
    """Refuse the first of some fields that is given and not positive."""
    for name in names:
        value = getattr(config, name)
        # Not ``value <= 0``, which NaN passes.
        if value is not None and not value > 0:
            raise ConfigError(f"{name} must be positive", got=value)


def check_not_negative(config: object, *names: str) -> None:
    """Refuse the first of some fields that is negative."""
    for name in names:
        value = getattr(config, name)
        if not value >= 0:
            raise ConfigError(f"{name} must not be negative", got=value)


def check_divides(config: object, whole: str, part: str) -> None:
    """Refuse a field ``whole`` that is no multiple of a field ``part``."""
    if getattr(config, whole) % getattr(config, part):
        raise ConfigError(
            f"{whole} is not a multiple of {part}",
            got=f"{whole} {getattr(config, whole)} and {part} {getattr(config, part)}",
        )
