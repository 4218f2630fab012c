"""Windows of text, tokenized by both models. T tokens, N windows."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_ext.alignment.byte_alignment import align_byte_ends
from megatron_ext.alignment.control_pairs import stand_for_the_same
from megatron_ext.alignment.coverage import ChunkCounts
from megatron_ext.alignment.window import cut_windows
from megatron_ext.constants import NO_CHUNK
from megatron_ext.errors import DataError
from megatron_ext.tokenizers import MegatronTokenizerText

Ids = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class TokenSequence:
    """One model's view of a window, led by a token that is read but never predicted."""

    ids: Ids
    """[T + 1]"""

    chunk_id: Ids
    """[T + 1] chunk of each token, ``NO_CHUNK`` where it is in none."""

    text_bytes: NDArray[np.int64]
    """[T + 1] bytes of the text that each token stands for; 0 for a control token."""

    def head(self, count: int) -> TokenSequence:
        """The first ``count`` tokens."""
        return TokenSequence(self.ids[:count], self.chunk_id[:count], self.text_bytes[:count])


@dataclass(frozen=True, slots=True)
class Window:
    """The same bytes for both models."""

    student: TokenSequence
    teacher: TokenSequence | None
    byte_count: int


class WindowDataset(Sequence[Window]):
    """Documents cut at common byte boundaries into windows that fit both models.

    Args:
        documents: Texts.
        student_tokenizer: Tokenizer of the student.
        student_length: Most predicted tokens in a window, for the student.
        teacher_tokenizer: Tokenizer of the teacher; None to serve the student alone.
        teacher_length: The same limit for the teacher.
        append_eod: End each document with the end-of-document token, where a side has one.
        pair_eod: Make these two tokens a chunk, where they stand for the same, by the rule of the
            projection. That a document ends here is something the teacher predicts and can teach;
            without it, labels alone do.

    Attributes:
        byte_count: Bytes in all windows.
        dropped_bytes: Bytes in none, because one chunk exceeds a model's length.

    Raises:
        DataError: No window fits.
    """

    def __init__(
        self,
        documents: Iterable[str],
        *,
        student_tokenizer: MegatronTokenizerText,
        student_length: int,
        teacher_tokenizer: MegatronTokenizerText | None = None,
        teacher_length: int | None = None,
        append_eod: bool = True,
        pair_eod: bool = True,
    ) -> None:
        self._student = _Side(student_tokenizer, append_eod)
        self._teacher = _Side(teacher_tokenizer, append_eod) if teacher_tokenizer else None
        self._pairs_eod = pair_eod and _end_alike(self._student, self._teacher)
        self._lengths = (student_length, teacher_length or student_length)
        self._windows: list[Window] = []
        self.dropped_bytes = 0
        self._chunk_counts = ChunkCounts()
        self._text_hash = hashlib.sha256()
        for document in documents:
            self._add(document)
        self.byte_count = sum(window.byte_count for window in self._windows)
        if not self._windows:
            raise DataError(
                "no text fits the models' sequence lengths",
                got=f"seq_length {self._lengths[0]} and {self.dropped_bytes} bytes dropped",
                fix="raise seq_length",
            )

    def __len__(self) -> int:
        return len(self._windows)

    def __getitem__(self, index: int) -> Window:  # type: ignore[override]
        return self._windows[index]

    @property
    def chunk_counts(self) -> ChunkCounts | None:
        """How the two tokenizations relate over all windows; None without a teacher."""
        return self._chunk_counts if self._teacher else None

    def summary(self) -> dict[str, Any]:
        """What a user should know of the data before training on it; plain values."""
        return {
            "sha256": self._text_hash.hexdigest(),
            "windows": len(self),
            "bytes": self.byte_count,
            "dropped_bytes": self.dropped_bytes,
            "chunk_counts": asdict(self.chunk_counts) if self.chunk_counts else None,
            "chunk_shares": self.chunk_counts.shares() if self.chunk_counts else None,
        }

    def padded_to_multiple(self, multiple: int) -> list[Window]:
        """Every window once, then windows that predict nothing up to a multiple of ``multiple``."""
        missing = -len(self._windows) % multiple
        return self._windows + [_blank(self._windows[0])] * missing

    def _add(self, document: str) -> None:
        self._text_hash.update(document.encode() + b"\0")
        student_ids, student_ends = self._student.encode(document)
        teacher_ids, teacher_ends = (
            self._teacher.encode(document) if self._teacher else (None, None)
        )
        windows = cut_windows(
            student_ends,
            teacher_ends,
            student_length=self._lengths[0],
            teacher_length=self._lengths[1],
        )
        self.dropped_bytes += windows.dropped_bytes
        for student, teacher, (start, stop) in zip(
            windows.student_bounds, windows.teacher_bounds, windows.byte_bounds, strict=True
        ):
            ends = _slice_ends(student_ends, student, start)
            if teacher_ids is None or teacher_ends is None or self._teacher is None:
                self._windows.append(
                    Window(
                        self._student.sequence(student_ids, student, ends), None, int(stop - start)
                    )
                )
                continue
            other_ends = _slice_ends(teacher_ends, teacher, start)
            ends_document = student[1] == len(student_ids) and teacher[1] == len(teacher_ids)
            last = np.array([len(ends) - 1]), np.array([len(other_ends) - 1])
            alignment = align_byte_ends(
                ends, other_ends, paired=last if self._pairs_eod and ends_document else None
            )
            self._chunk_counts += ChunkCounts.of(alignment)
            self._windows.append(
                Window(
                    self._student.sequence(student_ids, student, ends, alignment.student_chunk_id),
                    self._teacher.sequence(
                        teacher_ids, teacher, other_ends, alignment.teacher_chunk_id
                    ),
                    int(stop - start),
                )
            )


class _Side:
    """One tokenizer and its leading token."""

    def __init__(self, tokenizer: MegatronTokenizerText, append_eod: bool) -> None:
        self.tokenizer = tokenizer
        self._lead = tokenizer.bos if tokenizer.bos is not None else tokenizer.eod
        self.eod = tokenizer.eod if append_eod else None

    def encode(self, document: str) -> tuple[Ids, NDArray[np.int64]]:
        ids, ends = self.tokenizer.encode_with_byte_ends(document)
        if self.eod is None or not len(ids):
            return ids, ends
        return np.append(ids, np.int32(self.eod)), np.append(ends, ends[-1])

    def sequence(
        self,
        ids: Ids,
        bounds: NDArray[np.int64],
        ends: NDArray[np.int64],
        chunk_id: Ids | None = None,
    ) -> TokenSequence:
        """The tokens in ``bounds`` behind the leading token.

        Without a BOS or EOD to lead with, the first token leads and is not predicted itself.
        """
        window = ids[bounds[0] : bounds[1]]
        chunks = np.full(len(window), NO_CHUNK, np.int32) if chunk_id is None else chunk_id
        text_bytes = np.diff(ends, prepend=0)
        if self._lead is None:
            return TokenSequence(window, chunks, text_bytes)
        return TokenSequence(
            np.insert(window, 0, self._lead),
            np.insert(chunks, 0, NO_CHUNK),
            np.insert(text_bytes, 0, 0),
        )


def _end_alike(student: _Side, teacher: _Side | None) -> bool:
    """Whether both sides end a document with tokens that stand for the same."""
    if teacher is None or student.eod is None or teacher.eod is None:
        return False
    return stand_for_the_same(student.tokenizer, teacher.tokenizer, student.eod, teacher.eod)


def _blank(window: Window) -> Window:
    """The leading token alone, with nothing to predict."""
    return Window(
        student=window.student.head(1),
        teacher=window.teacher.head(1) if window.teacher else None,
        byte_count=0,
    )


def _slice_ends(
    ends: NDArray[np.int64], bounds: NDArray[np.int64], start: int
) -> NDArray[np.int64]:
    return ends[bounds[0] : bounds[1]] - start
