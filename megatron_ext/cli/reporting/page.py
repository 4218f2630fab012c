"""Runs as a page."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_ext.cli.pages.frame import html_page
from megatron_ext.cli.reporting import table
from megatron_ext.cli.reporting.curve import SMOOTHING
from megatron_ext.cli.reporting.panel import COLOURS, other_panels, panels
from megatron_ext.cli.reporting.run_record import RunRecord
from megatron_ext.cli.reporting.samples import PairSample
from megatron_ext.cli.reporting.time_shares import PREFIX, time_shares
from megatron_ext.version import __version__


def report_page(runs: Sequence[RunRecord], samples: Sequence[PairSample]) -> str:
    """The page of one run, or of several beside one another."""
    others = other_panels(runs)
    names = [run.name for run in runs]
    values = {
        "runs": runs,
        "names": names,
        "several": len(runs) > 1,
        "state": table.state,
        "totals": table.totals(runs),
        "panels": panels(runs),
        "others": [panel for panel in others if panel.title != PREFIX.rstrip("/")],
        "phase_panels": [panel for panel in others if panel.title == PREFIX.rstrip("/")],
        "shares": time_shares(runs),
        "held_out": [(run.name, *table.held_out(run)) for run in runs],
        "evaluations": table.evaluations(runs),
        "chunks": table.chunks(runs),
        "data": table.data(runs),
        "configuration": table.configuration(runs),
        "samples": samples,
        "colours": COLOURS,
        "smoothing": SMOOTHING,
        "version": __version__,
    }
    return html_page("report", values, title=" · ".join(names), styles=("ribbon",))
