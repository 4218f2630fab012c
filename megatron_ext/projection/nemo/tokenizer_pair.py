"""Pair of tokenizers that a projection is checked against, and detection of a file's filler column.

The original builder overwrites the last slot of every row by 0.2 and normalises the row (its "scale
trick"). In a row of fewer than K pieces that slot is no piece but an arbitrary column, the filler,
and cutting the table keeps the slot beside a copy of it. It takes about 29 % of the row's mass.

Vs Vt vocabularies, K slots a row, n entries.
"""

from __future__ import annotations

import unicodedata
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from megatron_ext.projection.builder import build_matrix
from megatron_ext.projection.nemo.loose_entries import LooseEntries, Mask
from megatron_ext.projection.projection_matrix import ProjectionMatrix
from megatron_ext.projection.speller import ProjectionOptions
from megatron_ext.tokenizers.base import ByteTokenizer
from megatron_ext.tokenizers.token_bytes import TokenBytes

PIECES = 4
"""Number of pieces that the original recipe takes of a spelling (its ``--tokens-to-cut``)."""


@dataclass(frozen=True, eq=False)
class TokenizerPair:
    """A student's and a teacher's tokenizer, and properties of their pair."""

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
        """Mask [Vs] of tokens with bytes."""
        return np.array([bool(token) for token in self.student_bytes], dtype=np.bool_)

    def is_same_token(self, entries: LooseEntries) -> Mask:
        """Mask [n] of entries whose column is the row's token itself, by bytes or by role."""
        exact = self.retokenized.is_exact_row
        column = np.full(self.shape[0], -1)
        column[exact] = self.retokenized.indices[self.retokenized.indptr[:-1][exact]]
        # Several ids of a vocabulary may have the same bytes; the lowest represents them.
        lowest: dict[bytes, int] = {}
        same = np.array(
            [lowest.setdefault(t, i) if t else i for i, t in enumerate(self.teacher_bytes)]
        )
        expected = column[entries.rows]
        mask: Mask = (expected >= 0) & (same[expected] == same[entries.columns])
        return mask

    def is_on_support(self, entries: LooseEntries) -> Mask:
        """Mask [n] of entries of which one token contains the other.

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
        """Mask [n] of entries that our projection of the pair has as well."""
        ours = LooseEntries.of(self.retokenized)
        stop = self.shape[1]
        return np.isin(entries.rows * stop + entries.columns, ours.rows * stop + ours.columns)

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


_SORTED_SHARE = 0.99
"""Least share of sorted rows for a table to count as sorted, with room for a few mended by hand."""
_LEAST_ROWS = 0.5
"""Least share of the inexact rows that a filler of the builder is in."""
_LEAST_COLUMN_ROWS = 0.1
_LEAST_SHARE = 0.12
"""Least share of a filler: above a second piece's (1/11), below the overwritten slot's (1/6)."""
_NEAR = 0.05
_LEAST_INEXACT = 8


@dataclass(kw_only=True, frozen=True, slots=True, eq=False)
class Filler:
    """Entries of filler columns, which correspond to no token."""

    mask: Mask
    """[n] mask of the filler entries."""

    columns: NDArray[np.int64]
    """Filler columns, the most frequent first."""

    counts: NDArray[np.int64]
    """Number of rows that each of the columns fills."""


def find_filler(entries: LooseEntries) -> Filler | None:
    """Find the filler of a file, or None.

    In a table it shows in the order: weights of a row fall up to the last slot and rise there. In
    other files it is a column of many rows that always has the same share and is never the largest.
    """
    mask = _overwritten_slots(entries)
    if mask is None:
        mask = _constant_columns(entries)
    if mask is None:
        return None
    pairs = np.unique(np.stack((entries.columns[mask], entries.rows[mask])), axis=1)
    columns, counts = np.unique(pairs[0], return_counts=True)
    order = np.lexsort((columns, -counts))
    return Filler(mask=mask, columns=columns[order], counts=counts[order])


def _overwritten_slots(entries: LooseEntries) -> Mask | None:
    """Mask [n] of entries with the column of their row's last slot, where that slot is a filler."""
    last = entries.slot_count - 1
    if last < 1:
        return None
    table = np.zeros((entries.height, entries.slot_count))
    table[entries.rows, entries.slots] = entries.weights
    falls = (np.diff(table[:, :last], axis=1) <= 0).all(axis=1)
    rises_last = table[:, last] > table[:, last - 1]
    inexact = np.count_nonzero((entries.row_sizes != 1) | rises_last)
    recognised = falls.mean() >= _SORTED_SHARE and rises_last.sum() >= max(1, _LEAST_ROWS * inexact)
    if not recognised:
        return None
    column = np.full(entries.height, -1)
    is_last = entries.slots == last
    column[entries.rows[is_last]] = entries.columns[is_last]
    mask: Mask = entries.columns == column[entries.rows]
    return mask


def _constant_columns(entries: LooseEntries) -> Mask | None:
    """Mask [n] of columns with the same share in many rows and the largest share in none."""
    merged = entries.merged()
    is_inexact = merged.row_sizes > 1
    inexact = int(is_inexact.sum())
    if inexact < _LEAST_INEXACT:
        return None
    is_led = is_inexact[merged.rows] & (merged.slots == 0)
    is_candidate = is_inexact[merged.rows] & (merged.slots > 0)
    columns, shares = merged.columns[is_candidate], merged.shares[is_candidate]
    counts = np.bincount(columns, minlength=1)
    leads = np.bincount(merged.columns[is_led], minlength=len(counts))[: len(counts)]
    often = (counts >= _LEAST_COLUMN_ROWS * inexact) & (leads <= _NEAR * counts)
    fillers = [c for c in np.flatnonzero(often).tolist() if _is_constant(shares[columns == c])]
    is_filled = is_candidate & np.isin(merged.columns, fillers)
    if len(np.unique(merged.rows[is_filled])) < _LEAST_ROWS * inexact:
        return None
    mask: Mask = np.isin(entries.keys, merged.keys[is_filled])
    return mask


def _is_constant(shares: NDArray[np.float64]) -> bool:
    middle = float(np.median(shares))
    near = np.abs(shares - middle) <= _NEAR * middle
    return middle >= _LEAST_SHARE and bool(near.mean() >= 0.5)
