"""``RunRecord``: the folder of a run, read without torch and in whatever state the run is."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from megatron_ext.cli.pages.token_view import with_short_paths
from megatron_ext.errors import ConfigError
from megatron_ext.files import parse_json, read_json, whole_lines
from megatron_ext.registry import with_near_path
from megatron_ext.training.configuration.yaml_file import read_config_file
from megatron_ext.training.run_folder import (
    CONFIG_FILE,
    DATA_FILE,
    METRICS_FILE,
    QUARANTINE_FILE,
    ROLLOUTS_FILE,
)

EVALUATIONS: Final = "evaluation"
SAMPLES_FILE: Final = "samples.json"
"""File in the folder of a run with what both models write and predict."""
_MOST_REFUSED: Final = 10
_MOST_COMPLETIONS: Final = 16
_MOST_ITERATIONS: Final = 1 << 53
"""Largest integer below which all are exact as floats."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecord:
    """The recorded state of a run that is finished, running, interrupted or not yet begun."""

    name: str
    """Name on the page."""
    folder: Path
    config: Mapping[str, Any]
    """Configuration; empty if it cannot be read."""
    data: Mapping[str, Any]
    """Recorded description of the data; empty if it cannot be read."""
    rows: tuple[Mapping[str, Any], ...]
    """Metrics in the order of iterations, each iteration once."""
    evaluations: Mapping[str, Any]
    """Results in the folder ``evaluation``, by file name."""
    refused: tuple[str, ...]
    """Descriptions of the first documents left out."""
    refused_count: int
    """Number of all documents left out."""
    completions: tuple[Mapping[str, Any], ...]
    """Some logged completions, from the first step to the last; none in a run without rollouts."""
    samples: Mapping[str, Any]
    """What ``report --with-models`` has recorded; empty where it has not."""
    problems: tuple[str, ...]
    """Problems of the folder, a sentence each."""

    def section(self, *keys: str) -> Mapping[str, Any]:
        """A section of the configuration; empty if it is missing."""
        found: Any = self.config
        for key in keys:
            found = found.get(key) if isinstance(found, Mapping) else None
        return found if isinstance(found, Mapping) else {}

    @property
    def teachers(self) -> dict[str, Mapping[str, Any]]:
        """Configuration of each teacher by name; ``teacher`` for a single one."""
        several = {str(n): self.section("teachers", n) for n in self.section("teachers")}
        one = self.section("teacher")
        return several or ({"teacher": one} if one else {})

    @property
    def distils(self) -> bool:
        """Whether the student learns from a teacher."""
        loss = self.section("loss")
        return bool(self.teachers) and (
            loss.get("objective") != "next_token" and loss.get("kd_weight") != 0
        )

    @property
    def is_finished(self) -> bool:
        """Whether all of the configured iterations are logged."""
        wanted = self.section("training").get("train_iters")
        return isinstance(wanted, int) and self.iterations >= wanted

    @property
    def iterations(self) -> int:
        """The last logged iteration."""
        return int(self.rows[-1]["iteration"]) if self.rows else 0

    def names(self) -> list[str]:
        """Names of all measurements, in the order of the first occurrence of a value."""
        values = (item for row in self.rows for item in row.items())
        return list(
            dict.fromkeys(n for n, value in values if n != "iteration" and value is not None)
        )

    def points(self, name: str) -> list[tuple[int, float]]:
        """Iteration and value of all finite values."""
        found = ((row["iteration"], as_number(row.get(name))) for row in self.rows)
        return [(iteration, value) for iteration, value in found if value is not None]

    def values(self, name: str) -> list[float]:
        """The values of ``points``."""
        return [value for _, value in self.points(name)]


def as_number(value: Any) -> float | None:
    """A finite number, or None."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def read_run(folder: Path, *, name: str) -> RunRecord:
    """Read the folder of a run.

    Raises:
        ConfigError: There is no folder, or no run in it.
    """
    if not folder.is_dir():
        raise ConfigError(
            "there is no such run",
            where=folder,
            expected="the run_dir of a configuration",
            fix=with_near_path(None, folder),
        )
    if not any((folder / file).exists() for file in (CONFIG_FILE, METRICS_FILE)):
        raise ConfigError(
            "the folder holds no run",
            where=folder,
            expected=f"{CONFIG_FILE} or {METRICS_FILE}",
            fix="name the run_dir of a configuration",
        )
    problems: list[str] = []
    config = _read_config(folder / CONFIG_FILE, problems)
    data = _read_data(folder / DATA_FILE, problems)
    samples = folder / SAMPLES_FILE
    results = sorted((folder / EVALUATIONS).glob("*.json"))
    rows = _read_rows(folder / METRICS_FILE, problems)
    refused = _lines(folder / QUARANTINE_FILE, problems)
    return RunRecord(
        name=name,
        folder=folder,
        config=config,
        data=data,
        rows=tuple(rows[iteration] for iteration in sorted(rows)),
        evaluations={path.stem: _read_object(path, problems) for path in results},
        refused=tuple(with_short_paths(_row_in_words(line)) for line in refused[:_MOST_REFUSED]),
        refused_count=len(refused),
        completions=tuple(_read_completions(folder / ROLLOUTS_FILE, problems)),
        samples=_read_object(samples, problems) if samples.exists() else {},
        problems=tuple(map(with_short_paths, problems)),
    )


def _read_config(path: Path, problems: list[str]) -> Mapping[str, Any]:
    # Of a pipe, which a user may name elsewhere, a read would not end.
    if not path.is_file():
        problems.append(f"{path.name} is missing: the configuration is not known")
        return {}
    try:
        return read_config_file(path)[0]
    except ConfigError as error:
        problems.append(f"{path.name} cannot be read: {error}")
        return {}


def _read_data(path: Path, problems: list[str]) -> Mapping[str, Any]:
    if not path.exists():
        problems.append(f"{path.name} is missing: what the run said of its text is not known")
        return {}
    return _read_object(path, problems)


def _read_object(path: Path, problems: list[str]) -> Mapping[str, Any]:
    try:
        values = read_json(path)
    except (OSError, ValueError) as error:
        problems.append(f"{path.name} cannot be read: {error}")
        return {}
    if not isinstance(values, dict):
        problems.append(f"{path.name} holds no object of JSON")
        return {}
    return values


def _read_rows(path: Path, problems: list[str]) -> dict[int, Mapping[str, Any]]:
    """Rows by iteration; of a repeated iteration the later one."""
    lines = _lines(path, problems)
    rows: dict[int, Mapping[str, Any]] = {}
    broken: list[int] = []
    for number, line in enumerate(lines, 1):
        row = _row(line)
        if row is None:
            broken.append(number)
        else:
            rows[row["iteration"]] = row
    if broken:
        problems.append(
            f"{path.name}: {len(broken):,} of {len(lines):,} lines are not rows of metrics and "
            f"are left out, the first in line {broken[0]:,}"
        )
    problems.extend(_not_finite(rows))
    return rows


def _read_completions(path: Path, problems: list[str]) -> Iterator[Mapping[str, Any]]:
    """Completions of about equally many steps apart, the first and the last among them."""
    lines = _lines(path, problems)
    last, count = len(lines) - 1, min(len(lines), _MOST_COMPLETIONS)
    chosen = [lines[last * place // max(count - 1, 1)] for place in range(count)]
    rows = [_row(line) for line in chosen]
    if None in rows:
        problems.append(f"{path.name}: a line is not a completion and is left out")
    return (row for row in rows if row is not None)


def _lines(path: Path, problems: list[str]) -> list[bytes]:
    try:
        return whole_lines(path)
    except OSError as error:
        problems.append(f"{path.name} cannot be read: {error.strerror}")
        return []


def _row_in_words(line: bytes) -> str:
    row = _object(line)
    if row is None:
        return line.decode(errors="replace")
    return ", ".join(f"{key} {value}" for key, value in row.items())


def _row(line: bytes) -> Mapping[str, Any] | None:
    row = _object(line) or {}
    iteration = row.get("iteration")
    if not isinstance(iteration, int) or isinstance(iteration, bool):
        return None
    return row if 0 <= iteration < _MOST_ITERATIONS else None


def _object(line: bytes) -> Mapping[str, Any] | None:
    try:
        values = parse_json(line)
    except ValueError:
        return None
    return values if isinstance(values, dict) else None


def _not_finite(rows: Mapping[int, Mapping[str, Any]]) -> Iterator[str]:
    """Problems of non-finite losses and gradients, which leave gaps in the curves."""
    for name in ("loss", "grad_norm"):
        gaps = [i for i, row in rows.items() if name in row and as_number(row[name]) is None]
        if gaps:
            yield f"{name} is not finite in {len(gaps):,} iterations, first in {min(gaps):,}"
