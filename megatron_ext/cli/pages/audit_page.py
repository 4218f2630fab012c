"""The HTML page of an audit; it has no script."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from markupsafe import Markup

from megatron_ext.alignment.audit import AuditReport, CoverageRow, MultiTokenChunk, share_in_words
from megatron_ext.alignment.audit.document import Piece
from megatron_ext.cli.pages.audit_ribbon import ribbons
from megatron_ext.cli.pages.audit_text import (
    COVERAGE_HEADS,
    AuditRun,
    coverage_cells,
    coverage_groups,
    losses,
    pieces_in_line,
    rankings,
)
from megatron_ext.cli.pages.frame import (
    BarPart,
    TableRow,
    bar,
    element,
    html_page,
    in_line,
    swatch,
    told_on_focus,
)
from megatron_ext.cli.pages.token_view import number
from megatron_ext.tokenizers.base import ByteTokenizer

_STYLES = {"1:1": "k1", "1:n": "k2", "n:1": "k3", "n:m": "k4"}


def audit_page(
    run: AuditRun, student: ByteTokenizer, teacher: ByteTokenizer, *, most_bytes: int
) -> str:
    """Render the page of an audit, with at most ``most_bytes`` of sample text."""
    report = run.report
    values = {
        "run": run,
        "report": report,
        "totals": list(_totals(report)),
        "losses": list(losses(report, run)),
        "coverage": coverage_table,
        "rankings": [
            (title.capitalize(), [_offender_row(one) for one in offenders])
            for title, offenders in rankings(report)
        ],
        "ribbons": ribbons(run.sample, student, teacher, most_bytes=most_bytes),
        "most_bytes": most_bytes,
    }
    return html_page(
        "audit", values, title=f"{run.student} and {run.teacher}", styles=("alignment",)
    )


def _totals(report: AuditReport) -> Iterator[tuple[str, str, str]]:
    yield "documents", number(report.documents), ""
    yield "bytes", number(report.byte_count), ""
    yield "student bytes/token", f"{report.student.bytes_per_token:.2f}", ""
    yield "teacher bytes/token", f"{report.teacher.bytes_per_token:.2f}", ""
    yield "chunks", number(report.total.counts.chunks), ""
    if report.total.counts.chunks:
        yield "1:1 chunks", share_in_words(report.total.one_to_one_share), ""
        yield "bytes in 1:1", share_in_words(report.total.one_to_one_byte_share), ""
    tokens = f"{report.student.longest_chunk:,} student, {report.teacher.longest_chunk:,} teacher"
    yield "longest chunk", number(report.longest_chunk_bytes), f"bytes; {tokens} tokens"


def coverage_table(report: AuditReport) -> tuple[list[str], list[TableRow]]:
    """Headings and rows of the table of chunks."""
    heads = (swatch(_STYLES[head], head) if head in _STYLES else head for head in COVERAGE_HEADS)
    table: list[TableRow] = []
    for title, rows in coverage_groups(report):
        table += [TableRow(f"by {title}")] if title else []
        table += [TableRow(name, (*coverage_cells(row), _bar(row))) for name, row in rows]
    return ["", *heads, ""], table


def _bar(row: CoverageRow) -> Markup:
    counts = row.counts
    sizes = (counts.one_to_one, counts.one_to_many, counts.many_to_one, counts.many_to_many)
    parts = [BarPart(style, size) for style, size in zip(_STYLES.values(), sizes, strict=True)]
    return bar(parts, f"shares of {', '.join(_STYLES)}")


def _offender_row(one: MultiTokenChunk) -> TableRow:
    example = one.example
    place = element("small", example.place)
    text = element(
        "bdi",
        Markup("{}{}{}").format(
            in_line(example.before), element("mark", in_line(example.text)), in_line(example.after)
        ),
    )
    return TableRow(
        number(one.count),
        (
            number(one.tokens),
            _pieces(example.student),
            _pieces(example.teacher),
            Markup("{} {}").format(place, text),
        ),
    )


def _pieces(pieces: Sequence[Piece]) -> Markup:
    ids = " ".join(str(piece.token_id) for piece in pieces)
    text = in_line(pieces_in_line([piece.text for piece in pieces]))
    return element("bdi", text, {"title": f"ids {ids}", **told_on_focus(f"{text}\nids {ids}")})
