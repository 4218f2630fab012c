"""``CrossTokenizerCollator``: texts, conversations or packed samples to the tensors of a batch."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from numbers import Integral
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_ext.conversation.chat_output import refuse_foreign
from megatron_ext.conversation.records import ConversationRecord, conversation_record
from megatron_ext.data.aligner import (
    AlignedText,
    Aligner,
    Content,
    ContentAligner,
    PackedSample,
    byte_count_of,
    cut,
)
from megatron_ext.data.alignment_cache import CachedAligner, MemoryStore, RecordStore, cache_folder
from megatron_ext.data.batch import (
    CrossTokenizerBatch,
    Layout,
    SideBatch,
    alignment_batch,
    identity_batch,
    sampled_log_probs,
    side_batch,
)
from megatron_ext.data.side import Segment, Side
from megatron_ext.errors import ConfigError, DataError, UntrainedError, arguments_elsewhere
from megatron_ext.tokenizers import MegatronTokenizerText
from megatron_ext.tokenizers.identity import tokenizer_identity
from megatron_ext.tokenizers.token_bytes import utf8

if TYPE_CHECKING:
    import torch


_EXACT = "is not needed: alignments are exact, without a search"


@arguments_elsewhere(
    {
        "teacher_tokenizer_name": "is tokenizer=, a tokenizer: MegatronTokenizer.from_pretrained()",
        "student_tokenizer_name": "is student_tokenizer= of CrossTokenizerCollator, a tokenizer",
        "projection_matrix_path": "is projection=",
        "max_teacher_len": "is max_length=",
        "learnable": "is loss.learned_projection of a run, or LearnedProjection",
        "exact_token_match_only": "is an option of the objective projected_kl",
        "projection_matrix_multiplier": "is not needed: a factor cancels in the loss",
        "project_teacher_to_student": "is not needed: the objective mined does so by itself",
        "use_sparse_format": "is not needed: projections are sparse",
        **dict.fromkeys(("max_comb_len", "dp_chunk_size", "use_align_fast"), _EXACT),
    },
    project="NeMo RL",
    positional="is name=, and every other field a keyword too",
)
@dataclass(kw_only=True, frozen=True, slots=True)
class TeacherCTSpec:
    """Specification of one teacher for the data: tokenizer, lengths, projection and weight.

    Raises:
        ConfigError: A value that cannot be used.
        TokenizerError: The tokenizer is none of ours.
    """

    name: str
    """Name of its tensors in a batch."""

    tokenizer: MegatronTokenizerText | None = None
    """Tokenizer; None for the student's. One that gives the same ids counts as the student's."""

    max_length: int | None = None
    """Most label positions of a row; None for the student's. A teacher with the student's tokenizer
    shares the student's rows, whose length this bounds too."""

    projection: str | os.PathLike[str] | None = None
    """File of the projection from the student's to the teacher's vocabulary; None with the
    student's tokenizer, or for an objective without a projection."""

    weight: float = 1.0
    """Weight of the teacher's loss in the sum over teachers."""

    pad_id: int | None = None
    """Id of the padding; None for the tokenizer's padding, else its end-of-document token."""

    make_sequence_length_divisible_by: int = 1
    """Multiple that rows are padded to."""

    def __post_init__(self) -> None:
        if not self.name or not self.name.isprintable():
            raise self._error("name", repr(self.name), "a name that can be printed")
        if self.tokenizer is not None:
            refuse_foreign(self.tokenizer, "encode_with_byte_ends")
        if self.max_length is not None and self.max_length < 1:
            raise self._error("max_length", self.max_length, ">= 1, or None for the student's")
        if not (math.isfinite(self.weight) and self.weight >= 0):
            raise self._error("weight", self.weight, "a finite number, >= 0")
        if self.make_sequence_length_divisible_by < 1:
            divisor = self.make_sequence_length_divisible_by
            raise self._error("make_sequence_length_divisible_by", divisor, ">= 1")
        if self.pad_id is not None and self.pad_id < 0:
            raise self._error("pad_id", self.pad_id, "an id, or None for the tokenizer's")
        if self.tokenizer is None and self.projection is not None:
            raise ConfigError(
                "a teacher with the student's tokenizer needs no projection",
                got=os.fspath(self.projection),
                fix="leave projection out, or name the teacher's tokenizer",
                where=f"teacher {self.name}",
            )

    def _error(self, name: str, got: object, expected: str) -> ConfigError:
        return ConfigError(
            f"{name} cannot be used", got=got, expected=expected, where=f"teacher {self.name!r}"
        )


Record = str | Mapping[str, Any] | ConversationRecord | PackedSample


@arguments_elsewhere(
    {
        "teacher_ct_specs": "is teachers=, a list of TeacherCTSpec",
        "teacher_tokenizers": "is teachers=, a list of TeacherCTSpec with a tokenizer each",
        "aligners": "is not needed: it aligns by itself",
        "fallback_student_tokenizer_name": "is student_tokenizer=, a tokenizer",
        "ctx_length_student": "is student_length=",
        "ctx_length_teachers": "is max_length= of each TeacherCTSpec",
        "pad_token_id": "is the tokenizer's padding; of a teacher, pad_id= of its TeacherCTSpec",
        "make_seq_div_by_student": "is make_sequence_length_divisible_by=",
        "make_seq_div_by_teachers": "is make_sequence_length_divisible_by= of each TeacherCTSpec",
    },
    project="NeMo RL",
)
class CrossTokenizerCollator:
    """``collate_fn`` of a ``DataLoader``: records to a ``CrossTokenizerBatch``.

    A record is a text (a string, or a mapping with one under ``text_key``), a conversation (a
    ``ConversationRecord``, or a mapping with one under ``messages_key``) or a ``PackedSample``. A
    record longer than a row is cut where all models can be cut, and the rest is counted in the
    batch's ``dropped_bytes``; packing (``PackedTextDataset``) keeps it.

    A conversation is rendered by each model's own template, without BOS or EOD added. Labels are
    the tokens each template trains; chunks cover student-trained tokens that a teacher reads too.

    Teachers with the student's tokenizer share the student's tensors.

    Picklable and safe to fork; call ``prepare`` before starting worker processes.

    Args:
        student_tokenizer: The student's tokenizer.
        student_length: Most label positions of the student's rows.
        teachers: The teachers, with distinct names.
        text_key: Field of a record that holds its text.
        messages_key: Field of a record without a text that holds the turns of a conversation.
        append_eod: End each text with the end-of-document token of each side that has one.
        make_sequence_length_divisible_by: Multiple that the student's rows are padded to.
        segment_multiple: Multiple that each text in a packed row is padded to, on every side: twice
            the context-parallel size under context parallelism.
        row_multiple: Multiple that the longest row of a batch is padded to, up to the length of the
            side; the other rows get the same length. None: every row has the length of the side.
        filled_multiple: Multiple that rows of all sides are padded to in addition, if need be
            beyond their length, so that they divide over context-parallel ranks.
        cache_dir: Folder of files that cache tokens and alignments for all processes. A student
            token takes about 6 bytes, a teacher token 5.
        cache_max_bytes: Size of the files above which nothing is added.
        memory_cache_bytes: Without a ``cache_dir``, size of each process's cache in memory of the
            most recently used texts.

    Attributes:
        tokenizers: Those of ``sides``.

    Raises:
        ConfigError: A value that cannot be used, or two teachers of one name.
        TokenizerError: The student's tokenizer is none of ours.
    """

    def __init__(
        self,
        student_tokenizer: MegatronTokenizerText,
        student_length: int,
        teachers: Sequence[TeacherCTSpec] = (),
        *,
        text_key: str = "text",
        messages_key: str = "messages",
        append_eod: bool = True,
        make_sequence_length_divisible_by: int = 1,
        segment_multiple: int = 1,
        row_multiple: int | None = None,
        filled_multiple: int = 1,
        cache_dir: str | Path | None = None,
        cache_max_bytes: int = 1 << 36,
        memory_cache_bytes: int = 0,
    ) -> None:
        refuse_foreign(student_tokenizer, "encode_with_byte_ends")
        _check_length(student_length)
        _check_teachers(teachers)
        self.teachers = tuple(teachers)
        self.text_key = text_key
        self.messages_key = messages_key
        student = tokenizer_identity(student_tokenizer)
        self._others = [spec for spec in teachers if not _shares(spec, student)]
        shared = [spec for spec in teachers if _shares(spec, student)]
        lengths = [student_length, *(spec.max_length or student_length for spec in shared)]
        self.student_side = Side.of(
            student_tokenizer,
            name="the student",
            length=min(lengths),
            length_multiple=make_sequence_length_divisible_by,
            segment_multiple=segment_multiple,
            append_eod=append_eod,
            pad_id=None,
            row_multiple=row_multiple,
            filled_multiple=filled_multiple,
        )
        self.teacher_sides = tuple(
            Side.of(
                _tokenizer(spec),
                name=f"teacher {spec.name}",
                length=spec.max_length or student_length,
                length_multiple=spec.make_sequence_length_divisible_by,
                segment_multiple=segment_multiple,
                append_eod=append_eod,
                pad_id=spec.pad_id,
                row_multiple=row_multiple,
                filled_multiple=filled_multiple,
            )
            for spec in self._others
        )
        self.tokenizers = (student_tokenizer, *map(_tokenizer, self._others))
        self.aligner = self._aligner(cache_dir, cache_max_bytes, memory_cache_bytes)

    @property
    def sides(self) -> tuple[Side, ...]:
        """The student, and the teachers with another tokenizer."""
        return self.student_side, *self.teacher_sides

    def side_index(self, teacher: str) -> int:
        """Index in ``sides`` of what a teacher reads: 0, the student's, with its tokenizer."""
        names = [spec.name for spec in self._others]
        return 1 + names.index(teacher) if teacher in names else 0

    def prepare(self) -> None:
        """Build the engines of all tokenizers, for worker processes to inherit."""
        for tokenizer in self.tokenizers:
            tokenizer.prepare_engine()

    def __call__(self, records: Sequence[Record]) -> CrossTokenizerBatch:
        """Collate B records; the row of a conversation of which nothing is trained is empty.

        Raises:
            DataError: A record has no text, or the batch is one text.
            TokenizerError: A text that a tokenizer cannot take.
        """
        if isinstance(records, str):
            raise DataError("a batch is one text", expected="a list of records", fix="[text]")
        rows, dropped_bytes = self._rows(records)
        pieces = list(chain.from_iterable(rows))
        byte_count = byte_count_of(pieces)
        student, layout = self._side_batch(rows, 0, byte_count)
        teachers, alignments = {}, {}
        identity = None
        for spec in self.teachers:
            if spec not in self._others:
                identity = identity or identity_batch(student.labels)
                teachers[spec.name], alignments[spec.name] = student, identity
                continue
            index = self._others.index(spec)
            teachers[spec.name], its_layout = self._side_batch(rows, index + 1, byte_count)
            alignments[spec.name] = alignment_batch(pieces, index, layout, its_layout)
        return CrossTokenizerBatch(
            student=student,
            teachers=teachers,
            alignments=alignments,
            token_count=int(student.loss_mask.sum()),
            dropped_bytes=dropped_bytes,
            sampled_log_probs=sampled_log_probs(pieces, layout),
            sources=tuple(
                record.source if isinstance(record, PackedSample) else 0 for record in records
            ),
        )

    def tensors(self, records: Sequence[Record]) -> dict[str, torch.Tensor]:
        """Collate B records to a mapping of tensors, see ``CrossTokenizerBatch.tensors``.

        The ``data_collator`` of a ``transformers.Trainer`` and of what derives from it.

        Raises:
            DataError: A record has no text, or the batch is one text.
            TokenizerError: A text that a tokenizer cannot take.
        """
        return self(records).tensors()

    def _aligner(self, cache_dir: str | Path | None, max_bytes: int, memory_bytes: int) -> Aligner:
        own, *others = self.tokenizers
        aligner = ContentAligner(own, others)
        if cache_dir is not None:
            folder = cache_folder(cache_dir, own, others)
            store = RecordStore(folder, max_bytes=max_bytes)
            return CachedAligner(aligner, store, teacher_count=len(others))
        if memory_bytes:
            kept = MemoryStore(memory_bytes)
            return CachedAligner(aligner, kept, teacher_count=len(others))
        return aligner

    def _rows(self, records: Sequence[Record]) -> tuple[list[Sequence[AlignedText]], int]:
        """The pieces of each row, and the bytes that are in none."""
        contents = [self._content(r) for r in records if not isinstance(r, PackedSample)]
        capacities = [side.capacity for side in self.sides]
        aligned = zip(contents, self._aligned(contents), strict=True)
        rows: list[Sequence[AlignedText]] = []
        dropped_bytes = 0
        for record in records:
            if isinstance(record, PackedSample):
                rows.append(record.pieces)
                continue
            content, text = next(aligned)
            if text is None:
                rows.append([])
                continue
            pieces = cut(text, capacities)[:1]
            whole = len(utf8(content)) if isinstance(content, str) else text.byte_count
            dropped_bytes += whole - sum(piece.byte_count for piece in pieces)
            rows.append(pieces)
        return rows, dropped_bytes

    def _aligned(self, contents: Sequence[Content]) -> Sequence[AlignedText | None]:
        """The aligned texts; None for conversations of which nothing is trained."""
        try:
            return self.aligner.align(contents)
        except UntrainedError:
            if len(contents) == 1:
                return [None]
            return [text for content in contents for text in self._aligned([content])]

    def _content(self, record: str | Mapping[str, Any] | ConversationRecord) -> Content:
        if isinstance(record, str | ConversationRecord):
            return record
        if isinstance(record, Mapping):
            text = record.get(self.text_key)
            if isinstance(text, str):
                return text
            if self.messages_key in record:
                return conversation_record(record, key=self.messages_key)
        raise DataError(
            "a record has no text and no conversation",
            got=f"keys {list(record)}" if isinstance(record, Mapping) else type(record).__name__,
            expected=f"a text under {self.text_key!r}, turns under {self.messages_key!r}, a string,"
            " a ConversationRecord or a PackedSample",
            fix="set text_key to the field that holds the text, or messages_key",
        )

    def _side_batch(
        self, rows: Sequence[Sequence[AlignedText]], index: int, byte_count: int
    ) -> tuple[SideBatch, Layout]:
        side = self.sides[index]
        layout = Layout.of(
            [[Segment.of(piece, index, side) for piece in row] for row in rows], side
        )
        batch = side_batch(layout, pad=side.pad, byte_count=byte_count, position_count=side.length)
        return batch, layout


def _shares(spec: TeacherCTSpec, student: Mapping[str, str]) -> bool:
    """Whether a teacher reads the student's ids."""
    return spec.tokenizer is None or tokenizer_identity(spec.tokenizer) == student


def _tokenizer(spec: TeacherCTSpec) -> MegatronTokenizerText:
    assert spec.tokenizer is not None
    return spec.tokenizer


def _check_length(length: object) -> None:
    if not isinstance(length, Integral):
        raise ConfigError(
            "student_length is not a number",
            got=type(length).__name__,
            expected="the most label positions of the student's rows",
            fix="pass (student_tokenizer, student_length, [TeacherCTSpec(...)])",
        )


def _check_teachers(teachers: Sequence[TeacherCTSpec]) -> None:
    for spec in teachers:
        if not isinstance(spec, TeacherCTSpec):
            raise ConfigError(
                "a teacher has another type",
                got=type(spec).__name__,
                expected="TeacherCTSpec",
                fix="pass [TeacherCTSpec(name=..., tokenizer=...)]",
            )
    names = [spec.name for spec in teachers]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(
                "two teachers have one name", got=repr(name), fix="name each differently"
            )
