"""Comparison of two tokenizers before a transfer: what is copied, and what will be different."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatron_ext.alignment.audit.text_class import COMMON, SCRIPTS, CharacterTable
from megatron_ext.alignment.control_pairs import ROLES
from megatron_ext.tokenizers.base import ByteTokenizer
from megatron_ext.transfer.digits import digit_pieces, digit_scheme
from megatron_ext.transfer.row_sources import NO_SOURCE, RowSources, row_sources

_RUNS: Final = re.compile(r"\s*\S+|\s+")
_NEWLINES: Final = (1, 2, 3, 4, 8)
_MANY: Final = 0.05
"""Share of rows of the mean from which on the audit warns."""

_NUMBERS: Final = ("0", "10", "110", "1110")


class SpecialRow(NamedTuple):
    """A role of both tokenizers."""

    role: str
    old: str | None
    new: str | None
    source: str | None
    """Old token whose row the new one starts from; None for the mean."""


class FertilityRow(NamedTuple):
    """Bytes of a token in text of one script."""

    script: str
    bytes: int
    old: float
    new: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferAudit:
    """What a transfer from one tokenizer to another means."""

    old_ids: int
    new_ids: int
    copied: int
    """Ordinary new tokens whose bytes the old vocabulary has."""

    spelled: int
    """Ordinary new tokens that old ones spell."""

    ordinary: int
    control: int
    copied_control: int
    copied_text: float | None
    """Share of the text's new tokens that are copies; None without a text."""

    digits: tuple[str, str]
    """Digit schemes, old and new."""

    numbers: dict[str, tuple[list[int], list[int]]]
    """Digits in each token of some numbers, old and new."""

    leading_space: tuple[float, float]
    """Shares of the ordinary tokens that begin with a space, old and new."""

    newlines: dict[int, tuple[int, int]]
    """Tokens of runs of line breaks, old and new."""

    specials: list[SpecialRow]
    fertility: list[FertilityRow]

    @property
    def means(self) -> int:
        """Ordinary tokens that are neither copies nor spelled by old ones: rows of the mean."""
        return self.ordinary - self.copied - self.spelled

    @property
    def warnings(self) -> list[str]:
        """What is likely to be lost."""
        found = []
        if self.means > _MANY * self.ordinary:
            found.append(
                f"{self.means:,} of {self.ordinary:,} ordinary tokens are neither copied nor "
                "spelled by old tokens: their rows are the mean, which training has to replace"
            )
        if self.digits[0] != self.digits[1]:
            found.append(
                f"numbers are cut {self.digits[0]} by the old tokenizer and {self.digits[1]} by "
                "the new one: arithmetic suffers most from that; --keep-digits keeps the old way"
            )
        lost = [row.role for row in self.specials if row.new is not None and row.source is None]
        if lost:
            found.append(f"no old token stands for {', '.join(lost)}: their rows are the mean")
        return found

    def as_row(self) -> dict[str, Any]:
        """The audit as JSON."""
        row = asdict(self)
        row["specials"] = [special._asdict() for special in self.specials]
        row["fertility"] = [line._asdict() for line in self.fertility]
        return {**row, "means": self.means, "warnings": self.warnings}

    def lines(self) -> Iterator[str]:
        """The audit as text."""
        share = self.copied / max(self.ordinary, 1)
        yield f"old tokenizer    {self.old_ids:,} ids"
        yield f"new tokenizer    {self.new_ids:,} ids, {self.control:,} of them control tokens"
        yield f"copied           {self.copied:,} of {self.ordinary:,} ordinary tokens ({share:.1%})"
        if self.copied_text is not None:
            yield f"copied in text   {self.copied_text:.1%} of its tokens"
        yield f"spelled          {self.spelled:,} by old tokens"
        yield f"mean             {self.means:,} ordinary tokens that are neither"
        yield f"control tokens   {self.copied_control:,} of {self.control:,} have an old one"
        yield f"digits           old {self.digits[0]}, new {self.digits[1]}"
        for number, (old, new) in self.numbers.items():
            yield f"  {number:<14} {_cut(number, old)} -> {_cut(number, new)}"
        spaces = " -> ".join(f"{part:.1%}" for part in self.leading_space)
        yield f"leading spaces   {spaces} of the ordinary tokens"
        runs = ", ".join(f"{n}: {old} -> {new}" for n, (old, new) in self.newlines.items())
        yield f"line breaks      tokens of a run of {runs}"
        yield "role             old -> new (row from)"
        for row in self.specials:
            source = "" if row.new is None else f" ({row.source or 'mean'})"
            yield f"  {row.role:<14} {row.old or 'none'} -> {row.new or 'none'}{source}"
        if self.fertility:
            yield "bytes a token    old -> new"
        for line in self.fertility:
            yield f"  {line.script:<14} {line.old:.2f} -> {line.new:.2f} ({line.bytes:,} bytes)"
        for warning in self.warnings:
            yield f"warning: {warning}"


def audit_transfer(
    old: ByteTokenizer, new: ByteTokenizer, texts: Sequence[str] = ()
) -> TransferAudit:
    """Compare two tokenizers, and how they cut some texts."""
    sources = row_sources(new, old)
    ordinary = ~sources.is_control
    has_source = sources.copied != NO_SOURCE
    return TransferAudit(
        old_ids=old.vocab_size,
        new_ids=new.vocab_size,
        copied=int((has_source & ordinary).sum()),
        spelled=len(sources.spelled),
        ordinary=int(ordinary.sum()),
        control=int(sources.is_control.sum()),
        copied_control=int((has_source & sources.is_control).sum()),
        copied_text=_copied_share(new, has_source, texts),
        digits=(digit_scheme(old), digit_scheme(new)),
        numbers={
            number: (digit_pieces(old, number), digit_pieces(new, number)) for number in _NUMBERS
        },
        leading_space=(_space_share(old), _space_share(new)),
        newlines={n: (_newline_tokens(old, n), _newline_tokens(new, n)) for n in _NEWLINES},
        specials=_specials(old, new, sources),
        fertility=_fertility(old, new, texts),
    )


def _copied_share(
    new: ByteTokenizer, has_source: NDArray[np.bool_], texts: Sequence[str]
) -> float | None:
    batch = new.text_to_ids_batch(texts)
    count = sum(map(len, batch))
    return sum(int(has_source[ids].sum()) for ids in batch) / count if count else None


def _space_share(tokenizer: ByteTokenizer) -> float:
    tokens = [tokenizer.token_bytes(i) for i in range(tokenizer.vocab_size)]
    ordinary = [token for token in tokens if token]
    return sum(token.startswith(b" ") for token in ordinary) / max(len(ordinary), 1)


def _newline_tokens(tokenizer: ByteTokenizer, count: int) -> int:
    _, ends = tokenizer.encode_with_byte_ends("a" + "\n" * count + "a")
    return len({int(end) for end in ends if 1 < end <= count + 1})


def _specials(old: ByteTokenizer, new: ByteTokenizer, sources: RowSources) -> list[SpecialRow]:
    rows = []
    for role in ROLES:
        ids = [getattr(tokenizer, f"{role}_id", None) for tokenizer in (old, new)]
        if ids == [None, None]:
            continue
        before, after = (
            None if i is None else tokenizer.id_to_token(i)
            for i, tokenizer in zip(ids, (old, new), strict=True)
        )
        source = NO_SOURCE if ids[1] is None else int(sources.copied[ids[1]])
        origin = None if source == NO_SOURCE else old.id_to_token(source)
        rows.append(SpecialRow(role, before, after, origin))
    return rows


def _fertility(old: ByteTokenizer, new: ByteTokenizer, texts: Sequence[str]) -> list[FertilityRow]:
    """Bytes a token by script; a token of several scripts counts in each by its bytes there."""
    if not texts:
        return []
    table = CharacterTable()
    sizes = np.zeros(len(SCRIPTS), np.int64)
    tokens = np.zeros((2, len(SCRIPTS)))
    for text in texts:
        scripts = _scripts_of_bytes(text, table)
        sizes += np.bincount(scripts, minlength=len(SCRIPTS))
        for tokenizer, counted in zip((old, new), tokens, strict=True):
            _, byte_ends = tokenizer.encode_with_byte_ends(text)
            # Several tokens may end at one byte.
            ends, counts = np.unique(byte_ends[byte_ends > 0], return_counts=True)
            widths = np.diff(ends, prepend=0)
            shares = np.repeat(counts / widths, widths)
            counted += np.bincount(scripts[: len(shares)], shares, minlength=len(SCRIPTS))
    rows = [
        FertilityRow(script, size, size / (before or 1), size / (after or 1))
        for script, size, before, after in zip(
            SCRIPTS, sizes.tolist(), *tokens.tolist(), strict=True
        )
        if size
    ]
    return sorted(rows, key=lambda row: -row.bytes)


def _scripts_of_bytes(text: str, table: CharacterTable) -> NDArray[np.uint8]:
    """Number in ``SCRIPTS`` of each byte of a text.

    In a word with the space before it, what scripts share is of the letter before it, or else of
    the first.
    """
    code_points = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype=np.uint32)
    scripts, _ = table.look_up(code_points)
    for match in _RUNS.finditer(text):
        word = scripts[match.start() : match.end()]
        letters = np.flatnonzero(word != COMMON)
        if len(letters):
            before = np.searchsorted(letters, np.arange(len(word)), side="right") - 1
            word[:] = word[letters[before.clip(min=0)]]
    widths = 1 + (code_points >= 0x80) + (code_points >= 0x800) + (code_points >= 0x10000)
    return np.repeat(scripts, widths)


def _cut(number: str, sizes: Sequence[int]) -> str:
    ends = np.cumsum([0, *sizes])
    return "|".join(number[a:b] for a, b in pairwise(ends))
