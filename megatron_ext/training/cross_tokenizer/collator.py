"""Texts, or samples packed of texts, to the tensors of the student and of every teacher."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from megatron_ext.errors import ConfigError, DataError
from megatron_ext.preprocessing.tokenizer_identity import tokenizer_identity
from megatron_ext.tokenizers import MegatronTokenizerText
from megatron_ext.tokenizers.token_bytes import utf8
from megatron_ext.training.cross_tokenizer.aligning.aligned_text import AlignedText
from megatron_ext.training.cross_tokenizer.aligning.text_aligner import TextAligner
from megatron_ext.training.cross_tokenizer.cache.cached_aligner import CachedAligner
from megatron_ext.training.cross_tokenizer.cut import cut
from megatron_ext.training.cross_tokenizer.packing.sample import PackedSample
from megatron_ext.training.cross_tokenizer.rows.batch import CrossTokenizerBatch, SideBatch
from megatron_ext.training.cross_tokenizer.rows.chunk_rows import alignment_batch, identity_batch
from megatron_ext.training.cross_tokenizer.rows.layout import Layout, Segment, side_batch
from megatron_ext.training.cross_tokenizer.rows.side import Side
from megatron_ext.training.cross_tokenizer.teacher_spec import TeacherCTSpec

Record = str | Mapping[str, Any] | PackedSample


class CrossTokenizerCollator:
    """What a ``DataLoader`` takes as ``collate_fn``.

    A record is a text (a string, or a mapping that has one under ``text_key``) or a
    ``PackedSample``. A text that fills more than a row is cut where all models can be cut; what is
    behind the cut is counted in ``dropped_bytes`` of the batch. Packing loses nothing instead.

    Teachers with the student's tokenizer share the student's tensors.

    It can be sent to worker processes, forked or spawned; call ``prepare`` before they start.

    Args:
        student_tokenizer: The student's tokenizer.
        student_length: Most label positions of the student's rows.
        teachers: The teachers; their names differ.
        text_key: Field of a record that holds its text.
        append_eod: End each text with the end-of-document token of each side that has one.
        make_sequence_length_divisible_by: What the student's rows are filled up to a multiple of.
        segment_multiple: What each text in a packed row is filled up to a multiple of, on every
            side: twice the context-parallel size where rows are cut for that.
        cache_dir: Where tokens and alignments of texts are kept, so that each is made once; None to
            keep nothing. A student token takes 5 to 6 bytes, and one of a teacher 4 to 5.
        cache_max_bytes: Size of the cache from which on nothing is added.

    Raises:
        ConfigError: A value that cannot be used, or two teachers of one name.
    """

    def __init__(
        self,
        student_tokenizer: MegatronTokenizerText,
        student_length: int,
        teachers: Sequence[TeacherCTSpec] = (),
        *,
        text_key: str = "text",
        append_eod: bool = True,
        make_sequence_length_divisible_by: int = 1,
        segment_multiple: int = 1,
        cache_dir: str | Path | None = None,
        cache_max_bytes: int = 1 << 36,
    ) -> None:
        _check_names(teachers)
        self.teachers = tuple(teachers)
        self.text_key = text_key
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
            )
            for spec in self._others
        )
        self._tokenizers = [student_tokenizer, *map(_tokenizer, self._others)]
        self.aligner = TextAligner(student_tokenizer, self._tokenizers[1:])
        if cache_dir is not None:
            self.aligner = CachedAligner(
                student_tokenizer,
                self._tokenizers[1:],
                cache_dir=cache_dir,
                max_bytes=cache_max_bytes,
            )

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
            DataError: A record has no text.
            TokenizerError: A text that a tokenizer cannot take.
        """
        rows, dropped_bytes = self._rows(records)
        byte_count = sum(piece.byte_count for piece in chain.from_iterable(rows))
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
            alignments[spec.name] = alignment_batch(
                chain.from_iterable(rows),
                index,
                sides=(self.student_side, self.teacher_sides[index]),
                layouts=(layout, its_layout),
            )
        return CrossTokenizerBatch(
            student=student,
            teachers=teachers,
            alignments=alignments,
            token_count=int(student.loss_mask.sum()),
            dropped_bytes=dropped_bytes,
        )

    def _rows(self, records: Sequence[Record]) -> tuple[list[Sequence[AlignedText]], int]:
        """The pieces of each row, and the bytes of the texts that are in none."""
        texts = [self._text(record) for record in records if not isinstance(record, PackedSample)]
        capacities = [side.capacity for side in self.sides]
        pieces = (cut(text, capacities)[:1] for text in self.aligner.align(texts))
        rows: list[Sequence[AlignedText]] = [
            record.pieces if isinstance(record, PackedSample) else next(pieces)
            for record in records
        ]
        taken = sum(
            piece.byte_count
            for record, row in zip(records, rows, strict=True)
            if not isinstance(record, PackedSample)
            for piece in row
        )
        return rows, sum(len(utf8(text)) for text in texts) - taken

    def _text(self, record: Record) -> str:
        text = record.get(self.text_key) if isinstance(record, Mapping) else record
        if isinstance(text, str):
            return text
        raise DataError(
            "a record has no text",
            got=f"keys {list(record)}" if isinstance(record, Mapping) else type(record).__name__,
            expected=f"a text under {self.text_key!r}, a string or a PackedSample",
            fix="set text_key to the field that holds the text",
        )

    def _side_batch(
        self, rows: Sequence[Sequence[AlignedText]], index: int, byte_count: int
    ) -> tuple[SideBatch, Layout]:
        side = self.sides[index]
        segments = [[_segment(piece, index) for piece in row] for row in rows]
        layout = Layout.of(segments, side)
        return side_batch(segments, side, layout, byte_count), layout


def _segment(piece: AlignedText, index: int) -> Segment:
    """One piece as the student (0) or a teacher reads it."""
    ids = piece.teachers[index - 1].ids if index else piece.student_ids
    return Segment(ids, piece.is_end)


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
