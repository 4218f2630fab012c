"""Audit of a tokenizer pair, and the objective that it recommends.

M characters, C chunks, T tokens, D documents of a batch.

The recommendation follows from the runs of docs/losses.md ("Several pairs"): a student learned most
by byte prefixes where its tokens are often shorter than its teacher's, and by projected KL
elsewhere. A test holds it to the results of these runs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final, Literal

import numpy as np
from numpy.typing import NDArray

from megatron_ext.alignment.alignment import Alignment
from megatron_ext.alignment.audit.coverage_row import (
    CoverageRow,
    CoverageTally,
    SideReport,
    SideTally,
    share_in_words,
)
from megatron_ext.alignment.audit.document import (
    AuditDocument,
    ChunkRanking,
    ExampleMaker,
    MultiTokenChunk,
    SpannedTokens,
    document_batches,
    pair_hashes,
)
from megatron_ext.alignment.audit.text_class import SCRIPTS, TEXT_CLASSES, TextClassifier
from megatron_ext.alignment.chunk_places import alignment_of
from megatron_ext.alignment.text_tokens import TextTokens
from megatron_ext.alignment.token_aligner import TokenAligner
from megatron_ext.errors import DataError, TokenizerError
from megatron_ext.tokenizers.base import ByteTokenizer
from megatron_ext.tokenizers.token_bytes import utf8

ObjectiveName = Literal["vocab_kl", "projected_kl", "byte_prefix"]
"""Names that ``loss.objective`` takes."""

LEAST_MANY_TO_ONE: Final = 0.1
"""Share of chunks of several student tokens and one teacher token from which byte prefixes are
recommended: they taught more than projected KL at 0.36 and above, and less at 0.03."""

LEAST_ONE_TO_ONE_BYTES: Final = 0.43
MOST_MANY_TO_MANY_BYTES: Final = 0.05
"""Shares of bytes in 1:1 and in n:m chunks within which pairs were compared; where tokens are
shorter, with as little as 0.05 in 1:1 chunks."""

MOST_SPLIT_NUMBERS: Final = 0.05
"""Share of chunks in numbers of several digits that may be other than 1:1. An objective on the
exactly common vocabulary ignores a number that the other side splits differently; a mathematical
text can do without one in twenty."""

LEAST_NUMBER_CHUNKS: Final = 100
"""Chunks in numbers of several digits below which numbers are not judged: the standard
error of a share of 5 % over 100 chunks is 2 %."""

LEAST_REPEATS: Final = 0.001
"""Share of chunks that repeat a teacher token from which the option for them is named."""

_LONG_NUMBERS: Final = ("digits-2", "digits-3", "digits-4+")

_MEASURED: Final = (
    "In short runs of small models, a student learned more from it than from any other objective, "
    "on the pairs of this kind that were compared (docs/losses.md)."
)
_NOT_MEASURED: Final = "No objectives have been compared on such text: compare runs."


@dataclass(frozen=True, slots=True)
class Recommendation:
    """An objective, and the reasons for it."""

    objective: ObjectiveName | None
    """None where no token is aligned."""
    title: str
    """The objective and why, in a sentence."""
    reasons: tuple[str, ...]
    """The counts it rests on, a sentence each."""

    def as_row(self) -> dict[str, Any]:
        """The recommendation as a JSON object."""
        return asdict(self)


def recommend(
    total: CoverageRow,
    classes: Sequence[CoverageRow],
    *,
    same_vocabulary: bool,
    repeats: int = 0,
) -> Recommendation:
    """The objective for a pair.

    Args:
        total: All chunks.
        classes: The chunks by class.
        same_vocabulary: The two vocabularies hold the same bytes under the same ids.
        repeats: Chunks of one student token for which the teacher repeats one of its own.
    """
    if not total.counts.chunks:
        return Recommendation(
            None,
            "No objective: no token of the student meets one of the teacher.",
            ("There is no chunk.",),
        )
    one_to_one = (
        f"{share_in_words(total.one_to_one_share)} of the {total.counts.chunks:,} chunks are 1:1, "
        f"and {share_in_words(total.one_to_one_byte_share)} of the bytes lie in them."
    )
    if same_vocabulary and total.counts.one_to_one == total.counts.chunks:
        return Recommendation(
            "vocab_kl",
            "KL between the two predictions, token by token: the tokenizers are the same.",
            ("Both vocabularies have the same bytes under every id.", one_to_one),
        )
    has_been_compared = total.many_to_many_byte_share <= MOST_MANY_TO_MANY_BYTES
    counts = total.counts
    if counts.many_to_one > max(LEAST_MANY_TO_ONE * counts.chunks, counts.one_to_many):
        shorter = f"{share_in_words(counts.many_to_one / counts.chunks)} are n:1."
        return Recommendation(
            "byte_prefix",
            "Byte prefixes: the student's tokens are often shorter than its teacher's, and each of "
            "them is compared.",
            (f"{one_to_one} {shorter}", _MEASURED if has_been_compared else _NOT_MEASURED),
        )
    has_been_compared &= total.one_to_one_byte_share >= LEAST_ONE_TO_ONE_BYTES
    reasons = [_MEASURED if has_been_compared else _NOT_MEASURED]
    if repeats >= LEAST_REPEATS * counts.chunks:
        reasons.append(
            f"{share_in_words(repeats / counts.chunks)} of the chunks are one token for which the "
            "teacher repeats one of its own, as for a blank line or 11: --loss-options "
            """'{"repeat_weight": 1}' tells such tokens apart."""
        )
    return _projected(classes, one_to_one, reasons)


def _projected(
    classes: Sequence[CoverageRow], one_to_one: str, reasons: Sequence[str]
) -> Recommendation:
    numbers = [row for row in classes if row.name in _LONG_NUMBERS]
    chunks = sum(row.counts.chunks for row in numbers)
    split = chunks - sum(row.counts.one_to_one for row in numbers)
    title = (
        "Projected KL: the student's tokens are seldom shorter than its teacher's; chunks of every "
        "size are used."
    )
    if chunks < LEAST_NUMBER_CHUNKS:
        return Recommendation("projected_kl", title, (one_to_one, *reasons))
    if split / chunks > MOST_SPLIT_NUMBERS:
        title = (
            "Projected KL: the tokenizers split numbers differently, and an objective on the "
            "exactly shared vocabulary would not train these tokens."
        )
    numbers_cut = (
        f"{share_in_words(split / chunks)} of the {chunks:,} chunks in numbers of several digits "
        "are not 1:1."
    )
    return Recommendation("projected_kl", title, (numbers_cut, one_to_one, *reasons))


BATCH_CHARACTERS: Final = 1 << 21
"""Characters of a batch: enough for the threads of a tokenizer, and arrays of some megabytes."""

MOST_REFUSED_LISTED: Final = 100
"""Refused documents that a report lists; all are counted."""


@dataclass(frozen=True, slots=True)
class RefusedDocument:
    """A document that one of the tokenizers refuses."""

    place: str
    problem: str


@dataclass(frozen=True, slots=True)
class AuditReport:
    """Coverage of a text by the chunks of a student and a teacher."""

    student: SideReport
    teacher: SideReport
    documents: int
    """Documents with any text that both tokenizers take."""
    byte_count: int
    total: CoverageRow
    scripts: Sequence[CoverageRow]
    classes: Sequence[CoverageRow]
    longest_chunk_bytes: int
    repeats: int
    """Chunks of one student token for which the teacher repeats one of its own."""
    most_tokens: Sequence[MultiTokenChunk]
    """Chunks that are not 1:1, by the tokens that they concern over the whole text."""
    largest: Sequence[MultiTokenChunk]
    """Chunks that are not 1:1, by the number of tokens in one chunk."""
    counts_are_exact: bool
    """Counts of ``most_tokens`` and ``largest`` are exact; lower bounds otherwise."""
    refused_documents: int
    refused: Sequence[RefusedDocument]
    """The first of them, at most ``MOST_REFUSED_LISTED``."""
    recommendation: Recommendation


class PairAudit:
    """Audits how two tokenizers cut the same texts.

    Args:
        student: The student's tokenizer.
        teacher: The teacher's.

    Raises:
        MissingDependencyError: regex is not installed.
    """

    def __init__(self, student: ByteTokenizer, teacher: ByteTokenizer) -> None:
        self._aligner = TokenAligner(student, teacher)
        self._sides = (SideTally(student), SideTally(teacher))
        self._same_vocabulary = student.fingerprint() == teacher.fingerprint()
        self._classifier = TextClassifier()
        self._tally = CoverageTally(len(SCRIPTS), len(TEXT_CLASSES))
        self._ranking = ChunkRanking.none()
        self._documents = 0
        self._byte_count = 0
        self._longest_chunk_bytes = 0
        self._repeats = 0
        self._refused: list[RefusedDocument] = []
        self._refused_count = 0

    def add(self, documents: Iterable[AuditDocument]) -> None:
        """Audit more documents; empty ones are left out."""
        for batch in document_batches(documents, BATCH_CHARACTERS):
            taken = batch
            try:
                self._add_batch(batch)
            except TokenizerError:
                # One of the texts is refused; the null tokenizer, for one, reads numbers only.
                taken = [document for document in batch if self._takes(document)]
                self._add_batch(taken)
            self._documents += sum(document.begins_document for document in taken)

    def report(self) -> AuditReport:
        """The report on all documents so far.

        Raises:
            DataError: There was no text.
        """
        if not self._byte_count:
            raise DataError(
                "there is no text to audit",
                got=f"{self._refused_count} documents that a tokenizer refuses"
                if self._refused_count
                else "no document that holds any",
                fix="name files that hold text",
            )
        student, teacher = self._sides
        total = self._tally.total(
            student_unaligned=student.unaligned, teacher_unaligned=teacher.unaligned
        )
        classes = self._tally.classes(tuple(TEXT_CLASSES))
        return AuditReport(
            student=student.report(self._byte_count),
            teacher=teacher.report(self._byte_count),
            documents=self._documents,
            byte_count=self._byte_count,
            total=total,
            scripts=self._tally.scripts(SCRIPTS),
            classes=classes,
            longest_chunk_bytes=self._longest_chunk_bytes,
            repeats=self._repeats,
            most_tokens=self._ranking.by_tokens(),
            largest=self._ranking.by_size(),
            counts_are_exact=self._ranking.are_exact,
            refused_documents=self._refused_count,
            refused=tuple(self._refused),
            recommendation=recommend(
                total,
                classes,
                same_vocabulary=self._same_vocabulary,
                repeats=self._repeats,
            ),
        )

    def _takes(self, document: AuditDocument) -> bool:
        problems = [side.refusal(document.text) for side in self._sides]
        problem = next((problem for problem in problems if problem is not None), None)
        if problem is None:
            return True
        self._refused_count += 1
        if len(self._refused) < MOST_REFUSED_LISTED:
            self._refused.append(RefusedDocument(document.place(0), problem))
        return False

    def _add_batch(self, batch: Sequence[AuditDocument]) -> None:
        texts = [document.text for document in batch]
        raws = [utf8(text) for text in texts]
        encoded = (
            self._aligner.student.encode(texts, raws),
            self._aligner.teacher.encode(texts, raws),
        )
        for side, tokens in zip(self._sides, encoded, strict=True):
            side.count(tokens)
        self._byte_count += sum(map(len, raws))
        # Some tokenizers make no token of white space alone: there is nothing to align.
        has_both = (encoded[0].counts > 0) & (encoded[1].counts > 0)
        indices = np.flatnonzero(has_both).tolist()
        if indices:
            self._add_chunks(
                [batch[index] for index in indices],
                [raws[index] for index in indices],
                encoded[0].of_texts(has_both),
                encoded[1].of_texts(has_both),
            )

    def _add_chunks(
        self,
        batch: Sequence[AuditDocument],
        raws: Sequence[bytes],
        student: TextTokens,
        teacher: TextTokens,
    ) -> None:
        alignment = alignment_of(*self._aligner.align_joined(student, teacher))
        sizes = [
            side.count_chunks(chunk_id, alignment.chunk_count)
            for side, chunk_id in zip(
                self._sides,
                (alignment.student_chunk_id, alignment.teacher_chunk_id),
                strict=True,
            )
        ]
        bounds = _byte_bounds(alignment, student.ends)
        byte_count = bounds[:, 1] - bounds[:, 0]
        self._longest_chunk_bytes = max(self._longest_chunk_bytes, int(byte_count.max()))
        script, text_class = self._classified(raws, bounds)
        self._tally.add(script, text_class, sizes[0], sizes[1], byte_count)
        is_repeat = _repeats_one(teacher.ids, alignment.teacher_spans)
        self._repeats += int((is_repeat & (sizes[0] == 1) & (sizes[1] > 1)).sum())
        multi_token = np.flatnonzero((sizes[0] > 1) | (sizes[1] > 1))
        spans = (alignment.student_spans[multi_token], alignment.teacher_spans[multi_token])
        self._ranking.add(
            pair_hashes(student.ids, spans[0], teacher.ids, spans[1]),
            (sizes[0] + sizes[1])[multi_token],
            ExampleMaker(
                batch,
                raws,
                (
                    SpannedTokens(student.ids, student.ends, spans[0]),
                    SpannedTokens(teacher.ids, teacher.ends, spans[1]),
                ),
            ).example,
        )

    def _classified(
        self, raws: Sequence[bytes], bounds: NDArray[np.int64]
    ) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
        """Script and class of each chunk [C]; a chunk of an incomplete character, which covers no
        byte, has those of the chunk that covers the character."""
        covers = bounds[:, 1] > bounds[:, 0]
        text = BatchText(raws)
        script, text_class = self._classifier.classify(
            text.code_points, text.documents, *text.characters(bounds[covers])
        )
        at = np.minimum(np.cumsum(covers) - covers, len(script) - 1)
        return script[at], text_class[at]


def _repeats_one(ids: NDArray[np.int32], spans: NDArray[np.int32]) -> NDArray[np.bool_]:
    """Whether all tokens of each span [C, 2] are one, bool [C]."""
    changes = np.concatenate([np.zeros(1, np.int64), np.cumsum(ids[1:] != ids[:-1])])
    is_one: NDArray[np.bool_] = changes[spans[:, 0]] == changes[spans[:, 1] - 1]
    return is_one


def _byte_bounds(alignment: Alignment, ends: NDArray[np.int64]) -> NDArray[np.int64]:
    """First byte of each chunk and one past its last [C, 2]."""
    fence = np.concatenate([np.zeros(1, np.int64), ends])
    bounds: NDArray[np.int64] = fence[alignment.student_spans]
    return bounds


class BatchText:
    """The characters of a batch, and the character that each byte belongs to.

    Args:
        raws: UTF-8 of its documents.

    Attributes:
        code_points: The characters, one after another [M].
        documents: First character of each document [D].
    """

    def __init__(self, raws: Sequence[bytes]) -> None:
        raw = b"".join(raws)
        self.code_points = np.frombuffer(raw.decode().encode("utf-32-le"), np.uint32)
        self._is_ascii = len(self.code_points) == len(raw)
        if not self._is_ascii:
            is_start = (np.frombuffer(raw, np.uint8) & 0xC0) != 0x80
            self._character_at = np.cumsum(is_start) - 1
        begins = np.cumsum([0, *map(len, raws)], dtype=np.int64)[:-1]
        self.documents = self._of_bytes(begins)

    def characters(self, bounds: NDArray[np.int64]) -> tuple[NDArray[Any], NDArray[Any]]:
        """First character and one past the last of byte ranges that are not empty [C, 2]."""
        return self._of_bytes(bounds[:, 0]), self._of_bytes(bounds[:, 1] - 1) + 1

    def _of_bytes(self, at: NDArray[np.int64]) -> NDArray[np.int64]:
        return at if self._is_ascii else self._character_at[at]
