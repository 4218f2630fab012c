"""What an evaluation found, as a file and as a table."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_ext.atomic_file import write_text
from megatron_ext.errors import DataError
from megatron_ext.evaluation.tasks.task import TaskResult


def write_results(path: Path, result: TaskResult, about: Mapping[str, Any]) -> None:
    """Write metrics, counts and settings as JSON, whole or not at all.

    Args:
        about: Task, data, checkpoint and how the model was run.

    Raises:
        DataError: It cannot be written.
    """
    values = {
        **about,
        "count": result.count,
        "settings": dict(result.settings),
        "metrics": dict(result.metrics),
    }
    _write(path, json.dumps(values, indent=2, ensure_ascii=False) + "\n")


def write_samples(path: Path, result: TaskResult) -> None:
    """Write each item as a line of JSON, whole or not at all.

    Raises:
        DataError: It cannot be written.
    """
    lines = [json.dumps(dict(sample), ensure_ascii=False) for sample in result.samples]
    _write(path, "".join(f"{line}\n" for line in lines))


def results_table(task: str, result: TaskResult) -> str:
    """A row for each metric."""
    width = max(len(name) for name in (*result.metrics, task))
    lines = [f"{task:<{width}}  {result.count} items"]
    lines += [f"{name:<{width}}  {value:.4f}" for name, value in result.metrics.items()]
    return "\n".join(lines) + "\n"


def _write(path: Path, text: str) -> None:
    try:
        write_text(path, text)
    except OSError as error:
        raise DataError("the results cannot be written", where=path, got=error.strerror) from error
