"""Two vocabularies as a projection is judged by them. V vocabularies Vs and Vt."""

from __future__ import annotations

import unicodedata
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from megatron_ext.projection.builder import build_matrix
from megatron_ext.projection.nemo.loose_entries import LooseEntries, Mask
from megatron_ext.projection.options import ProjectionOptions
from megatron_ext.projection.projection_matrix import ProjectionMatrix
from megatron_ext.tokenizers.base import ByteTokenizer
from megatron_ext.tokenizers.token_bytes import TokenBytes

PIECES = 4
"""Teacher tokens that the original recipe takes of a spelling (its ``--tokens-to-cut``)."""


@dataclass(frozen=True, eq=False)
class TokenizerPair:
    """A student's and a teacher's tokenizer, and what follows from them."""

    student: ByteTokenizer
    teacher: ByteTokenizer

    @property
    def shape(self) -> tuple[int, int]:
        """(Vs, Vt) without padding."""
        return self.student.vocab_size, self.teacher.vocab_size

    @cached_property
    def student_bytes(self) -> list[bytes | None]:
        """[Vs]"""
        return TokenBytes.of(self.student).tokens()

    @cached_property
    def teacher_bytes(self) -> list[bytes | None]:
        """[Vt]"""
        return TokenBytes.of(self.teacher).tokens()

    @cached_property
    def retokenized(self) -> ProjectionMatrix:
        """The projection that we build for the pair, of at most ``PIECES`` pieces a row."""
        return build_matrix(self.student, self.teacher, ProjectionOptions(top_k=PIECES))

    @cached_property
    def is_ordinary(self) -> Mask:
        """[Vs] tokens with bytes."""
        return np.array([bool(token) for token in self.student_bytes], dtype=np.bool_)

    def is_same_token(self, entries: LooseEntries) -> Mask:
        """[n] entries whose column is the student's own token, by bytes or by role."""
        exact = self.retokenized.is_exact_row
        column = np.full(self.shape[0], -1)
        column[exact] = self.retokenized.indices[self.retokenized.indptr[:-1][exact]]
        # Several ids of a vocabulary may have the same bytes; the lowest stands for them.
        lowest: dict[bytes, int] = {}
        same = np.array(
            [lowest.setdefault(t, i) if t else i for i, t in enumerate(self.teacher_bytes)]
        )
        wanted = column[entries.rows]
        mask: Mask = (wanted >= 0) & (same[wanted] == same[entries.columns])
        return mask

    def is_on_support(self, entries: LooseEntries) -> Mask:
        """[n] entries of which one token holds the other.

        That is: the bytes of one are in those of the other (a piece, or a word that the student
        spells with the row's token); the same for their texts in NFKC without case, for tokenizers
        that normalise; or neither is text: control tokens, and names in angle brackets.
        """
        student, teacher = self.student_bytes, self.teacher_bytes
        related = np.fromiter(
            (
                _is_related(student[s], teacher[t]) or self._are_marks(s, t)
                for s, t in zip(entries.rows.tolist(), entries.columns.tolist(), strict=True)
            ),
            dtype=np.bool_,
            count=entries.entry_count,
        )
        return related | self._is_spelling(entries)

    def _is_spelling(self, entries: LooseEntries) -> Mask:
        """[n] entries that our own projection of the pair has, too."""
        own = LooseEntries.of(self.retokenized)
        stop = self.shape[1]
        return np.isin(entries.rows * stop + entries.columns, own.rows * stop + own.columns)

    def _are_marks(self, student_id: int, teacher_id: int) -> bool:
        if self.student_bytes[student_id] is None and self.teacher_bytes[teacher_id] is None:
            return True
        names = (self.student.id_to_token(student_id), self.teacher.id_to_token(teacher_id))
        return all(name.startswith("<") and name.endswith(">") for name in names)


def _is_related(student: bytes | None, teacher: bytes | None) -> bool:
    if not student or not teacher:
        return False
    if student in teacher or teacher in student:
        return True
    try:
        first, second = (_folded(token.decode()) for token in (student, teacher))
    except UnicodeDecodeError:
        return False
    return bool(first and second) and (first in second or second in first)


def _folded(text: str) -> str:
    return unicodedata.normalize("NFKC", text).casefold().strip()
