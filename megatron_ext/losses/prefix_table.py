"""Prefixes of teacher tokens, and the student tokens that go on behind each of them.

Wherever a teacher's next token is known, the student's next token is, too: the one that its
tokenizer begins that token's bytes with. Within a teacher's token the same holds for those of its
tokens that begin with the bytes that were said already. Where the tokenizer does not stop there,
and without a tokenizer, it is the longest token that goes on.

Vs Vt vocabularies, P prefixes, N pairs of a prefix and a teacher token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from megatron_ext.alignment.batch import AlignmentBatch
from megatron_ext.distributed.vocab_parallel import VocabShard
from megatron_ext.losses.prefix_rows import PrefixRows
from megatron_ext.ops.prefix_masses import PrefixColumns, start_columns
from megatron_ext.projection.speller import Speller
from megatron_ext.tokenizers.base import ByteTokenizer

if TYPE_CHECKING:
    from megatron_ext.projection.layout import VocabularyLayout

Ids = NDArray[np.int64]
Next = Callable[[bytes, int], int]
"""Function of a teacher token's bytes, and how many of them were said, to the student's next token;
-1 for none."""

MOST_COMPLETIONS: Final = 4096
"""Most student tokens behind a prefix that are compared one by one, those of the lowest ids; ids of
most vocabularies grow with rarity. The others are part of the rest."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PrefixTable:
    """Student tokens that teacher tokens begin with, at their start and behind every prefix.

    Built once for a pair. Of several student tokens with the same bytes the one counts that the
    tokenizer emits, or that of the lowest id.
    """

    student_bytes: Sequence[bytes | None]
    """[Vs] None for a control token."""

    teacher_bytes: Sequence[bytes | None]
    """[Vt]"""

    starts: Ids
    """[Vt] student token that the bytes of each teacher token begin with, or a control token's
    partner; -1 for none."""

    is_event: NDArray[np.bool_]
    """[Vs] student tokens that are compared one by one: those with bytes, and partners."""

    number: dict[bytes, int]
    """Prefix of teacher tokens, whole ones among them -> its number."""

    pointers: Ids
    """[P + 1] first pair of each prefix."""

    token: NDArray[np.int32]
    """[N] teacher tokens that begin with the prefix."""

    slot: NDArray[np.int32]
    """[N] place of the student token that goes on in it, among those of the prefix; their number
    where nothing goes on, or with no student token that is compared."""

    next_pointers: Ids
    """[P + 1] first student token of each prefix in ``next_token``."""

    next_token: NDArray[np.int32]
    """Student tokens behind each prefix, ascending, at most ``MOST_COMPLETIONS``."""

    next_in: Next
    """Function to the student token that goes on in a teacher token behind some of its bytes."""

    @classmethod
    def from_tokenizers(
        cls, student: ByteTokenizer, teacher: ByteTokenizer, partners: tuple[Ids, Ids]
    ) -> PrefixTable:
        """Build the table of a pair; takes seconds for vocabularies of 150,000.

        Args:
            partners: Student and teacher ids of one meaning, of which control tokens are used.
        """
        spellers = Speller(student), Speller(teacher)
        emitted = [frozenset(speller.emitted_ids) for speller in spellers]
        return cls._of(
            (spellers[0].tokens, spellers[1].tokens), emitted, partners, spellers[0].spell
        )

    @classmethod
    def from_token_bytes(
        cls,
        student: Sequence[bytes | None],
        teacher: Sequence[bytes | None],
        partners: tuple[Sequence[int], Sequence[int]] = ((), ()),
    ) -> PrefixTable:
        """Build the table from lists of bytes by id: the longest token goes on, and the lowest id
        represents equal bytes."""
        pairs = np.array(partners[0], dtype=np.int64), np.array(partners[1], dtype=np.int64)
        return cls._of((student, teacher), [frozenset(), frozenset()], pairs)

    @classmethod
    def _of(
        cls,
        tokens: tuple[Sequence[bytes | None], Sequence[bytes | None]],
        emitted: Sequence[frozenset[int]],
        partners: tuple[Ids, Ids],
        spell: Callable[[Sequence[bytes]], Sequence[Sequence[int]]] | None = None,
    ) -> PrefixTable:
        student, teacher = tokens
        ids, teacher_ids = map(_by_bytes, tokens, emitted)
        next_in = _next_in({text: same[0] for text, same in ids.items()})
        if spell is not None:
            others = [text for text in teacher_ids if text not in ids]
            next_in = _spelled(next_in, student, dict(zip(others, spell(others), strict=True)))
        starts = np.full(len(teacher), -1, dtype=np.int64)
        for text, same in teacher_ids.items():
            # Several ids of equal bytes meet one by one, so that equal vocabularies stay equal.
            partner = ids.get(text, [])
            for place, token_id in enumerate(same):
                starts[token_id] = partner[place] if place < len(partner) else next_in(text, 0)
        is_event = np.array([bool(text) for text in student], dtype=np.bool_)
        for own, other in zip(*(side.tolist() for side in partners), strict=True):
            if not student[own] and not teacher[other]:
                starts[other] = own
                is_event[own] = True
        number, pointers, token, following = _pairs(teacher, next_in)
        slot, next_pointers, next_token = _slots(pointers, following)
        return cls(
            student_bytes=student,
            teacher_bytes=teacher,
            starts=starts,
            is_event=is_event,
            number=number,
            pointers=pointers,
            token=token,
            slot=slot,
            next_pointers=next_pointers,
            next_token=next_token,
            next_in=next_in,
        )

    def of_batch(
        self, alignment: AlignmentBatch, student_labels: torch.Tensor, teacher_labels: torch.Tensor
    ) -> PrefixRows:
        """Rows of a batch; see ``CompletionSource``."""
        return PrefixRows.of(alignment, student_labels, teacher_labels, self)

    def columns(
        self,
        student_shard: VocabShard,
        teacher_shard: VocabShard,
        *,
        layout: VocabularyLayout | None = None,
        device: torch.device | str = "cpu",
    ) -> PrefixColumns:
        """The table cut to a rank's columns. No collectives.

        Args:
            layout: Order of the columns, if not that of the ids.
        """
        own, its = (np.arange(len(side)) for side in (self.student_bytes, self.teacher_bytes))
        if layout is not None:
            own, its = layout.student.places[: len(own)], layout.teacher.places[: len(its)]
        starts = np.full(max(len(its), teacher_shard.vocab_size), -1, dtype=np.int64)
        starts[its] = np.where(self.starts < 0, -1, own[self.starts])
        is_event = np.zeros(max(len(own), student_shard.vocab_size), dtype=np.bool_)
        is_event[own] = self.is_event
        column = its[self.token] - teacher_shard.start
        column[(column < 0) | (column >= teacher_shard.valid_width)] = -1

        def moved(values: NDArray[Any]) -> torch.Tensor:
            return torch.from_numpy(values).to(device)

        return PrefixColumns(
            start_columns(moved(starts), moved(is_event), student_shard, teacher_shard),
            moved(self.pointers),
            moved(column.astype(np.int32)),
            moved(self.slot),
        )


def _by_bytes(tokens: Sequence[bytes | None], emitted: frozenset[int]) -> dict[bytes, list[int]]:
    """Ids of each spelling, the emitted one first and then ascending."""
    found: dict[bytes, list[int]] = {}
    for token_id, text in enumerate(tokens):
        if text:
            found.setdefault(text, []).append(token_id)
    for ids in found.values():
        if len(ids) > 1:
            ids.sort(key=lambda token_id: (token_id not in emitted, token_id))
    return found


def _next_in(ids: dict[bytes, int]) -> Next:
    """The longest token that goes on."""
    most = max(map(len, ids), default=0)
    known: dict[bytes, int] = {}

    def longest(text: bytes, cut: int) -> int:
        left = text[cut:]
        found = known.get(left)
        if found is None:
            stops = range(min(len(left), most), 0, -1)
            found = next((ids[left[:stop]] for stop in stops if left[:stop] in ids), -1)
            known[left] = found
        return found

    return longest


def _spelled(
    longest: Next, tokens: Sequence[bytes | None], spellings: dict[bytes, Sequence[int]]
) -> Next:
    """The token of a tokenizer's own spelling where it stops at the cut, and else the longest."""
    others: dict[tuple[bytes, int], int] = {}
    for text, spelling in spellings.items():
        cut = 0
        for token_id in spelling:
            found = longest(text, cut)
            if found < 0 or tokens[found] != tokens[token_id]:
                others[text, cut] = token_id
            cut += len(tokens[token_id] or b"")

    def next_in(text: bytes, cut: int) -> int:
        found = others.get((text, cut))
        return longest(text, cut) if found is None else found

    return next_in


def _pairs(
    teacher: Sequence[bytes | None], next_in: Next
) -> tuple[dict[bytes, int], Ids, NDArray[np.int32], Ids]:
    """Number of each prefix, and by prefix: teacher tokens, and the student token behind it.

    Ascending in a prefix by student token, -1 for none last.
    """
    number: dict[bytes, int] = {}
    rows: list[int] = []
    tokens: list[int] = []
    following: list[int] = []
    for token_id, text in enumerate(teacher):
        if not text:
            continue
        for cut in range(1, len(text) + 1):
            rows.append(number.setdefault(text[:cut], len(number)))
            tokens.append(token_id)
            following.append(next_in(text, cut) if cut < len(text) else -1)
    row, after = np.array(rows, dtype=np.int64), np.array(following, dtype=np.int64)
    order = np.lexsort((np.where(after < 0, np.iinfo(np.int64).max, after), row))
    return (
        number,
        _pointers(np.bincount(row, minlength=len(number))),
        np.array(tokens, dtype=np.int32)[order],
        after[order],
    )


def _slots(pointers: Ids, following: Ids) -> tuple[NDArray[np.int32], Ids, NDArray[np.int32]]:
    """Slot of each pair, and the student tokens of every prefix's slots."""
    row = np.repeat(np.arange(len(pointers) - 1), np.diff(pointers))
    is_new = np.ones(len(following), dtype=np.bool_)
    is_new[1:] = (following[1:] != following[:-1]) | (row[1:] != row[:-1])
    is_new &= following >= 0
    distinct = np.bincount(row[is_new], minlength=len(pointers) - 1)
    slot = np.cumsum(is_new) - 1 - _pointers(distinct)[row]
    kept = np.minimum(distinct, MOST_COMPLETIONS)
    is_rest = (following < 0) | (slot >= kept[row])
    return (
        np.where(is_rest, kept[row], slot).astype(np.int32),
        _pointers(kept),
        following[is_new & ~is_rest].astype(np.int32),
    )


def _pointers(counts: NDArray[np.int64]) -> Ids:
    return np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
