"""The audit of ``megatron-ext align``: its run, its report as text, and table cells for pages."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from megatron_ext.alignment.audit import (
    AuditDocument,
    AuditReport,
    CoverageRow,
    MultiTokenChunk,
    PairAudit,
    SideReport,
    share_in_words,
)
from megatron_ext.alignment.audit.text_class import TEXT_CLASSES
from megatron_ext.cli.pages.audit_source import AuditSource
from megatron_ext.cli.pages.token_view import (
    BOLD,
    GREY,
    ORANGE,
    columns,
    one_line,
    short_paths,
    styled,
    table_lines,
)
from megatron_ext.errors import counted
from megatron_ext.tokenizers import MegatronTokenizerText


@dataclass(frozen=True, slots=True)
class AuditRun:
    """An audit of some texts by two tokenizers."""

    student: str
    """Description of the student's tokenizer."""
    teacher: str
    source: AuditSource
    report: AuditReport
    sample: list[AuditDocument]
    """The first documents, for the ribbons of a page."""

    @classmethod
    def of(
        cls,
        student: MegatronTokenizerText,
        teacher: MegatronTokenizerText,
        source: AuditSource,
        *,
        sample_bytes: int = 0,
    ) -> AuditRun:
        """Read the source and audit it.

        Args:
            source: Source of the documents.
            sample_bytes: About how much text to retain for ribbons.

        Raises:
            ConfigError, DataError: See ``AuditSource.documents``; or there is no text.
        """
        documents = source.documents()
        sample: list[AuditDocument] = []

        def sampled() -> Iterator[AuditDocument]:
            left = sample_bytes
            for document in documents:
                if left > 0 and document.text:
                    sample.append(document)
                    left -= len(document.text)
                yield document

        audit = PairAudit(student, teacher)
        audit.add(sampled())
        return cls(_in_words(student), _in_words(teacher), source, audit.report(), sample)

    def as_row(self) -> dict[str, Any]:
        """The audit as one JSON object."""
        report = self.report
        return {
            "student": {"tokenizer": self.student, **asdict(report.student)},
            "teacher": {"tokenizer": self.teacher, **asdict(report.teacher)},
            "inputs": list(short_paths(self.source.files).values()),
            "documents": report.documents,
            "bytes": report.byte_count,
            "all": report.total.as_row(),
            "scripts": [row.as_row() for row in report.scripts],
            "classes": [row.as_row() for row in report.classes],
            "longest_chunk_bytes": report.longest_chunk_bytes,
            "repeats": report.repeats,
            "most_tokens": [one.as_row() for one in report.most_tokens],
            "largest": [one.as_row() for one in report.largest],
            "counts_are_exact": report.counts_are_exact,
            "recommendation": report.recommendation.as_row(),
            "bad_records": self.source.bad_records,
            "bad": self.source.bad,
            "skipped_files": list(short_paths(self.source.skipped_files).values()),
            "refused_documents": report.refused_documents,
            "refused": [asdict(one) for one in report.refused],
        }


def _in_words(tokenizer: MegatronTokenizerText) -> str:
    path = Path(tokenizer.path or "")
    # Most files have the same name; the folder distinguishes them.
    name = "/".join(path.parts[-2:]) if path.is_file() else path.name
    words = f"{tokenizer.library}, {tokenizer.vocab_size:,} ids"
    return f"{name} · {words}" if name else words


_WIDTH: Final = 100
_MOST_PIECES: Final = 8
_CONTEXT: Final = 20

_SHARES: Final = {
    "one_to_one": "1:1",
    "one_to_many": "1:n",
    "many_to_one": "n:1",
    "many_to_many": "n:m",
}
"""Column heads by kind of chunk: student tokens to teacher tokens."""

COVERAGE_HEADS: Final = ("chunks", *_SHARES.values(), "bytes in 1:1")
"""Columns of ``coverage_cells``."""


def text_report(run: AuditRun, *, examples: int, color: bool) -> str:
    """The report as text.

    Args:
        examples: Low-coverage chunks to list in each ranking.
        color: Highlight headings and chunks that are not 1:1 with colours.
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
        for title, offenders in rankings(self._report):
            if offenders[:examples]:
                yield f"\n{self._styled(BOLD, title)}\n"
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
                f"{self._styled(BOLD, name)}  {words} · {side.tokens:,} tokens · "
                f"{side.bytes_per_token:.2f} bytes/token\n"
            )
        report = self._report
        yield (
            f"{self._styled(BOLD, 'text')}     {counted(report.documents, 'document')} · "
            f"{counted(report.byte_count, 'byte')}\n"
        )

    def _totals(self) -> Iterator[str]:
        report, total = self._report, self._report.total
        if total.counts.chunks:
            yield (
                f"{self._styled(BOLD, 'chunks')}   {total.counts.chunks:,} · "
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
        rows = [(self._report.total.name, *_cells(self._report.total))]
        groups = coverage_groups(self._report)[1:]
        rows += [(f"  {name}", *_cells(row)) for _, group in groups for name, row in group]
        heads = ("", *COVERAGE_HEADS, "student/chunk", "teacher/chunk")
        lines = iter(table_lines([heads, *rows], "<" + ">" * (len(heads) - 1)))
        yield f"\n{self._styled(GREY, next(lines))}\n"
        for heading, group in coverage_groups(self._report):
            if heading:
                yield f"{self._styled(BOLD, heading)}\n"
            for (_, row), line in zip(group, lines, strict=False):
                is_marked = row.counts.one_to_one < row.counts.chunks / 2
                yield f"{self._styled(ORANGE, line) if is_marked else line}\n"

    def _offenders(self, offenders: Sequence[MultiTokenChunk]) -> Iterator[str]:
        rows = [
            (
                f"{one.count:,}x",
                f"{one.tokens:,} tokens",
                pieces_in_line([piece.text for piece in one.example.student]),
                pieces_in_line([piece.text for piece in one.example.teacher]),
                f"{one.example.place}  {_context(one)}",
            )
            for one in offenders
        ]
        for count, tokens, student, teacher, context in columns(rows, ">><<"):
            yield (
                f"  {count}  {tokens}  {self._styled(ORANGE, f'{student}  →  {teacher}')}  "
                f"{self._styled(GREY, context)}\n"
            )

    def _recommendation(self) -> Iterator[str]:
        advice = self._report.recommendation
        yield f"\n{self._styled(BOLD, 'objective')}\n"
        if advice.objective is not None:
            yield f"  --loss-objective {advice.objective}\n"
        for sentence in (advice.title, *advice.reasons):
            yield (
                textwrap.fill(sentence, _WIDTH, initial_indent="  ", subsequent_indent="  ") + "\n"
            )

    def _styled(self, style: str, text: str) -> str:
        return styled(style, text, color=self._color)


def rankings(report: AuditReport) -> tuple[tuple[str, Sequence[MultiTokenChunk]], ...]:
    """Chunks that are not 1:1, with the title of each ranking."""
    return (
        ("most affected tokens, in chunks that are not 1:1", report.most_tokens),
        ("largest chunks that are not 1:1", report.largest),
    )


def coverage_groups(report: AuditReport) -> list[tuple[str, list[tuple[str, CoverageRow]]]]:
    """Rows of the table of chunks, grouped by class; the first group is the total."""
    return [
        (title, [(TEXT_CLASSES.get(row.name, row.name), row) for row in rows])
        for title, rows in (
            ("", [report.total]),
            ("script", report.scripts),
            ("class", report.classes),
        )
    ]


def coverage_cells(row: CoverageRow) -> tuple[str, ...]:
    """Number of chunks and shares of each kind; shares are empty without chunks."""
    chunks = row.counts.chunks
    if not chunks:
        return ("0", *[""] * (len(COVERAGE_HEADS) - 1))
    shares = row.counts.shares()
    return (
        f"{chunks:,}",
        *(share_in_words(shares[key]) for key in _SHARES),
        share_in_words(row.one_to_one_byte_share),
    )


def losses(report: AuditReport, run: AuditRun) -> Iterator[str]:
    """Sentences about text that is unaligned, unknown, left out or refused."""
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


def _cells(row: CoverageRow) -> tuple[str, ...]:
    chunks = row.counts.chunks
    tokens = (row.student_tokens, row.teacher_tokens)
    return (*coverage_cells(row), *(f"{count / chunks:.2f}" if chunks else "" for count in tokens))


def pieces_in_line(pieces: Sequence[str]) -> str:
    """Pieces separated by bars, with the middle of a long list left out."""
    shown = [one_line(piece) or "∅" for piece in pieces[:_MOST_PIECES]]
    more = ["…"] if len(pieces) > _MOST_PIECES else []
    return "│".join([*shown, *more])


def _context(one: MultiTokenChunk) -> str:
    example = one.example
    text = f"{example.before[-_CONTEXT:]}⟪{example.text[:_CONTEXT]}⟫{example.after[:_CONTEXT]}"
    return one_line(text)
