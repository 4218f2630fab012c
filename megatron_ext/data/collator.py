"""Texts, conversations, or samples packed of texts, to the tensors of all models.

One teacher, as the data needs to know it.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

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
    side_batch,
)
from megatron_ext.data.side import Segment, Side
from megatron_ext.errors import ConfigError, DataError
from megatron_ext.tokenizers import MegatronTokenizerText
from megatron_ext.tokenizers.identity import tokenizer_identity
from megatron_ext.tokenizers.token_bytes import utf8


@dataclass(kw_only=True, frozen=True, slots=True)
class TeacherCTSpec:
    """A teacher of a distillation across tokenizers.

    Raises:
        ConfigError: A value that cannot be used.
        TokenizerError: The tokenizer is none of ours.
    """

    name: str
    """What its tensors are called in a batch."""

    tokenizer: MegatronTokenizerText | None = None
    """Its tokenizer; None for the student's. One that gives the same ids as the student's counts as
    the student's."""

    max_length: int | None = None
    """Most label positions of a row; the student's with None. A teacher with the student's
    tokenizer shares the student's rows, and this bounds what is put into them."""

    projection: str | os.PathLike[str] | None = None
    """File of the projection from the student's vocabulary to its own, for objectives that take
    one; None with the student's tokenizer, or for an objective that takes none."""

    weight: float = 1.0
    """Weight of its loss among the teachers'."""

    pad_id: int | None = None
    """What fills its rows; its tokenizer's padding, else its end-of-document token, with None."""

    make_sequence_length_divisible_by: int = 1
    """What its rows are filled up to a multiple of."""

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


class CrossTokenizerCollator:
    """What a ``DataLoader`` takes as ``collate_fn``.

    A record is a text (a string, or a mapping that has one under ``text_key``), a conversation (a
    ``ConversationRecord``, or a mapping that has one under ``messages_key``) or a ``PackedSample``.
    What fills more than a row is cut where all models can be cut; what is behind the cut is counted
    in ``dropped_bytes`` of the batch. Packing loses nothing instead.

    A conversation is written by each model's own template, and nothing is put around it. Labels are
    what each template trains, and chunks what the student trains of it and a teacher reads too.

    Teachers with the student's tokenizer share the student's tensors.

    It can be sent to worker processes, forked or spawned; call ``prepare`` before they start.

    Args:
        student_tokenizer: The student's tokenizer.
        student_length: Most label positions of the student's rows.
        teachers: The teachers; their names differ.
        text_key: Field of a record that holds its text.
        messages_key: Field of a record without a text that holds the turns of a conversation.
        append_eod: End each text with the end-of-document token of each side that has one.
        make_sequence_length_divisible_by: What the student's rows are filled up to a multiple of.
        segment_multiple: What each text in a packed row is filled up to a multiple of, on every
            side: twice the context-parallel size where rows are cut for that.
        row_multiple: What the longest row of a batch is filled up to a multiple of, at most to its
            side's length, and the others to its length; None: every row to the side's length.
        filled_multiple: What the rows of all sides are filled up to a multiple of besides, beyond
            their lengths too, where no text is: so that they divide over context-parallel ranks.
        cache_dir: Where tokens and alignments are kept in files, for all processes, so that each is
            made once. A student token takes about 6 bytes, and one of a teacher 5.
        cache_max_bytes: Size of the files from which on nothing is added.
        memory_cache_bytes: What each process keeps of them in memory where there is no
            ``cache_dir``: those that were used last.

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
        _check_names(teachers)
        self.teachers = tuple(teachers)
        self.text_key = text_key
        self.messages_key = messages_key
        own = tokenizer_identity(student_tokenizer)
        self._others = [spec for spec in teachers if not _shares(spec, own)]
        shared = [spec for spec in teachers if _shares(spec, own)]
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
        self._tokenizers = [student_tokenizer, *map(_tokenizer, self._others)]
        self.aligner = self._aligner(cache_dir, cache_max_bytes, memory_cache_bytes)

    @property
    def sides(self) -> tuple[Side, ...]:
        """The student, and the teachers that have another tokenizer."""
        return self.student_side, *self.teacher_sides

    def prepare(self) -> None:
        """Build the engines of all tokenizers now, for worker processes to inherit."""
        for tokenizer in self._tokenizers:
            tokenizer.prepare_engine()

    def __call__(self, records: Sequence[Record]) -> CrossTokenizerBatch:
        """The batch of B records.

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
        )

    def _aligner(self, cache_dir: str | Path | None, max_bytes: int, memory_bytes: int) -> Aligner:
        own, *others = self._tokenizers
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
        """The pieces of each row, and the bytes of what is in none."""
        contents = [self._content(r) for r in records if not isinstance(r, PackedSample)]
        capacities = [side.capacity for side in self.sides]
        aligned = zip(contents, self.aligner.align(contents), strict=True)
        rows: list[Sequence[AlignedText]] = []
        dropped_bytes = 0
        for record in records:
            if isinstance(record, PackedSample):
                rows.append(record.pieces)
                continue
            content, text = next(aligned)
            pieces = cut(text, capacities)[:1]
            whole = len(utf8(content)) if isinstance(content, str) else text.byte_count
            dropped_bytes += whole - sum(piece.byte_count for piece in pieces)
            rows.append(pieces)
        return rows, dropped_bytes

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
    """Whether a teacher reads what the student reads."""
    return spec.tokenizer is None or tokenizer_identity(spec.tokenizer) == student


def _tokenizer(spec: TeacherCTSpec) -> MegatronTokenizerText:
    assert spec.tokenizer is not None
    return spec.tokenizer


def _check_names(teachers: Sequence[TeacherCTSpec]) -> None:
    names = [spec.name for spec in teachers]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(
                "two teachers have one name", got=repr(name), fix="name each differently"
            )
