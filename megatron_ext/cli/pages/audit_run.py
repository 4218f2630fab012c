"""The audit that ``megatron-ext align`` makes, and the same as JSON."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from megatron_ext.alignment.audit import AuditDocument, AuditReport, PairAudit
from megatron_ext.cli.pages.audit_source import AuditSource
from megatron_ext.cli.pages.readable import short_paths
from megatron_ext.tokenizers import MegatronTokenizerText


@dataclass(frozen=True, slots=True)
class AuditRun:
    """An audit of some files by two tokenizers."""

    student: str
    """The student's tokenizer in words."""
    teacher: str
    source: AuditSource
    report: AuditReport
    sample: list[AuditDocument]
    """The first documents, for a page."""

    @classmethod
    def of(
        cls,
        student: MegatronTokenizerText,
        teacher: MegatronTokenizerText,
        source: AuditSource,
        *,
        sample_bytes: int = 0,
    ) -> AuditRun:
        """Read and audit.

        Args:
            student: The student's tokenizer.
            teacher: The teacher's.
            source: What to read.
            sample_bytes: About how much text to keep.

        Raises:
            ConfigError, DataError: As ``AuditSource.documents``, or there is no text.
        """
        documents = source.documents()
        sample = _Sample(sample_bytes)
        audit = PairAudit(student, teacher)
        audit.add(sample.pass_on(documents))
        return cls(_in_words(student), _in_words(teacher), source, audit.report(), sample.documents)

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


@dataclass(slots=True)
class _Sample:
    """The first documents of a stream, up to so many bytes."""

    bytes_left: int
    documents: list[AuditDocument] = field(default_factory=list)

    def pass_on(self, documents: Iterator[AuditDocument]) -> Iterator[AuditDocument]:
        for document in documents:
            if self.bytes_left > 0 and document.text:
                self.documents.append(document)
                self.bytes_left -= len(document.text)
            yield document


def _in_words(tokenizer: MegatronTokenizerText) -> str:
    path = Path(tokenizer.path or "")
    # Most files are named alike; the folder tells them apart.
    name = "/".join(path.parts[-2:]) if path.is_file() else path.name
    words = f"{tokenizer.library}, {tokenizer.vocab_size:,} ids"
    return f"{name} · {words}" if name else words
