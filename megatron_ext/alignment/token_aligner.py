"""The facade: two tokenizers, and a text or two id streams, to an alignment."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING

from megatron_ext.alignment.alignment import Alignment
from megatron_ext.alignment.bridging.text_alignment import BridgedAlignment, align_bridged
from megatron_ext.alignment.byte_alignment import (
    ByteEnds,
    align_byte_ends,
)
from megatron_ext.alignment.control_pairs import ControlClasses
from megatron_ext.alignment.encoded_texts import encode_text, encode_texts
from megatron_ext.alignment.spelling import AnyAlignment, SpelledSide, Spelling, as_spelled
from megatron_ext.alignment.stream_bytes import check_same_bytes, stream_bytes
from megatron_ext.alignment.tokens import AlignedTokens, Ids, Tokens
from megatron_ext.alignment.truncation import truncate
from megatron_ext.conversation.chat_output import refuse_foreign
from megatron_ext.errors import AlignmentError
from megatron_ext.tokenizers.base import ByteTokenizer

if TYPE_CHECKING:
    from megatron_ext.alignment.batch import AlignmentBatch

IdPair = tuple[Ids, Ids]


class TokenAligner:
    """Aligns what a student and a teacher make of the same text.

    Args:
        student_tokenizer: The student's, or the adapter of its library.
        teacher_tokenizer: The teacher's.
        pair_control_tokens: Control tokens that stand for the same thing on both sides (by role,
            else by name) and stand at the same byte are chunks of their own. Otherwise they are in
            no chunk, as those that one side alone has.

    Raises:
        TokenizerError: A tokenizer is none of ours.
    """

    def __init__(
        self,
        student_tokenizer: ByteTokenizer,
        teacher_tokenizer: ByteTokenizer,
        *,
        pair_control_tokens: bool = True,
    ) -> None:
        for tokenizer in (student_tokenizer, teacher_tokenizer):
            refuse_foreign(tokenizer, "encode_with_byte_ends")
        self.student_tokenizer = student_tokenizer
        self.teacher_tokenizer = teacher_tokenizer
        self.pair_control_tokens = pair_control_tokens

    def align(self, text: str) -> Alignment:
        """Tokenize ``text`` with both and align the tokens; special tokens in it are text."""
        return self._aligned(
            encode_text(self.student_tokenizer, self._student.table, text),
            encode_text(self.teacher_tokenizer, self._teacher.table, text),
        )

    def align_ids(self, student_ids: Ids, teacher_ids: Ids, *, bridge: bool = False) -> Alignment:
        """Align two streams that decode to the same bytes, control tokens aside.

        Args:
            student_ids: [Ts], for example a generated answer.
            teacher_ids: [Tt]
            bridge: Take streams of different bytes too, as tokenizers that normalise make them:
                chunks are made within what is equal, and the result is a ``BridgedAlignment``,
                which says what is not.

        Raises:
            AlignmentError: An id is outside its vocabulary, or the streams decode to different
                bytes and are not to be bridged.
        """
        student = Tokens.of_stream(student_ids, self.student_tokenizer, side="student")
        teacher = Tokens.of_stream(teacher_ids, self.teacher_tokenizer, side="teacher")
        student_bytes = stream_bytes(self._student.table, student.ids, student.ends)
        teacher_bytes = stream_bytes(self._teacher.table, teacher.ids, teacher.ends)
        if bridge:
            return self._bridged(student, teacher, student_bytes, teacher_bytes)
        check_same_bytes(student_bytes, teacher_bytes)
        return self._aligned(student, teacher)

    def align_texts(self, student_text: str, teacher_text: str) -> BridgedAlignment:
        """Align two texts that differ, each tokenized by its side, through what is equal in them.

        Raises:
            TokenizerError: A text that a tokenizer cannot take.
        """
        return self._bridged(
            encode_text(self.student_tokenizer, self._student.table, student_text),
            encode_text(self.teacher_tokenizer, self._teacher.table, teacher_text),
            student_text.encode(),
            teacher_text.encode(),
        )

    def align_encoded(
        self, student: tuple[Ids, ByteEnds], teacher: tuple[Ids, ByteEnds]
    ) -> Alignment:
        """Align ids whose byte ends are known, as ``encode_with_byte_ends`` gives both.

        The ends of both sides must be of the same bytes, which is not checked here.

        Raises:
            AlignmentError: Ids and ends that differ in number, or ends that go backwards.
        """
        own = Tokens.checked(*student, self.student_tokenizer.vocab_size, side="student")
        other = Tokens.checked(*teacher, self.teacher_tokenizer.vocab_size, side="teacher")
        return self._aligned(own, other)

    def align_each(
        self,
        texts: Sequence[str],
        *,
        student_length: int | None = None,
        teacher_length: int | None = None,
    ) -> list[AlignedTokens]:
        """Tokenize D texts with both, by their paths for batches, and align each.

        Args:
            texts: D texts; special tokens in them are text.
            student_length: Most student tokens of a text; both sides of a longer one are cut at the
                last common boundary that fits. None for any number.
            teacher_length: Most teacher tokens of a text.

        Raises:
            AlignmentError: A length below 1.
            TokenizerError: A text that a tokenizer cannot take.
        """
        students = encode_texts(self.student_tokenizer, self._student.table, texts)
        teachers = encode_texts(self.teacher_tokenizer, self._teacher.table, texts)
        return [
            self._cut(student, teacher, student_length, teacher_length)
            for student, teacher in zip(students, teachers, strict=True)
        ]

    def align_batch(
        self,
        samples: Sequence[str] | Sequence[IdPair],
        *,
        student_length: int | None = None,
        teacher_length: int | None = None,
    ) -> AlignmentBatch:
        """The padded batch of B samples, in label coordinates.

        Args:
            samples: Texts, or pairs of student and teacher ids that decode to the same bytes.
            student_length: Most student tokens of a sample, and label positions of a row; the
                longest sample's where it is None. A longer sample is cut on both sides.
            teacher_length: The same for the teacher.

        Raises:
            AlignmentError: One text in place of several, a sample that is neither a text nor a
                pair of ids, a length below 1, or ids that ``align_ids`` refuses.
            TokenizerError: A text that a tokenizer cannot take.
        """
        from megatron_ext.alignment.batch import pad_alignments

        _check_samples(samples)
        texts = [sample for sample in samples if isinstance(sample, str)]
        if len(texts) == len(samples):
            aligned = self.align_each(
                texts, student_length=student_length, teacher_length=teacher_length
            )
        elif texts:
            raise AlignmentError("texts and ids are mixed in one batch", expected="one kind alone")
        else:
            pairs = [self._same_bytes(*sample) for sample in samples if not isinstance(sample, str)]
            aligned = [self._cut(*pair, student_length, teacher_length) for pair in pairs]
        return pad_alignments(
            [row.alignment for row in aligned],
            student_length=_row_length(student_length, [row.student for row in aligned]),
            teacher_length=_row_length(teacher_length, [row.teacher for row in aligned]),
        )

    def _same_bytes(self, student_ids: Ids, teacher_ids: Ids) -> tuple[Tokens, Tokens]:
        """Both streams with their byte ends.

        Raises:
            AlignmentError: An id is outside its vocabulary, or the bytes differ.
        """
        student = Tokens.of_stream(student_ids, self.student_tokenizer, side="student")
        teacher = Tokens.of_stream(teacher_ids, self.teacher_tokenizer, side="teacher")
        check_same_bytes(
            stream_bytes(self._student.table, student.ids, student.ends),
            stream_bytes(self._teacher.table, teacher.ids, teacher.ends),
        )
        return student, teacher

    def _cut(
        self,
        student: Tokens,
        teacher: Tokens,
        student_length: int | None,
        teacher_length: int | None,
    ) -> AlignedTokens:
        aligned = AlignedTokens(student, teacher, self._aligned(student, teacher))
        return truncate(aligned, student_length=student_length, teacher_length=teacher_length)

    def _bridged(
        self, student: Tokens, teacher: Tokens, student_bytes: bytes, teacher_bytes: bytes
    ) -> BridgedAlignment:
        pairs = self.pair_control_tokens and student.has_empty and teacher.has_empty
        alignment = align_bridged(
            student, teacher, student_bytes, teacher_bytes, self._classes if pairs else None
        )
        return self._as_spelled(alignment, student, teacher)

    def _aligned(self, student: Tokens, teacher: Tokens) -> Alignment:
        paired = None
        if self.pair_control_tokens and student.has_empty and teacher.has_empty:
            paired = self._classes.pair(student.ids, student.ends, teacher.ids, teacher.ends)
        alignment = align_byte_ends(student.ends, teacher.ends, paired=paired)
        return self._as_spelled(alignment, student, teacher)

    def _as_spelled(
        self, alignment: AnyAlignment, student: Tokens, teacher: Tokens
    ) -> AnyAlignment:
        if student.spells_text and teacher.spells_text:
            return alignment
        return as_spelled(
            alignment,
            SpelledSide(student, self._student),
            SpelledSide(teacher, self._teacher),
        )

    # Built on first use: a text is aligned without them.

    @cached_property
    def _classes(self) -> ControlClasses:
        return ControlClasses.of(self.student_tokenizer, self.teacher_tokenizer)

    @cached_property
    def _student(self) -> Spelling:
        return Spelling(self.student_tokenizer)

    @cached_property
    def _teacher(self) -> Spelling:
        return Spelling(self.teacher_tokenizer)


def _check_samples(samples: Sequence[str] | Sequence[IdPair]) -> None:
    """Refuse what would be taken for samples and is none, such as the characters of one text."""
    if isinstance(samples, str):
        raise AlignmentError(
            "a batch is one text", expected="a list of texts", fix="align_batch([text])"
        )
    for number, sample in enumerate(samples):
        if not isinstance(sample, str) and not (
            isinstance(sample, tuple | list) and len(sample) == 2
        ):
            raise AlignmentError(
                f"sample {number} of the batch cannot be aligned",
                got=type(sample).__name__,
                expected="a text, or a pair of student and teacher ids",
            )


def _row_length(length: int | None, rows: Sequence[Tokens]) -> int:
    return max([1, *(len(row.ids) for row in rows)]) if length is None else length
