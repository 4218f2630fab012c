"""Which tokens of two vocabularies are the same text behind a prefix. V Vs Vt vocabularies.

Where a student writes one token and its teacher several, the teacher's first tokens are a prefix of
the student's token, and what may follow is known for both: for the prefix ``1``, the student's
``17`` is the teacher's ``7``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megatron_ext.projection.building.speller import Speller
from megatron_ext.tokenizers.base import ByteTokenizer

Ids = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class PrefixPairs:
    """Tokens of one vocabulary that begin with a prefix, and the other's for what is behind it.

    ``bytes(whole[i]) == prefix + bytes(part[i])``, neither of them empty.
    """

    row: dict[bytes, int]
    """Prefix -> row; in no order."""

    pointers: Ids
    """[rows + 1] where the pairs of each prefix start."""

    whole: NDArray[np.int32]
    """[pairs] ascending within a prefix."""

    part: NDArray[np.int32]
    """[pairs]"""

    @classmethod
    def of(cls, whole_ids: dict[bytes, int], part_ids: dict[bytes, int]) -> PrefixPairs:
        """All pairs, from the id of each spelling in both vocabularies."""
        row: dict[bytes, int] = {}
        rows: list[int] = []
        wholes: list[int] = []
        parts: list[int] = []
        for token, whole in whole_ids.items():
            for cut in range(1, len(token)):
                part = part_ids.get(token[cut:])
                if part is not None:
                    rows.append(row.setdefault(token[:cut], len(row)))
                    wholes.append(whole)
                    parts.append(part)
        order = np.lexsort((wholes, rows))
        counts = np.bincount(np.asarray(rows, dtype=np.int64), minlength=len(row))
        return cls(
            row=row,
            pointers=np.concatenate([[0], np.cumsum(counts)]).astype(np.int64),
            whole=np.asarray(wholes, dtype=np.int32)[order],
            part=np.asarray(parts, dtype=np.int32)[order],
        )

    def behind(self, prefix: bytes) -> tuple[Ids, Ids]:
        """Whole and part of every pair with this prefix."""
        row = self.row.get(prefix)
        if row is None:
            return np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64)
        pairs = slice(int(self.pointers[row]), int(self.pointers[row + 1]))
        return self.whole[pairs].astype(np.int64), self.part[pairs].astype(np.int64)


@dataclass(frozen=True, slots=True, eq=False)
class CompletionTable:
    """Completions of every prefix, between two vocabularies; built once for a pair.

    Of several ids with the same bytes, the one that the tokenizer emits stands for them.
    """

    student_bytes: Sequence[bytes | None]
    """[Vs] None for a control token."""

    teacher_bytes: Sequence[bytes | None]
    """[Vt]"""

    student_wholes: PrefixPairs
    """Prefix of teacher tokens; the student's whole token, the teacher's rest of it."""

    teacher_wholes: PrefixPairs
    """Prefix of student tokens; the teacher's whole token, the student's rest of it."""

    @classmethod
    def from_tokenizers(cls, student: ByteTokenizer, teacher: ByteTokenizer) -> CompletionTable:
        """The table of a pair; seconds for vocabularies of 150,000."""
        spellers = Speller(student), Speller(teacher)
        student_ids, teacher_ids = (
            {speller.tokens[token] or b"": token for token in sorted(speller.emitted_ids)}
            for speller in spellers
        )
        return cls._of(spellers[0].tokens, spellers[1].tokens, student_ids, teacher_ids)

    @classmethod
    def from_token_bytes(
        cls, student: Sequence[bytes | None], teacher: Sequence[bytes | None]
    ) -> CompletionTable:
        """The table of two lists of bytes by id; of equal bytes the lowest id stands for them."""
        return cls._of(student, teacher, *map(_lowest_ids, (student, teacher)))

    @classmethod
    def _of(
        cls,
        student: Sequence[bytes | None],
        teacher: Sequence[bytes | None],
        student_ids: dict[bytes, int],
        teacher_ids: dict[bytes, int],
    ) -> CompletionTable:
        return cls(
            student_bytes=student,
            teacher_bytes=teacher,
            student_wholes=PrefixPairs.of(student_ids, teacher_ids),
            teacher_wholes=PrefixPairs.of(teacher_ids, student_ids),
        )

    def completions(
        self, student: Sequence[int], teacher: Sequence[int], limit: int | None = None
    ) -> tuple[Ids, Ids]:
        """Last tokens of both sides that are one text behind the tokens before, realised one first.

        Args:
            student: The student's tokens of a chunk.
            teacher: The teacher's.
            limit: Most completions besides the realised one, those of the lowest whole ids; ids of
                most vocabularies grow with rarity. None: all.

        Returns:
            Student ids and teacher ids. Only the realised pair where both sides have several
            tokens or one each, or where their bytes are not known to be equal.
        """
        realised = np.array([student[-1]]), np.array([teacher[-1]])
        if (len(student) == 1) == (len(teacher) == 1):
            return realised
        mirrored = len(student) > 1
        whole, parts = (teacher[0], student) if mirrored else (student[0], teacher)
        spellings = (self.student_bytes, self.teacher_bytes)
        whole_bytes, part_bytes = spellings[::-1] if mirrored else spellings
        text, pieces = whole_bytes[whole], [part_bytes[part] for part in parts]
        if text is None or not all(pieces) or b"".join(p or b"" for p in pieces) != text:
            return realised
        pairs = self.teacher_wholes if mirrored else self.student_wholes
        found_whole, found_part = pairs.behind(text[: len(text) - len(pieces[-1] or b"")])
        # The spelling of the realised pair may be in the table under other ids.
        other = np.fromiter(
            (whole_bytes[token] != text for token in found_whole.tolist()),
            dtype=np.bool_,
            count=len(found_whole),
        )
        wholes = np.concatenate([[whole], found_whole[other][:limit]]).astype(np.int64)
        last = np.concatenate([[parts[-1]], found_part[other][:limit]]).astype(np.int64)
        return (last, wholes) if mirrored else (wholes, last)


def _lowest_ids(tokens: Sequence[bytes | None]) -> dict[bytes, int]:
    lowest: dict[bytes, int] = {}
    for token_id, token in enumerate(tokens):
        if token:
            lowest.setdefault(token, token_id)
    return lowest
