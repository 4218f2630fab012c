"""What a run is measured by between steps, beside its held-out text."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from megatron_ext.errors import ConfigError


@dataclass(kw_only=True, frozen=True, slots=True)
class EvaluationTaskConfig:
    """A task of ``megatron-ext evaluate`` that a run measures its student by."""

    data: str
    """File or folder with the items, in their published format."""

    task: str | None = None
    """Name of the task; that of its section when not given."""

    num_fewshot: int | None = None
    """Solved examples before each item; the task's own number when not given."""

    few_shot_data: str | None = None
    """Where these are taken from."""

    limit: int | None = None
    """Items at most, the first ones; all when not given."""

    max_new_tokens: int | None = None
    """Of completions; the task's own number when not given."""

    def __post_init__(self) -> None:
        for name, least in (("num_fewshot", 0), ("limit", 1), ("max_new_tokens", 1)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise ConfigError(f"{name} is too small", got=value, expected=f"{least} or more")


@dataclass(kw_only=True, frozen=True, slots=True)
class EvaluationConfig:
    """Tasks between steps; none unless given."""

    tasks: Mapping[str, EvaluationTaskConfig] = field(default_factory=dict)
    """Tasks by name: ``bits_per_byte``, ``mmlu`` or ``gsm8k``, each a section with ``data``; a
    section of any other name says which with ``task``."""

    interval: int = 1000
    """Iterations between measurements by the tasks; one is always made at the end."""

    micro_batch_size: int = 8
    """Rows in one forward pass of a task."""

    def __post_init__(self) -> None:
        for name in ("interval", "micro_batch_size"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be positive", got=getattr(self, name))
