"""The audit of a pair in a terminal."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from typing import Final

from megatron_ext.alignment.audit import (
    AuditReport,
    CoverageRow,
    Offender,
    SideReport,
    share_in_words,
)
from megatron_ext.alignment.audit.text_class import TEXT_CLASSES
from megatron_ext.cli.alignment.audit_run import AuditRun
from megatron_ext.cli.visible_text import one_line, readable_text

_WIDTH: Final = 100
_MOST_PIECES: Final = 8
_CONTEXT: Final = 20
_BOLD: Final = "\x1b[1m"
_SOFT: Final = "\x1b[38;5;245m"
_MARKED: Final = "\x1b[38;5;215m"
_RESET: Final = "\x1b[0m"

SHARE_NAMES: Final = {
    "one_to_one": "1:1",
    "one_to_many": "1:n",
    "many_to_one": "n:1",
    "many_to_many": "n:m",
}
"""How many student tokens meet how many of the teacher's."""


def text_report(run: AuditRun, *, examples: int, color: bool) -> str:
    """The report as text.

    Args:
        run: The audit.
        examples: Offenders to list in each ranking.
        color: Mark headings and what is not 1:1 with colours.
    """
    return "".join(_Text(run, color=color).lines(examples))


class _Text:
    def __init__(self, run: AuditRun, *, color: bool) -> None:
        self._run = run
        self._report = run.report
        self._color = color

    def lines(self, examples: int) -> Iterator[str]:
        """The whole report."""
        yield from self._sides()
        yield from self._totals()
        yield from self._table()
        for title, offenders in (
            ("most affected tokens, in chunks that are not 1:1", self._report.most_tokens),
            ("largest chunks that are not 1:1", self._report.largest),
        ):
            if offenders[:examples]:
                yield f"\n{self._styled(_BOLD, title)}\n"
                yield from self._offenders(offenders[:examples])
        if not self._report.counts_are_exact:
            yield "Counts are lower bounds: more kinds of chunks occurred than are remembered.\n"
        yield from self._recommendation()

    def _sides(self) -> Iterator[str]:
        for name, words, side in (
            ("student", self._run.student, self._report.student),
            ("teacher", self._run.teacher, self._report.teacher),
        ):
            yield (
                f"{self._styled(_BOLD, name)}  {words} · {side.tokens:,} tokens · "
                f"{side.bytes_per_token:.2f} bytes/token\n"
            )
        report = self._report
        yield (
            f"{self._styled(_BOLD, 'text')}     {report.documents:,} documents · "
            f"{report.byte_count:,} bytes\n"
        )

    def _totals(self) -> Iterator[str]:
        report, total = self._report, self._report.total
        if total.counts.chunks:
            yield (
                f"{self._styled(_BOLD, 'chunks')}   {total.counts.chunks:,} · "
                f"{total.student_tokens / total.counts.chunks:.2f} student and "
                f"{total.teacher_tokens / total.counts.chunks:.2f} teacher tokens, "
                f"{total.byte_count / total.counts.chunks:.2f} bytes each · "
                f"{share_in_words(total.one_to_one_byte_share)} of the bytes in 1:1\n"
            )
            yield (
                f"         longest: student tokens {report.student.longest_chunk:,}, "
                f"teacher tokens {report.teacher.longest_chunk:,}, "
                f"bytes {report.longest_chunk_bytes:,}\n"
            )
        yield from (f"         {line}\n" for line in losses(report, self._run))

    def _table(self) -> Iterator[str]:
        heads = [
            "",
            "chunks",
            *SHARE_NAMES.values(),
            "bytes in 1:1",
            "student/chunk",
            "teacher/chunk",
        ]
        groups: list[tuple[str, Sequence[CoverageRow]]] = [
            ("", [self._report.total]),
            ("script", self._report.scripts),
            ("class", self._report.classes),
        ]
        cells = [_cells(row, heading) for heading, rows in groups for row in rows]
        widths = [max(len(head), *map(len, column)) for head, column in zip(
            heads, zip(*cells, strict=True), strict=True
        )] if cells else []  # fmt: skip
        if not cells:
            return
        yield f"\n{self._styled(_SOFT, _line(heads, widths))}\n"
        for heading, rows in groups:
            if heading:
                yield f"{self._styled(_BOLD, heading)}\n"
            for row in rows:
                line = _line(_cells(row, heading), widths)
                is_marked = row.counts.chunks and row.counts.one_to_one < row.counts.chunks / 2
                yield f"{self._styled(_MARKED, line) if is_marked else line}\n"

    def _offenders(self, offenders: Sequence[Offender]) -> Iterator[str]:
        rows = [
            (
                f"{one.count:,}x",
                f"{one.tokens:,} tokens",
                pieces_in_line([piece.text for piece in one.example.student]),
                pieces_in_line([piece.text for piece in one.example.teacher]),
                one.example.place,
                _context(one),
            )
            for one in offenders
        ]
        widths = [max(len(row[i]) for row in rows) for i in range(4)]
        for count, tokens, student, teacher, place, context in rows:
            yield (
                f"  {count:>{widths[0]}}  {tokens:>{widths[1]}}  "
                f"{self._styled(_MARKED, f'{student:<{widths[2]}}  →  {teacher:<{widths[3]}}')}  "
                f"{self._styled(_SOFT, f'{place}  {context}')}\n"
            )

    def _recommendation(self) -> Iterator[str]:
        advice = self._report.recommendation
        yield f"\n{self._styled(_BOLD, 'objective')}\n"
        for sentence in (advice.title, *advice.reasons):
            yield (
                textwrap.fill(sentence, _WIDTH, initial_indent="  ", subsequent_indent="  ") + "\n"
            )

    def _styled(self, style: str, text: str) -> str:
        return f"{style}{text}{_RESET}" if self._color else text


def losses(report: AuditReport, run: AuditRun) -> Iterator[str]:
    """What is in no chunk, unknown, left out or refused: a sentence each."""
    counts = report.total.counts
    if counts.student_unaligned or counts.teacher_unaligned:
        yield (
            f"in no chunk: {counts.student_unaligned:,} student tokens, "
            f"{counts.teacher_unaligned:,} teacher tokens"
        )
    for name, side in (("student", report.student), ("teacher", report.teacher)):
        if side.unknown_tokens:
            yield _unknown(name, side, report.byte_count)
    if run.source.bad_records:
        yield f"left out: {run.source.bad_records:,} records that cannot be used"
    if report.refused_documents:
        yield f"left out: {report.refused_documents:,} documents that a tokenizer refuses"


def _unknown(name: str, side: SideReport, byte_count: int) -> str:
    share = share_in_words(side.unknown_bytes / byte_count)
    return (
        f"the {name} cannot represent {side.unknown_bytes:,} bytes ({share}): "
        f"{side.unknown_tokens:,} unknown tokens"
    )


def _cells(row: CoverageRow, heading: str) -> list[str]:
    name = row.name if not heading else f"  {TEXT_CLASSES.get(row.name, row.name)}"
    chunks = row.counts.chunks
    if not chunks:
        return [name, "0", *[""] * 7]
    shares = row.counts.shares()
    return [
        name,
        f"{chunks:,}",
        *(share_in_words(shares[key]) for key in SHARE_NAMES),
        share_in_words(row.one_to_one_byte_share),
        f"{row.student_tokens / chunks:.2f}",
        f"{row.teacher_tokens / chunks:.2f}",
    ]


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    first, *rest = (
        cell.rjust(width) if index else cell.ljust(width)
        for index, (cell, width) in enumerate(zip(cells, widths, strict=True))
    )
    return "  ".join([first, *rest]).rstrip()


def pieces_in_line(pieces: Sequence[str]) -> str:
    """Pieces with bars between them, the middle of many left out."""
    shown = [one_line(piece) or "∅" for piece in pieces[:_MOST_PIECES]]
    more = ["…"] if len(pieces) > _MOST_PIECES else []
    return "│".join([*shown, *more])


def _context(one: Offender) -> str:
    example = one.example
    text = f"{example.before[-_CONTEXT:]}⟪{example.text[:_CONTEXT]}⟫{example.after[:_CONTEXT]}"
    return readable_text(text).replace("␤\n", "␤")
