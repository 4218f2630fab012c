"""The audit of a pair as one HTML page that needs nothing else: no network, no script.

What texts say is hostile: everything is escaped, and the page's policy lets nothing load or run but
its own style, which it knows by its hash.
"""

from __future__ import annotations

from html import escape
from pathlib import Path
from typing import Final

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from megatron_ext.alignment.audit import share_in_words
from megatron_ext.alignment.audit.text_class import TEXT_CLASSES
from megatron_ext.cli.alignment.audit_run import AuditRun
from megatron_ext.cli.alignment.ribbon import Ribbon, RibbonChunk, bar_of, ribbons, token_title
from megatron_ext.cli.alignment.text_report import SHARE_NAMES, losses, pieces_in_line
from megatron_ext.cli.inlined_file import InlinedFile
from megatron_ext.cli.token_view import TokenView
from megatron_ext.cli.visible_text import one_line
from megatron_ext.tokenizers.byte_tokenizer import ByteTokenizer

_PAGES: Final = Path(__file__).with_name("pages")
_LINE_FEED: Final = ("␤", "↵")
"""How a terminal shows one, and the sign that fonts of browsers have."""


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
    environment.filters["in_line"] = _in_line
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
        style=InlinedFile(_PAGES / "audit.css"),
        bar_of=bar_of,
        markup=_markup,
        pieces=lambda pieces: pieces_in_line(pieces).replace(*_LINE_FEED),
    )


def _markup(ribbon: Ribbon) -> Markup:
    """The chunks as elements, as lean as can be: ``b`` a chunk, ``u`` a side, ``i`` a token."""
    return Markup("".join(map(_chunk, ribbon.chunks)))


def _chunk(chunk: RibbonChunk) -> str:
    sides = "".join(
        f"<u>{''.join(map(_token, side))}</u>" for side in (chunk.student, chunk.teacher)
    )
    kind = "" if chunk.is_one_to_one else f' class="{"x" if chunk.is_aligned else "o"}"'
    return f"<b{kind}>{sides}</b>{'<br>' if chunk.breaks_line else ''}"


def _token(view: TokenView) -> str:
    text = escape(_in_line(view.shown) or "∅")
    return f'<i title="{escape(token_title(view))}"><bdi>{text}</bdi></i>'


def _in_line(text: str) -> str:
    return one_line(text).replace(*_LINE_FEED)
