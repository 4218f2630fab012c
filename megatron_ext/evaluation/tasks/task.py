"""What a task is: it reads its files, asks a model, and says what it found."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from megatron_ext.errors import DataError
from megatron_ext.evaluation.language_model import LanguageModel


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskOptions:
    """What the user says of a task."""

    data: Path | None
    """File or folder with the items; None only for tasks that have their own."""

    num_fewshot: int | None = None
    """Solved examples before each item; the task's own number when not given."""

    few_shot_data: Path | None = None
    """Where these are taken from, the first ones."""

    limit: int | None = None
    """Items at most, the first ones; all when not given."""

    max_new_tokens: int | None = None
    """Of completions; the task's own number when not given."""

    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0

    text_field: str = "text"
    """Field with the text of a record, for bits per byte."""

    run_generated_code: bool = False
    """Whether code that the model wrote may run."""

    without_namespaces: bool = False
    """Run it where the kernel gives no namespaces, too."""

    @property
    def path(self) -> Path:
        """``data`` of a task that needs it, which is checked where it is made."""
        assert self.data is not None
        return self.data


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskResult:
    """What was measured."""

    metrics: Mapping[str, float]
    count: int
    """Items."""

    settings: Mapping[str, Any] = field(default_factory=dict)
    """What the numbers depend on besides model and data."""

    samples: Sequence[Mapping[str, Any]] = ()
    """Each item: what was asked, what came, whether it was right."""


class Task(Protocol):
    """Its files are read when it is made, before a model is."""

    def run(self, model: LanguageModel) -> TaskResult:
        """Ask the model; every rank does the same."""


def mean(values: Sequence[float]) -> float:
    """Of at least one."""
    return sum(values) / len(values)


def first_of(found: Sequence[Any], limit: int | None, *, where: object) -> list[Any]:
    """The first items.

    Raises:
        DataError: There are none.
    """
    items = list(found[:limit])
    if not items:
        raise DataError("there is nothing to evaluate on", where=where)
    return items
