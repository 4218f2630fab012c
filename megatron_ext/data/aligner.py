"""Tokenization and alignment of texts and conversations for all models, and cuts of long texts.

D texts, T tokens of any model, Ts student tokens, Tt teacher tokens, C chunks in which all models
cover the same bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from megatron_ext.alignment.chunk_places import ChunkPlaces, Marks, chunk_marks, without_chunks
from megatron_ext.alignment.conversation_alignment import align_encoded_conversations
from megatron_ext.alignment.text_tokens import TextTokenizer
from megatron_ext.alignment.token_aligner import TokenAligner
from megatron_ext.alignment.window import fitting_runs
from megatron_ext.constants import NO_CHUNK
from megatron_ext.conversation import EncodedConversation
from megatron_ext.conversation.records import ConversationRecord
from megatron_ext.tokenizers import MegatronTokenizerText
from megatron_ext.tokenizers.token_bytes import utf8

Ids = NDArray[np.integer[Any]]

Trained = NDArray[np.bool_] | None
"""[T] mask of trained tokens; None for all."""


class TeacherTokens(NamedTuple):
    """The text as tokens of a teacher with another tokenizer."""

    ids: Ids
    """[Tt]"""

    student_marks: Marks
    """[Ts] chunk marks of the student's tokens."""

    teacher_marks: Marks
    """[Tt] chunk marks of the teacher's tokens."""

    trained: Trained = None
    """[Tt] mask of the teacher's tokens that belong to answers; None for plain text."""


class AlignedText(NamedTuple):
    """A text, or a part of one that begins and ends at a token boundary of every model."""

    student_ids: Ids
    """[Ts]"""

    student_widths: Ids
    """[Ts] bytes of the text that each student token covers."""

    teachers: tuple[TeacherTokens, ...]
    """One for each teacher with another tokenizer than the student."""

    is_end: bool = True
    """Whether this is the end of the text."""

    trained: Trained = None
    """[Ts] mask of the trained tokens of a conversation; None for plain text, which is trained
    whole. A conversation includes its BOS and EOD; for plain text they are added in the batch."""

    log_probs: NDArray[np.float32] | None = None
    """[Ts] log-probability with which each token was sampled, NaN where none was; None for a text
    that was not sampled."""

    @property
    def is_conversation(self) -> bool:
        """Whether this is a conversation written by chat templates, not plain text."""
        return self.trained is not None

    @property
    def byte_count(self) -> int:
        """Bytes of the text; for a conversation, of the student's rendering."""
        return int(self.student_widths.sum())

    @property
    def token_counts(self) -> tuple[int, ...]:
        """Tokens of the student and of each teacher."""
        return len(self.student_ids), *(len(teacher.ids) for teacher in self.teachers)

    def part(self, bounds: Sequence[slice], *, is_end: bool) -> AlignedText:
        """A range of tokens of each model that covers the same bytes.

        Args:
            bounds: Token ranges of the student and of each teacher.
            is_end: Whether the range ends this text.
        """
        student, *others = bounds
        return AlignedText(
            self.student_ids[student],
            self.student_widths[student],
            tuple(
                TeacherTokens(
                    teacher.ids[bound],
                    teacher.student_marks[student],
                    teacher.teacher_marks[bound],
                    _part(teacher.trained, bound),
                )
                for teacher, bound in zip(self.teachers, others, strict=True)
            ),
            is_end=self.is_end and is_end,
            trained=_part(self.trained, student),
            log_probs=None if self.log_probs is None else self.log_probs[student],
        )


def byte_count_of(texts: Sequence[AlignedText]) -> int:
    """Total bytes of all texts; quicker than the sum of ``byte_count``."""
    widths = [text.student_widths for text in texts]
    return int(np.concatenate([np.zeros(0, np.int64), *widths]).sum())


def _part(trained: Trained, bounds: slice) -> Trained:
    return None if trained is None else trained[bounds]


@dataclass(frozen=True, slots=True)
class PackedSample:
    """Texts, or pieces of texts, packed into one row and separated in attention."""

    pieces: tuple[AlignedText, ...]

    source: int = 0
    """Number of the source of the texts among those of a run."""

    @property
    def byte_count(self) -> int:
        """Bytes of all texts."""
        return sum(piece.byte_count for piece in self.pieces)


Stops = NDArray[np.int64]


def cut(text: AlignedText, capacities: Sequence[int]) -> list[AlignedText]:
    """Cut a text, in order, into as few pieces as possible that fit all models.

    A piece ends at a chunk end shared by all teachers, so that all models read the same bytes. A
    stretch without such a cut that exceeds a capacity is dropped: the pieces then have fewer bytes
    than the text. Of a conversation only the first piece is kept, because the rest would lack its
    context, and none where nothing of that is trained.

    Args:
        text: The text.
        capacities: Most tokens of a piece for the student and for each teacher; at least 1.
    """
    counts = text.token_counts
    if all(count <= capacity for count, capacity in zip(counts, capacities, strict=True)):
        return [text]
    stops = _stops(text)
    edges, fits = fitting_runs(stops, capacities)
    fences = [np.append(0, side)[edges].tolist() for side in stops]
    bounds = zip(*([slice(*bound) for bound in pairwise(fence)] for fence in fences), strict=True)
    last = len(fits) - 1
    pieces = [
        text.part(bound, is_end=index == last)
        for index, (bound, is_piece) in enumerate(zip(bounds, fits, strict=True))
        if is_piece
    ]
    if text.trained is not None:
        return [piece for piece in pieces[:1] if fits[0] and np.any(piece.trained)]
    return pieces


def _stops(text: AlignedText) -> list[Stops]:
    """One past the last token of each common chunk [C], for the student and for each teacher.

    A token that covers no byte belongs to the following byte, or to the last byte at the end.
    """
    own = np.flatnonzero(text.student_widths) + 1
    spans = []
    for teacher in text.teachers:
        student = ChunkPlaces.of_marks(teacher.student_marks, side="student").stop
        its = ChunkPlaces.of_marks(teacher.teacher_marks, side="teacher").stop
        own = own[np.isin(own, student, assume_unique=True)]
        spans.append((student, its))
    stops = [own, *(its[student.searchsorted(own)] for student, its in spans)]
    if len(own) and not text.student_widths[own[-1] :].any():
        stops = [side[:-1] for side in stops]
    return [np.append(side, count) for side, count in zip(stops, text.token_counts, strict=True)]


Content = str | ConversationRecord


class Aligner(Protocol):
    """Tokenizes contents for all models and aligns the tokens."""

    def align(self, contents: Sequence[Content]) -> list[AlignedText]:
        """The aligned tokens of each content.

        Raises:
            TokenizerError: A text that a tokenizer cannot take.
            ConfigError: A conversation, and a tokenizer without a prompt format.
            ConversationError: A conversation that is malformed, or does not fit a format, or of
                which nothing is trained (``UntrainedError``).
        """
        ...


class ContentAligner:
    """Aligner of texts (as a batch) and of conversations (one at a time).

    Of a conversation, each model's own template is rendered and the texts of messages are aligned.

    Args:
        student_tokenizer: Tokenizer of the student.
        teacher_tokenizers: Tokenizers of the teachers with another one.
    """

    def __init__(
        self,
        student_tokenizer: MegatronTokenizerText,
        teacher_tokenizers: Sequence[MegatronTokenizerText] = (),
    ) -> None:
        self._texts = TextAligner(student_tokenizer, teacher_tokenizers)
        self._student = student_tokenizer
        self._teachers = tuple(teacher_tokenizers)

    def align(self, contents: Sequence[Content]) -> list[AlignedText]:
        """``Aligner.align``; only student-trained tokens of a conversation are in chunks."""
        texts = iter(self._texts.align([text for text in contents if isinstance(text, str)]))
        return [
            next(texts) if isinstance(content, str) else self._conversation(content)
            for content in contents
        ]

    def _conversation(self, record: ConversationRecord) -> AlignedText:
        student = _encoded(self._student, record, for_training=True)
        return AlignedText(
            student.ids.astype(np.int32),
            np.diff(student.byte_ends, prepend=0).astype(np.int32),
            tuple(
                teacher_tokens(student, record, self._student, other) for other in self._teachers
            ),
            trained=student.trained,
        )


class TextAligner:
    """Aligner of plain texts.

    Args:
        student_tokenizer: Tokenizer of the student.
        teacher_tokenizers: Tokenizers of the teachers with another one.
    """

    def __init__(
        self,
        student_tokenizer: MegatronTokenizerText,
        teacher_tokenizers: Sequence[MegatronTokenizerText] = (),
    ) -> None:
        self._student = TextTokenizer(student_tokenizer)
        self._aligners = [TokenAligner(student_tokenizer, other) for other in teacher_tokenizers]

    def align(self, texts: Sequence[str]) -> list[AlignedText]:
        """The aligned tokens of each of D texts.

        Raises:
            TokenizerError: A text that a tokenizer cannot take.
        """
        if not texts:
            return []
        raws = [utf8(text) for text in texts]
        student = self._student.encode(texts, raws)
        teachers = [aligner.teacher.encode(texts, raws) for aligner in self._aligners]
        marks = [
            aligner.align_joined(student, teacher)
            for aligner, teacher in zip(self._aligners, teachers, strict=True)
        ]
        widths = student.widths
        slices = [tokens.slices for tokens in (student, *teachers)]
        return [
            AlignedText(
                student.ids[student_slice],
                widths[student_slice],
                tuple(
                    TeacherTokens(
                        teacher.ids[teacher_slice],
                        student_marks[student_slice],
                        teacher_marks[teacher_slice],
                    )
                    for teacher, (student_marks, teacher_marks), teacher_slice in zip(
                        teachers, marks, teacher_slices, strict=True
                    )
                ),
            )
            for student_slice, *teacher_slices in zip(*slices, strict=True)
        ]


def teacher_tokens(
    student: EncodedConversation,
    record: ConversationRecord,
    student_tokenizer: MegatronTokenizerText,
    tokenizer: MegatronTokenizerText,
) -> TeacherTokens:
    """A conversation that the student has read, as tokens of a teacher; chunks are of trained
    tokens of the student alone.

    Raises:
        ConfigError: The teacher's tokenizer has no prompt format.
        ConversationError: The conversation does not fit its format.
    """
    teacher = _encoded(tokenizer, record)
    alignment = align_encoded_conversations(
        student,
        teacher,
        student_tokenizer=student_tokenizer,
        teacher_tokenizer=tokenizer,
    ).alignment
    chunk_id = alignment.student_chunk_id
    untrained = np.zeros(alignment.chunk_count, np.bool_)
    untrained[chunk_id[(chunk_id != NO_CHUNK) & ~student.trained]] = True
    student_marks, teacher_marks = (
        without_chunks(marks, untrained) for marks in chunk_marks(alignment)
    )
    ids = teacher.ids.astype(np.int32)
    return TeacherTokens(ids, student_marks, teacher_marks, teacher.trained)


def _encoded(
    tokenizer: MegatronTokenizerText, record: ConversationRecord, *, for_training: bool = False
) -> EncodedConversation:
    return tokenizer.encode_conversation(
        record.messages,
        template_variables=record.template_variables,
        for_training=for_training,
    )
