"""The HTML page of one run or several, with alignments of sample texts."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, Final

from markupsafe import Markup

from megatron_ext.alignment.audit import AuditDocument, AuditReport, PairAudit
from megatron_ext.cli.pages import run_tables
from megatron_ext.cli.pages.audit_page import coverage_table
from megatron_ext.cli.pages.audit_ribbon import Ribbon, ribbons
from megatron_ext.cli.pages.audit_source import AuditSource
from megatron_ext.cli.pages.chart import SMOOTHING
from megatron_ext.cli.pages.frame import BarPart, TableRow, bar, html_page, swatch
from megatron_ext.cli.pages.headline import headlines
from megatron_ext.cli.pages.run_charts import COLOURS, clocks, other_panels, panels
from megatron_ext.cli.pages.run_record import RunRecord
from megatron_ext.cli.pages.sample_view import completions, model_samples_of
from megatron_ext.cli.pages.token_view import duration, share, with_short_paths
from megatron_ext.constants import __version__
from megatron_ext.data.reading_order import read_blend
from megatron_ext.errors import ConfigError, DataError, MegatronExtError
from megatron_ext.tokenizers import MegatronTokenizerText, TokenizerConfig, build_tokenizer
from megatron_ext.training.run_folder import TOKENIZER_FOLDER
from megatron_ext.typed_mapping import build_config

_MOST_DOCUMENTS: Final = 1000
_AUDITED_BYTES: Final = 200_000
_MOST_SAMPLED: Final = 24
"""Texts that models are sampled on."""


@dataclass(frozen=True, slots=True)
class PairSample:
    """Alignment of some texts between a run's student and one of its teachers."""

    title: str
    ribbons: tuple[Ribbon, ...]
    report: AuditReport | None
    """Audit of these and further texts."""
    problem: str
    """Reason why there is nothing to show; empty otherwise."""


def pair_samples(
    runs: Sequence[RunRecord], texts: Sequence[str] = (), *, most_bytes: int
) -> list[PairSample]:
    """Samples of all distinct pairs of tokenizers of the runs.

    Args:
        texts: Texts to show in place of the runs' held-out or training text.
        most_bytes: Bytes of text to draw for each pair.
    """
    samples: dict[tuple[str, str, str], PairSample] = {}
    for run in runs:
        for name, teacher in run.teachers.items():
            title = f"student and {name}" if name != "teacher" else "student and teacher"
            if len(runs) > 1:
                title = f"{run.name}: {title}"
            key = (str(run.section("tokenizer")), str(teacher.get("tokenizer")), _paths(run, texts))
            if key not in samples:
                samples[key] = _sample(run, teacher, texts, title=title, most_bytes=most_bytes)
    return list(samples.values())


def _sample(
    run: RunRecord,
    teacher: Mapping[str, Any],
    texts: Sequence[str],
    *,
    title: str,
    most_bytes: int,
) -> PairSample:
    try:
        documents = list(_documents(run, texts))
        student = _tokenizer(run.folder / TOKENIZER_FOLDER, run.section("tokenizer"), "tokenizer")
        saved = Path(str(teacher.get("checkpoint"))) / TOKENIZER_FOLDER
        section = teacher.get("tokenizer")
        other = _tokenizer(
            saved, section if isinstance(section, Mapping) else {}, "teacher.tokenizer"
        )
        audit = PairAudit(student, other)
        audit.add(documents)
        drawn = tuple(ribbons(documents, student, other, most_bytes=most_bytes))
    except MegatronExtError as error:
        return PairSample(title, (), None, with_short_paths(str(error)))
    return PairSample(title, drawn, audit.report(), "")


def sample_texts(run: RunRecord, texts: Sequence[str] = ()) -> list[str]:
    """Texts for samples of the models: those given, or the first of the run.

    Raises:
        DataError: The run's text cannot be read from here, or it reads conversations.
    """
    return [document.text for document in islice(_documents(run, texts), _MOST_SAMPLED)]


def _documents(run: RunRecord, texts: Sequence[str]) -> Iterator[AuditDocument]:
    if texts:
        for number, text in enumerate(texts, 1):
            yield AuditDocument(text, "--text", line=number)
        return
    data = run.section("data")
    if data.get("conversations"):
        raise DataError(
            "the run reads conversations, which are not drawn here",
            fix="see megatron-ext inspect, or pass --text",
        )
    key = data.get("text_key")
    source = AuditSource(
        files=_files(run), keys=(key,) if isinstance(key, str) else (), shows_progress=False
    )
    left = _AUDITED_BYTES
    for document in islice(source.documents(), _MOST_DOCUMENTS):
        yield document
        left -= len(document.text)
        if left <= 0:
            return


def _files(run: RunRecord) -> tuple[str, ...]:
    data = run.section("data")
    for split in ("validation", "train"):
        entries = data.get(split)
        if isinstance(entries, list):
            where = f"data.{split}"
            sources = read_blend([str(entry) for entry in entries], where=where)
            there = tuple(p for source in sources for p in source.paths if os.path.exists(p))
            if there:
                return there
    raise DataError(
        "the text of the run cannot be read from here",
        expected="the files of data.validation or data.train",
        fix="run the command where the run was started, or pass --text",
    )


def _paths(run: RunRecord, texts: Sequence[str]) -> str:
    data = run.section("data")
    return "" if texts else str((data.get("validation"), data.get("train")))


def _tokenizer(saved: Path, section: Mapping[str, Any], where: str) -> MegatronTokenizerText:
    """The tokenizer saved in a folder, or else the one that the configuration names.

    Code of a tokenizer is not run, even if the configuration trusts it.
    """
    if saved.is_dir():
        return build_tokenizer(TokenizerConfig(model=str(saved)))
    model = section.get("model")
    if not isinstance(model, str) or not os.path.exists(model):
        raise ConfigError(
            "the tokenizer cannot be read from here",
            where=where,
            got=model if isinstance(model, str) else None,
            expected=f"it there, or in {saved}",
            fix="run the command where the run was started",
        )
    values = {**section, "trust_remote_code": False}
    return build_tokenizer(
        build_config(TokenizerConfig, values, lambda keys: ".".join((where, *keys)))
    )


_PREFIX: Final = "seconds/"
_ROLLOUTS: Final = "rollouts"
_WAITING: Final = "seconds/waiting"
_WITHIN_OTHERS: Final = frozenset({_WAITING, "seconds/teacher_waiting"})
"""Times that are parts of the phases ``data`` and ``teacher``."""
_BETWEEN_STEPS: Final = frozenset({"evaluation", "checkpoint"})
"""Phases that are not included in the ``seconds`` of a step."""


def report_page(
    runs: Sequence[RunRecord], samples: Sequence[PairSample], *, reload_seconds: int | None = None
) -> str:
    """Render the page of one run, or of several side by side.

    Args:
        reload_seconds: After how long the page reloads itself; None for never.
    """
    results, settings = run_tables.evaluations(runs)
    others = other_panels(runs)
    names = [run.name for run in runs]
    values = {
        "runs": runs,
        "names": names,
        "several": len(runs) > 1,
        "state": run_tables.state,
        "totals": run_tables.totals(runs),
        "panels": panels(runs),
        "others": [p for p in others if p.title not in (_PREFIX.rstrip("/"), _ROLLOUTS)],
        "rollout_panels": [replace(p, title="Each step") for p in others if p.title == _ROLLOUTS],
        "completions": [(run.name, completions(run)) for run in runs if run.completions],
        "model_samples": [
            (run.name, run.samples.get("iteration"), run.samples.get("temperature"), sampled)
            for run in runs
            if (sampled := model_samples_of(run))
        ],
        "phase_panels": [panel for panel in others if panel.title == _PREFIX.rstrip("/")],
        "shares": _time_shares(runs),
        "held_out": [(run.name, *run_tables.held_out(run)) for run in runs],
        "evaluations": results,
        "evaluation_settings": settings,
        "headlines": headlines(runs),
        "reload_seconds": reload_seconds,
        "chunks": run_tables.chunks(runs),
        "data": run_tables.data(runs),
        "configuration": run_tables.configuration(runs),
        "samples": samples,
        "coverage": coverage_table,
        "colours": COLOURS,
        "smoothing": SMOOTHING,
        "clocks": clocks(runs),
        "version": __version__,
    }
    return html_page("report", values, title=" · ".join(names), styles=("alignment",))


@dataclass(frozen=True, slots=True)
class _TimeShares:
    """Shares of a run's time by phase."""

    run: str
    rows: tuple[TableRow, ...]
    """Time and share of each phase; empty if none was measured."""
    bar: Markup
    waited: str
    """Time within ``data`` spent waiting for samples; empty if it was not measured."""


def _time_shares(runs: Sequence[RunRecord]) -> list[_TimeShares]:
    """Time shares of each run; a phase has the same colour in all."""
    phases = [_phases(run) for run in runs]
    names = dict.fromkeys(name for of_run in phases for name in of_run)
    styles = {name: f"c{number % COLOURS}" for number, name in enumerate(names)}
    return [_shares_of(run, of_run, styles) for run, of_run in zip(runs, phases, strict=True)]


def _phases(run: RunRecord) -> dict[str, float]:
    """Seconds of each phase, the remainder last; empty if none was measured."""
    phases = {
        name.removeprefix(_PREFIX): sum(run.values(name))
        for name in run.names()
        if name.startswith(_PREFIX) and name not in _WITHIN_OTHERS and run.values(name)
    }
    if phases:
        inside = sum(seconds for name, seconds in phases.items() if name not in _BETWEEN_STEPS)
        phases["other"] = max(sum(run.values("seconds")) - inside, 0.0)
    return phases


def _shares_of(
    run: RunRecord, phases: Mapping[str, float], styles: Mapping[str, str]
) -> _TimeShares:
    whole = sum(phases.values())
    rows, parts = [], []
    for name, seconds in phases.items():
        cells = duration(seconds), share(seconds, whole)
        rows.append(TableRow(swatch(styles[name], name), cells))
        parts.append(BarPart(styles[name], seconds, f"{name} {cells[1]}"))
    waits = run.values(_WAITING)
    waited = f"{duration(sum(waits))}, {share(sum(waits), whole)}" if waits else ""
    return _TimeShares(run.name, tuple(rows), bar(parts, "shares of time"), waited)
