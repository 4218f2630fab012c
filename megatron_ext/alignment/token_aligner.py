"""Aligner of texts or id streams of two tokenizers. D texts, N and M tokens of all of them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from megatron_ext.alignment.alignment import Alignment
from megatron_ext.alignment.byte_alignment import ByteEnds, align_byte_ends
from megatron_ext.alignment.chunk_places import Marks, alignment_of, chunk_marks, outside
from megatron_ext.alignment.control_pairs import ControlClasses
from megatron_ext.alignment.spelling import (
    AlignedTokens,
    AnyAlignment,
    Ids,
    SpelledSide,
    Tokens,
    as_spelled,
    check_same_bytes,
    stream_bytes,
)
from megatron_ext.alignment.text_alignment import BridgedAlignment, align_bridged
from megatron_ext.alignment.text_tokens import TextTokenizer, TextTokens
from megatron_ext.alignment.window import truncate
from megatron_ext.conversation.chat_output import refuse_foreign
from megatron_ext.errors import AlignmentError, arguments_elsewhere
from megatron_ext.tokenizers.base import ByteTokenizer
from megatron_ext.tokenizers.token_bytes import utf8

if TYPE_CHECKING:
    from megatron_ext.alignment.batch import AlignmentBatch

IdPair = tuple[Ids, Ids]


@arguments_elsewhere(
    {
        "student_tokenizer_name": "is student_tokenizer=, MegatronTokenizer.from_pretrained(name)",
        "teacher_tokenizer_name": "is teacher_tokenizer=, MegatronTokenizer.from_pretrained(name)",
        "projection_matrix_path": "is SparseProjection.load(path), an object of its own",
        "max_comb_len": "is not needed: chunks are exact, of any length",
    },
    project="NeMo RL",
)
class TokenAligner:
    """Aligns the tokens that a student and a teacher make of the same text.

    All paths from texts to chunks go through it: runs, audits, pages and batches.

    One rule holds for control tokens. Two that cover no byte, stand at the same byte of the same
    text and have the same meaning (by role, else by name) are a chunk of their own; any other is in
    no chunk. The rule matters for ids that a caller passes: text becomes a control token only if a
    tokenizer is told to parse them, and the token then covers the text that spells it. In
    conversations the stop tokens behind one answer are paired too (``align_conversation``).

    Args:
        student_tokenizer: The student's tokenizer, or the adapter of its library.
        teacher_tokenizer: The teacher's tokenizer, alike.
        pair_control_tokens: Apply the rule; if false, control tokens are in no chunk.

    Attributes:
        student: Encodes texts with the student's tokenizer.
        teacher: Encodes texts with the teacher's.

    Raises:
        TokenizerError: A tokenizer is not one of this package.
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
        self.student = TextTokenizer(student_tokenizer)
        self.teacher = TextTokenizer(teacher_tokenizer)

    def align(self, text: str | Ids, teacher_ids: Ids | None = None) -> Alignment:
        """Tokenize ``text`` with both and align the tokens; special tokens in it are text.

        With two streams of ids, as NeMo RL's ``align`` takes them, it is ``align_ids``.

        Raises:
            AlignmentError: Ids of one side alone, or a text with ids.
        """
        if isinstance(text, str) and teacher_ids is None:
            return self._each([text])[0].alignment
        if isinstance(text, str) or teacher_ids is None:
            raise AlignmentError(
                "align takes one text, or the ids of both sides",
                got="a text and ids" if isinstance(text, str) else "one stream of ids",
                fix="align(text), or align_ids(student_ids, teacher_ids)",
            )
        return self.align_ids(text, teacher_ids)

    def align_joined(self, student: TextTokens, teacher: TextTokens) -> tuple[Marks, Marks]:
        """The chunks of texts that both have encoded, as marks of both sides [N], [M].

        All texts are aligned at once, as one long text in which each ends on a common boundary.
        Those that a tokenizer changes are aligned one at a time, with what their tokens spell;
        where both sides have control tokens, so are all.

        Args:
            student: D texts, as ``student.encode`` gives them.
            teacher: The same texts, as ``teacher.encode`` gives them.
        """
        # Some tokenizers make no token of white space: then none of theirs ends with the text.
        together = (student.counts > 0) & (teacher.counts > 0)
        together |= np.diff(student.byte_offsets) == 0
        apart = {*student.changed, *teacher.changed}
        together[list(apart)] = False
        rest = student.of_texts(together), teacher.of_texts(together)
        if self._has_pairs(rest[0].joined, rest[1].joined):
            apart.update(np.flatnonzero(together).tolist())
        rest_marks = chunk_marks(align_byte_ends(rest[0].ends, rest[1].ends))
        if together.all() and not apart:
            return rest_marks
        marks = outside(len(student.ids)), outside(len(teacher.ids))
        marks[0][np.repeat(together, student.counts)] = rest_marks[0]
        marks[1][np.repeat(together, teacher.counts)] = rest_marks[1]
        for index in apart:
            alignment = self._aligned(student.text(index), teacher.text(index))
            slices = student.tokens_of(index), teacher.tokens_of(index)
            marks[0][slices[0]], marks[1][slices[1]] = chunk_marks(alignment)
        return marks

    def align_ids(self, student_ids: Ids, teacher_ids: Ids, *, bridge: bool = False) -> Alignment:
        """Align two streams that decode to the same bytes, control tokens aside.

        Args:
            student_ids: [Ts], for example a generated answer.
            teacher_ids: [Tt]
            bridge: Accept streams of different bytes, as tokenizers that normalise make them:
                chunks are made within equal ranges, and the result is a ``BridgedAlignment``, which
                reports the unaligned spans.

        Raises:
            AlignmentError: An id is outside its vocabulary, or the streams decode to different
                bytes and ``bridge`` is false.
        """
        if not bridge:
            return self._of_ids(student_ids, teacher_ids).alignment
        streams = self._streams(student_ids, teacher_ids)
        return self._bridged(*streams, *self._stream_bytes(*streams))

    def align_texts(self, student_text: str, teacher_text: str) -> BridgedAlignment:
        """Align two texts that differ, each tokenized by its side, within their equal ranges.

        Raises:
            TokenizerError: A text that a tokenizer cannot take.
        """
        return self._bridged(
            self.student.encode([student_text]).text(0),
            self.teacher.encode([teacher_text]).text(0),
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
        student_tokens = Tokens.checked(*student, self.student_tokenizer.vocab_size, side="student")
        teacher_tokens = Tokens.checked(*teacher, self.teacher_tokenizer.vocab_size, side="teacher")
        return self._aligned(student_tokens, teacher_tokens)

    def align_each(
        self,
        texts: Sequence[str],
        *,
        student_length: int | None = None,
        teacher_length: int | None = None,
    ) -> list[AlignedTokens]:
        """Tokenize D texts with both, as batches, and align each.

        Args:
            texts: D texts; special tokens in them are text.
            student_length: Most student tokens of a text; both sides of a longer one are cut at the
                last common boundary that fits. None for any number.
            teacher_length: Most teacher tokens of a text.

        Raises:
            AlignmentError: A length below 1.
            TokenizerError: A text that a tokenizer cannot take.
        """
        return [
            truncate(aligned, student_length=student_length, teacher_length=teacher_length)
            for aligned in self._each(texts)
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
            aligned = [
                truncate(
                    self._of_ids(*sample),
                    student_length=student_length,
                    teacher_length=teacher_length,
                )
                for sample in samples
                if not isinstance(sample, str)
            ]
        return pad_alignments(
            [row.alignment for row in aligned],
            student_length=_row_length(student_length, [row.student for row in aligned]),
            teacher_length=_row_length(teacher_length, [row.teacher for row in aligned]),
        )

    def _each(self, texts: Sequence[str]) -> list[AlignedTokens]:
        """All tokens of each of D texts."""
        raws = [utf8(text) for text in texts]
        student, teacher = self.student.encode(texts, raws), self.teacher.encode(texts, raws)
        student_marks, teacher_marks = self.align_joined(student, teacher)
        alignments = (
            alignment_of(student_marks[student_slice], teacher_marks[teacher_slice])
            for student_slice, teacher_slice in zip(student.slices, teacher.slices, strict=True)
        )
        return [
            AlignedTokens(student.text(index), teacher.text(index), alignment)
            for index, alignment in enumerate(alignments)
        ]

    def _of_ids(self, student_ids: Ids, teacher_ids: Ids) -> AlignedTokens:
        student, teacher = self._streams(student_ids, teacher_ids)
        check_same_bytes(*self._stream_bytes(student, teacher))
        return AlignedTokens(student, teacher, self._aligned(student, teacher))

    def _streams(self, student_ids: Ids, teacher_ids: Ids) -> tuple[Tokens, Tokens]:
        """Both streams with their byte ends."""
        return (
            Tokens.of_stream(student_ids, self.student_tokenizer, side="student"),
            Tokens.of_stream(teacher_ids, self.teacher_tokenizer, side="teacher"),
        )

    def _stream_bytes(self, student: Tokens, teacher: Tokens) -> tuple[bytes, bytes]:
        return (
            stream_bytes(self.student.spelling.table, student.ids, student.ends),
            stream_bytes(self.teacher.spelling.table, teacher.ids, teacher.ends),
        )

    def _bridged(
        self, student: Tokens, teacher: Tokens, student_bytes: bytes, teacher_bytes: bytes
    ) -> BridgedAlignment:
        classes = self._classes if self._has_pairs(student, teacher) else None
        alignment = align_bridged(student, teacher, student_bytes, teacher_bytes, classes)
        return self._as_spelled(alignment, student, teacher)

    def _aligned(self, student: Tokens, teacher: Tokens) -> Alignment:
        paired = None
        if self._has_pairs(student, teacher):
            paired = self._classes.pair(student.ids, student.ends, teacher.ids, teacher.ends)
        alignment = align_byte_ends(student.ends, teacher.ends, paired=paired)
        return self._as_spelled(alignment, student, teacher)

    def _has_pairs(self, student: Tokens, teacher: Tokens) -> bool:
        """Whether both sides have control tokens that may be paired."""
        return self.pair_control_tokens and all(
            side.spelling.table.is_control[tokens.ids[tokens.empty]].any()
            for side, tokens in ((self.student, student), (self.teacher, teacher))
        )

    def _as_spelled(
        self, alignment: AnyAlignment, student: Tokens, teacher: Tokens
    ) -> AnyAlignment:
        if student.spells_text and teacher.spells_text:
            return alignment
        return as_spelled(
            alignment,
            SpelledSide(student, self.student.spelling),
            SpelledSide(teacher, self.teacher.spelling),
        )

    @cached_property
    def _classes(self) -> ControlClasses:
        # Built on first use: aligning texts does not need them.
        return ControlClasses.of(self.student_tokenizer, self.teacher_tokenizer)


def _check_samples(samples: Sequence[str] | Sequence[IdPair]) -> None:
    """Refuse a single text, whose characters would be taken for samples, and other types."""
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
