"""Tables of runs, with a column for each run."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from statistics import median
from typing import Any

from megatron_ext.alignment.alignment import CHUNK_KINDS
from megatron_ext.cli.pages.frame import TableRow
from megatron_ext.cli.pages.run_record import RunRecord, as_number
from megatron_ext.cli.pages.token_view import (
    NOTHING,
    bits,
    duration,
    memory,
    number,
    setting,
    share,
    short_paths,
)
from megatron_ext.training.run_folder import config_leaves

_HASH_DIGITS = 16
FAULTS = (
    "skipped_iterations",
    "refused_documents",
    "retokenized_documents",
    "worker_restarts",
    "failed_saves",
)


def totals(runs: Sequence[RunRecord]) -> list[TableRow]:
    """The main numbers of the runs; rows that no run has are left out."""
    rows = [TableRow(name, tuple(of(run) for run in runs)) for name, of in _totals(runs)]
    return [row for row in rows if set(row.cells) != {NOTHING}]


def configuration(runs: Sequence[RunRecord]) -> list[TableRow]:
    """All keys of the configurations."""
    return _leaves([run.config for run in runs])


def data(runs: Sequence[RunRecord]) -> list[TableRow]:
    """Recorded descriptions of the data; lists by length, hashes abbreviated."""
    rows = _leaves([run.data for run in runs], lists=_length)
    return [
        TableRow(row.name, tuple(cell[:_HASH_DIGITS] for cell in row.cells))
        if row.name.endswith("sha256")
        else row
        for row in rows
    ]


def evaluations(runs: Sequence[RunRecord]) -> tuple[list[TableRow], list[TableRow]]:
    """Results of evaluations, and the settings that they were measured with; lists by length.

    Of a file with ``metrics`` these and the number of items are results, of another one all.
    """
    results: list[dict[str, Any]] = []
    settings: list[dict[str, Any]] = []
    for run in runs:
        results.append({})
        settings.append({})
        for name, found in run.evaluations.items():
            metrics = found.get("metrics") if isinstance(found, Mapping) else None
            if not isinstance(metrics, Mapping):
                results[-1][name] = found
                continue
            results[-1][name] = {**metrics, "items": found.get("count")}
            settings[-1][name] = {
                key: value for key, value in found.items() if key not in ("metrics", "count")
            }
    return _leaves(results, lists=_length), _leaves(settings, lists=_length)


def _length(items: list[Any]) -> str:
    return f"{len(items):,}"


def chunks(runs: Sequence[RunRecord]) -> list[TableRow]:
    """Chunks of the trained batches by kind, and unaligned tokens; empty without alignments."""
    if not any(run.values(kind) for run in runs for kind in CHUNK_KINDS):
        return []
    return [
        TableRow("chunks", tuple(number(_chunks(run)) for run in runs)),
        *(
            TableRow(kind, tuple(share(sum(run.values(kind)), _chunks(run)) for run in runs))
            for kind in CHUNK_KINDS
        ),
        *(
            TableRow(name, tuple(number(sum(run.values(name))) for run in runs))
            for name in ("student_unaligned", "teacher_unaligned")
        ),
    ]


def held_out(run: RunRecord) -> tuple[list[str], list[TableRow]]:
    """Headings with the names of models, and rows of their held-out bits per byte."""
    names = [name for name in run.names() if "_bits_per_byte" in name and run.values(name)]
    by_name = {name: dict(run.points(name)) for name in names}
    rows = [
        TableRow(number(iteration), tuple(bits(by_name[name].get(iteration)) for name in names))
        for iteration in sorted({i for values in by_name.values() for i in values})
    ]
    return [name.replace("_bits_per_byte", "").replace("/", " ") for name in names], rows


def _chunks(run: RunRecord) -> float:
    return sum(sum(run.values(kind)) for kind in CHUNK_KINDS)


def _totals(runs: Sequence[RunRecord]) -> Iterator[tuple[str, Callable[[RunRecord], str]]]:
    yield "state", state
    yield "objective", lambda run: setting(run.section("loss").get("objective"))
    yield "teachers", lambda run: ", ".join(run.teachers if run.distils else ()) or NOTHING
    yield "loss, mean of the last tenth", _measured("loss", _last_tenth)
    for name in dict.fromkeys(name for run in runs for name in run.names()):
        if "_bits_per_byte" in name:
            words = f"held-out bits per byte, {name.replace('_bits_per_byte', '')}"
            yield words.replace("/", " "), _measured(name, _last, bits)
    yield "trained tokens", _measured("tokens", sum)
    yield "time of all steps", _measured("seconds", sum, duration)
    yield "tokens per second, median", _measured("tokens_per_second", median)
    yield "memory, peak of a process", _measured("memory_bytes", max, memory)
    for name in FAULTS:
        if any(any(run.values(name)) for run in runs):
            yield name.replace("_", " "), _measured(name, _last)


def _measured(
    name: str,
    measure: Callable[[list[float]], float],
    shown: Callable[[float | None], str] = number,
) -> Callable[[RunRecord], str]:
    """Cell function of a statistic of a run's measurements of a name."""

    def cell(run: RunRecord) -> str:
        values = run.values(name)
        return shown(measure(values) if values else None)

    return cell


def _last(values: Sequence[float]) -> float:
    return values[-1]


def _last_tenth(values: Sequence[float]) -> float:
    last = values[-max(len(values) // 10, 1) :]
    return sum(value / len(last) for value in last)


def state(run: RunRecord) -> str:
    """Progress of a run, in words."""
    wanted = run.section("training").get("train_iters")
    if not isinstance(wanted, int):
        return f"{run.iterations:,} iterations" if run.rows else "no iteration was logged"
    if not run.rows:
        return f"no iteration of {wanted:,} was logged yet"
    if run.is_finished:
        return f"finished: {run.iterations:,} iterations"
    return f"at {run.iterations:,} of {wanted:,} iterations"


def _leaves(
    configs: Sequence[Mapping[str, Any]], lists: Callable[[list[Any]], str] = setting
) -> list[TableRow]:
    leaves = [dict(config_leaves(config)) for config in configs]
    names = dict.fromkeys(name for leaf in leaves for name in leaf)

    def words(value: Any) -> str:
        if isinstance(value, list):
            return lists(value)
        finite = as_number(value)
        return setting(value) if finite is None else number(finite)

    rows = {name: _without_folders([leaf.get(name) for leaf in leaves]) for name in names}
    return [TableRow(name, tuple(map(words, values))) for name, values in rows.items()]


def _without_folders(values: list[Any]) -> list[Any]:
    """Values with absolute paths shortened, so that different ones stay different."""
    items = [item for value in values for item in (value if isinstance(value, list) else [value])]
    paths = [item for item in items if isinstance(item, str) and os.path.isabs(item)]
    short = short_paths(paths, least=2)

    def cut(value: Any) -> Any:
        if isinstance(value, list):
            return [cut(item) for item in value]
        return short.get(value, value) if isinstance(value, str) else value

    return [cut(value) for value in values]
