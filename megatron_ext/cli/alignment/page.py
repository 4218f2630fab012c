"""The audit of a pair as one HTML page that needs nothing else: no network, no script.

What texts say is hostile: everything is escaped, and the page's policy lets nothing load or run but
its own style, which it knows by its hash.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from megatron_ext.alignment.audit import share_in_words
from megatron_ext.alignment.audit.text_class import TEXT_CLASSES
from megatron_ext.cli.alignment.audit_run import AuditRun
from megatron_ext.cli.alignment.ribbon import bar_of, ribbons
from megatron_ext.cli.alignment.ribbon_markup import (
    LINE_FEED,
    RIBBON_STYLE,
    in_line,
    ribbon_markup,
)
from megatron_ext.cli.alignment.text_report import SHARE_NAMES, losses, pieces_in_line
from megatron_ext.cli.inlined_file import InlinedFile
from megatron_ext.tokenizers.base import ByteTokenizer

_PAGES: Final = Path(__file__).with_name("pages")


def audit_page(
    run: AuditRun, student: ByteTokenizer, teacher: ByteTokenizer, *, most_bytes: int
) -> str:
    """The page of an audit.

    Args:
        run: The audit.
        student: The student's tokenizer.
        teacher: The teacher's.
        most_bytes: Text of the sample to show at most.
    """
    environment = Environment(
        loader=FileSystemLoader(_PAGES),
        autoescape=True,
        trim_blocks=True,
        undefined=StrictUndefined,
    )
    environment.filters["in_line"] = in_line
    environment.filters["share"] = share_in_words
    report = run.report
    return environment.get_template("audit.html.jinja").render(
        run=run,
        report=report,
        losses=list(losses(report, run)),
        groups=(("script", report.scripts), ("class", report.classes)),
        class_names=TEXT_CLASSES,
        share_names=SHARE_NAMES,
        ribbons=ribbons(run.sample, student, teacher, most_bytes=most_bytes),
        most_bytes=most_bytes,
        styles=[RIBBON_STYLE, InlinedFile(_PAGES / "audit.css")],
        bar_of=bar_of,
        markup=ribbon_markup,
        pieces=lambda pieces: pieces_in_line(pieces).replace(*LINE_FEED),
    )
