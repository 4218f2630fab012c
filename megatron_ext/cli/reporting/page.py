"""Runs as one HTML page that needs nothing else: no network, no other file.

What runs say is hostile, texts of their data above all: everything is escaped, and the page's
policy lets nothing load or run but its own styles and script, which it knows by their hashes.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from megatron_ext.alignment.audit import share_in_words
from megatron_ext.alignment.audit.text_class import TEXT_CLASSES
from megatron_ext.cli.alignment.ribbon_markup import RIBBON_STYLE, ribbon_markup
from megatron_ext.cli.inlined_file import InlinedFile
from megatron_ext.cli.reporting import table
from megatron_ext.cli.reporting.curve import SMOOTHING
from megatron_ext.cli.reporting.panel import COLOURS, other_panels, panels
from megatron_ext.cli.reporting.run_record import RunRecord
from megatron_ext.cli.reporting.samples import PairSample
from megatron_ext.cli.reporting.time_shares import PREFIX, phase_names, time_shares
from megatron_ext.version import __version__

_PAGES: Final = Path(__file__).with_name("pages")


def report_page(runs: Sequence[RunRecord], samples: Sequence[PairSample]) -> str:
    """The page of one run, or of several beside one another."""
    environment = Environment(
        loader=FileSystemLoader(_PAGES),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
    )
    environment.filters["share"] = share_in_words
    shares = time_shares(runs)
    others = other_panels(runs)
    return environment.get_template("report.html.jinja").render(
        runs=runs,
        title=" · ".join(run.name for run in runs),
        state=table.state,
        totals=table.totals(runs),
        panels=panels(runs),
        others=[panel for panel in others if panel.title != PREFIX.rstrip("/")],
        phase_panels=[panel for panel in others if panel.title == PREFIX.rstrip("/")],
        shares=shares,
        phases=phase_names(shares),
        held_out=[(run.name, *table.held_out(run)) for run in runs],
        evaluations=table.evaluations(runs),
        chunks=table.chunks(runs),
        data=table.data(runs),
        configuration=table.configuration(runs),
        samples=samples,
        class_names=TEXT_CLASSES,
        markup=ribbon_markup,
        colours=COLOURS,
        smoothing=SMOOTHING,
        version=__version__,
        styles=[RIBBON_STYLE, InlinedFile(_PAGES / "report.css")],
        script=InlinedFile(_PAGES / "report.js"),
    )
