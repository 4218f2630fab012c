"""Table of the bytes of every id, and the byte at which each token of a text ends.

Shape letters: V vocabulary, T tokens, N bytes of a text, M characters of a text.

Tokens are compared with a text in words of eight bytes. Nearly all tokens fit in one, so that one
comparison for each token replaces one for each of their bytes. Combining marks that a normaliser
reorders are located as a group.
"""

from __future__ import annotations

import hashlib
import unicodedata
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import accumulate, groupby
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatron_ext.conversation.chat_output import refuse_foreign
from megatron_ext.errors import TokenizerError
from megatron_ext.tokenizers.token_ids import (
    ByteEnds,
    IdArray,
    checked_id,
    checked_ids,
    checked_text,
)

if TYPE_CHECKING:
    from megatron_ext.tokenizers.base import ByteTokenizer

Span = tuple[int, int]

_FIRST_MARK: Final = 0x300


class ReorderedMarks(NamedTuple):
    """Byte offsets of a character and of marks behind it that are not in canonical order."""

    character: int
    """Begin of the character, with which a mark behind other marks can be composed."""

    marks: int
    end: int


def spans_of_marks(spans: Sequence[Span], pieces: Sequence[bytes], text: bytes) -> list[Span]:
    """The spans [T] that a library reports, those of reordered marks widened to all of the marks.

    A library counts marks in the order after normalisation, so that a reordered mark gets the span
    of another. The character before the marks is included unless its tokens spell it.

    Args:
        spans: Begin and end of each token in bytes.
        pieces: Bytes of each token.
        text: The whole text, N bytes.
    """
    sequences = list(reordered_marks(text))
    if not sequences:
        return list(spans)
    spelled = set(_spelled_ends(spans, pieces, text))
    starts = sorted({0, *(start for start, _ in spans)})
    begins, ends = [], []
    for character, marks, end in sequences:
        # A character that was composed with the one before begins where that does.
        with_character = starts[bisect_right(starts, character) - 1]
        begins.append(marks if marks in spelled else with_character)
        ends.append(end)
    widened = []
    for (start, stop), piece in zip(spans, pieces, strict=True):
        first, last = bisect_right(ends, start), bisect_right(begins, stop - 1) - 1
        # A library may report a dummy space before a word with the span of its first character.
        if start < stop and first <= last and piece != b" ":
            start, stop = min(start, begins[first]), max(stop, ends[last])
        widened.append((start, stop))
    return widened


def reordered_marks(text: bytes) -> Iterator[ReorderedMarks]:
    """Runs of marks in ``text`` that are not in canonical order, ascending."""
    characters = text.decode()
    points = np.frombuffer(characters.encode("utf-32-le"), np.uint32)
    if points.max(initial=0) < _FIRST_MARK:
        return
    distinct, index = np.unique(points, return_inverse=True)
    # The decomposition of a character can end in a mark, too.
    expanded = [unicodedata.normalize("NFD", chr(point)) for point in distinct.tolist()]
    first, last = (
        np.array([unicodedata.combining(piece[i]) for piece in expanded]) for i in (0, -1)
    )
    classes = first[index]
    falls = np.flatnonzero((classes[1:] > 0) & (classes[1:] < last[index][:-1]))
    if not len(falls):
        return
    widths = np.array([len(chr(point).encode()) for point in distinct.tolist()])[index]
    offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(widths)]).tolist()
    starters = np.flatnonzero(classes == 0)
    after = starters.searchsorted(falls, side="right")
    firsts = np.concatenate([np.full(1, -1), starters])[after]
    stops = np.append(starters, len(classes))[after]
    for begin, stop in sorted(set(zip(firsts.tolist(), stops.tolist(), strict=True))):
        yield ReorderedMarks(offsets[max(begin, 0)], offsets[begin + 1], offsets[stop])


def _spelled_ends(spans: Sequence[Span], pieces: Sequence[bytes], text: bytes) -> Iterator[int]:
    """Ends of the spans that their tokens spell."""
    for (start, stop), group in groupby(zip(spans, pieces, strict=True), key=lambda pair: pair[0]):
        if b"".join(piece for _, piece in group) == text[start:stop]:
            yield stop


Words = NDArray[np.uint64]

_WORD: Final = 8
_MASKS: Final[Words] = np.array([(1 << 8 * count) - 1 for count in range(_WORD + 1)], np.uint64)
"""Masks of the first 0 to 8 bytes of a word."""


class TokenWords:
    """Bytes of every id as words, for fast comparison with texts.

    Args:
        buffer: [N] the bytes of all ids, one after another.
        starts: [V] where the bytes of each id begin.
        lengths: [V] number of bytes of each id.
    """

    def __init__(
        self,
        buffer: NDArray[np.uint8],
        starts: NDArray[np.int64],
        lengths: NDArray[np.int64],
    ) -> None:
        self._words = _words_of(buffer.tobytes())
        self._starts = starts
        self._lengths = lengths
        self._first_masks = _MASKS[np.minimum(lengths, _WORD)]
        self._first_words = self._words[starts] & self._first_masks

    def differ(self, ids: IdArray, begins: NDArray[np.int64], text: bytes) -> NDArray[np.bool_]:
        """Mask of the tokens that differ from ``text`` where they begin [T].

        Args:
            ids: [T]
            begins: [T] byte of the text where each begins, at most N.
            text: N bytes.
        """
        words = _words_of(text)
        differing = words[begins]
        differing ^= self._first_words.take(ids)
        differing &= self._first_masks.take(ids)
        differ: NDArray[np.bool_] = differing != 0
        longer = np.flatnonzero(self._lengths.take(ids) > _WORD)
        done = _WORD
        while len(longer):
            left = self._lengths[ids[longer]] - done
            there = words[np.minimum(begins[longer] + done, len(text))]
            here = self._words[self._starts[ids[longer]] + done]
            differ[longer] |= ((there ^ here) & _MASKS[np.minimum(left, _WORD)]) != 0
            done += _WORD
            longer = longer[left > _WORD]
        return differ


def _words_of(content: bytes) -> Words:
    """Words that begin at each of N bytes and behind the last [N + 1], padded with zeros."""
    padded = content + bytes(_WORD)
    words: Words = np.ndarray((len(content) + 1,), "<u8", padded, strides=(1,))
    return words


DummyPrefix = Literal["none", "first", "each"]
"""Segments of text between control tokens that the library starts with a dummy space."""


@dataclass(frozen=True, eq=False)
class TokenBytes:
    """Bytes of each id: ``buffer[offsets[i] : offsets[i + 1]]``."""

    buffer: NDArray[np.uint8]
    """[N] the bytes of all ids, one after another."""
    offsets: NDArray[np.int64]
    """[V + 1] where the bytes of each id begin; the last entry is N."""
    is_control: NDArray[np.bool_]
    """[V] control tokens and unused ids, which have no bytes."""
    lengths: NDArray[np.int64]
    """[V] number of bytes of each id."""
    starts_with_space: NDArray[np.bool_]
    """[V] ids whose first byte is a space."""
    rows: list[bytes]
    """[V] bytes of each id as an object; empty for a control token or an unused id."""

    @classmethod
    def from_tokens(cls, tokens: Iterable[bytes | None]) -> TokenBytes:
        """Table of the bytes of ids 0, 1, 2, ...; None marks a control token or an unused id."""
        given = list(tokens)
        rows = [row or b"" for row in given]
        lengths = np.fromiter(map(len, rows), np.int64, count=len(rows))
        return cls(
            buffer=np.frombuffer(b"".join(rows), np.uint8),
            offsets=np.concatenate((np.zeros(1, np.int64), np.cumsum(lengths))),
            is_control=np.fromiter((row is None for row in given), np.bool_, count=len(rows)),
            lengths=lengths,
            starts_with_space=np.fromiter(
                (row.startswith(b" ") for row in rows), np.bool_, count=len(rows)
            ),
            rows=rows,
        )

    @classmethod
    def of(cls, tokenizer: ByteTokenizer) -> TokenBytes:
        """Table of a tokenizer's ids: the one that it keeps, else a new one.

        Raises:
            TokenizerError: ``tokenizer`` is not one of this package.
        """
        refuse_foreign(tokenizer, "token_bytes")
        table: TokenBytes | None = getattr(tokenizer, "token_table", None)
        if table is not None:
            return table
        return cls.from_tokens(map(tokenizer.token_bytes, range(tokenizer.vocab_size)))

    def tokens(self) -> list[bytes | None]:
        """Bytes of each id [V], None for a control token or an unused id; a new list."""
        control = self.is_control.tolist()
        return [None if is_none else row for is_none, row in zip(control, self.rows, strict=True)]

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, token_id: int) -> bytes | None:
        token_id = self.check(token_id)
        return None if self.is_control[token_id] else self.rows[token_id]

    def check(self, token_id: int) -> int:
        """An id inside the vocabulary, as an int.

        Raises:
            TokenizerError: ``token_id`` is not an integer from 0 to V - 1.
        """
        return checked_id(token_id, len(self))

    def as_ids(self, ids: Sequence[int] | IdArray) -> IdArray:
        """``ids`` as int32 [T], each inside the vocabulary.

        Raises:
            TokenizerError: They are not a sequence of integers, or one is outside the vocabulary.
        """
        return checked_ids(ids, len(self))

    def join(self, ids: IdArray) -> NDArray[np.uint8]:
        """Concatenated bytes of ``ids`` [N]; control tokens have none."""
        lengths = self.lengths[ids]
        ends = np.cumsum(lengths)
        total = int(ends[-1]) if len(ends) else 0
        shift = np.repeat(self.offsets[ids] - ends + lengths, lengths)
        joined: NDArray[np.uint8] = self.buffer[shift + np.arange(total)]
        return joined

    def byte_ends(self, ids: IdArray, dummy_prefix: DummyPrefix = "none") -> ByteEnds:
        """Cumulative byte counts of ``ids`` [T], each dummy prefix left out."""
        lengths = self.lengths[ids]
        if dummy_prefix != "none" and len(ids):
            is_text = ~self.is_control[ids]
            first_of_segment = is_text & np.concatenate(([True], ~is_text[:-1]))
            if dummy_prefix == "first":
                first_of_segment &= np.cumsum(first_of_segment) == 1
            lengths -= first_of_segment & self.starts_with_space[ids]
        return np.cumsum(lengths)

    def ends_within(self, ids: IdArray, text: bytes) -> ByteEnds | None:
        """Byte ends [T] where the bytes of ``ids`` spell ``text``, else None.

        An additional leading space is the library's dummy prefix, which covers no byte.
        """
        joined = b"".join([self.rows[i] for i in ids.tolist()])
        prefix = len(joined) - len(text)
        if (
            prefix not in (0, 1)
            or not joined.endswith(text)
            or not joined.startswith(b" " * prefix)
        ):
            return None
        ends: ByteEnds = self.lengths.take(ids).cumsum()
        return np.maximum(ends - 1, 0) if prefix else ends

    def ends_within_each(
        self, ids: IdArray, offsets: NDArray[np.int64], texts: Sequence[bytes]
    ) -> tuple[ByteEnds, list[int]]:
        """Byte ends [T] of the ids of several texts, each counted from the begin of its text.

        Args:
            ids: Ids of D texts, one after another [T].
            offsets: Where the ids of each text begin; the last entry is T [D + 1].
            texts: The texts [D].

        Returns:
            The ends, and the indices of the texts that the bytes of their ids do not spell, whose
            ends are meaningless; see ``ends_within``.
        """
        ends, bad = self.ends_within_joined(ids, offsets, texts)
        begins = np.cumsum([0, *map(len, texts)])[:-1]
        return ends - np.repeat(begins, np.diff(offsets)), bad

    def ends_within_joined(
        self, ids: IdArray, offsets: NDArray[np.int64], texts: Sequence[bytes]
    ) -> tuple[ByteEnds, list[int]]:
        """``ends_within_each``, counted from the begin of the first text."""
        counts = np.diff(offsets)
        sizes = np.fromiter(map(len, texts), np.int64, len(texts))
        lengths = self.lengths.take(ids)
        ends = lengths.cumsum()
        prefixes = np.diff(np.concatenate((np.zeros(1, np.int64), ends))[offsets]) - sizes
        has_size = (prefixes == 0) | (prefixes == 1)
        prefixes *= has_size
        spelled = b"".join(
            [b" " + text if has else text for has, text in zip(prefixes, texts, strict=True)]
        )
        if not has_size.all():
            # Undo the shift that a text of another size causes for the texts behind it.
            first_ends = np.concatenate((np.zeros(1, np.int64), ends))[offsets[:-1]]
            ends += np.repeat(np.cumsum(sizes + prefixes) - sizes - prefixes - first_ends, counts)
        differ = self._words.differ(ids, np.clip(ends - lengths, 0, len(spelled)), spelled)
        is_bad = ~has_size
        is_bad[np.repeat(np.arange(len(texts)), counts)[differ]] = True
        if prefixes.any():
            ends = np.maximum(
                ends - np.repeat(np.cumsum(prefixes), counts),
                np.repeat(np.cumsum(sizes) - sizes, counts),
            )
        return ends, np.flatnonzero(is_bad).tolist()

    @cached_property
    def _words(self) -> TokenWords:
        return TokenWords(self.buffer, self.offsets[:-1], self.lengths)

    def __getstate__(self) -> dict[str, Any]:
        # Quicker to rebuild than to pickle.
        return {name: value for name, value in self.__dict__.items() if name != "_words"}

    def fingerprint(self, control_name: Callable[[int], str]) -> str:
        """SHA-256 (hex) of V, each id's kind, length and bytes; a control token's are its name."""
        names = {int(i): control_name(int(i)).encode() for i in np.flatnonzero(self.is_control)}
        lengths = self.lengths.copy()
        lengths[list(names)] = [len(name) for name in names.values()]
        digest = hashlib.sha256(lengths.astype("<i8").tobytes())
        digest.update(self.is_control.tobytes())
        digest.update(self.buffer.tobytes())
        digest.update(b"".join(names.values()))
        return digest.hexdigest()


@cache
def byte_of_character() -> dict[str, int]:
    """GPT-2's printable stand-in for each byte, inverted: ``Ġ`` -> 32, ``a`` -> 97.

    Bytes that are visible Latin-1 characters stand for themselves; the others take the code points
    from 256 on, in byte order.
    """
    visible = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1)}
    visible |= set(range(ord("®"), ord("ÿ") + 1))
    hidden = (byte for byte in range(256) if byte not in visible)
    return {chr(byte): byte for byte in visible} | {
        chr(256 + n): byte for n, byte in enumerate(hidden)
    }


def utf8(text: str) -> bytes:
    """``text.encode()``.

    Raises:
        TokenizerError: It is not text, or holds a lone surrogate, which has no bytes; the error
            names its place.
    """
    try:
        return checked_text(text).encode()
    except UnicodeEncodeError as error:
        raise TokenizerError(
            f"the text holds a lone surrogate at character {error.start}",
            got=f"U+{ord(text[error.start]):04X}",
            expected="text that UTF-8 can hold",
            fix='clean it: text.encode("utf-8", "replace").decode()',
        ) from None


def character_starts(text: bytes) -> NDArray[np.int64]:
    """Byte offset of each character of ``text`` and, last, its length [M + 1]."""
    is_start = (np.frombuffer(text, np.uint8) & 0xC0) != 0x80
    return np.append(np.flatnonzero(is_start), len(text))


def settle_ends(
    spans: Sequence[tuple[int, int]], pieces: Sequence[bytes], text: bytes
) -> list[int]:
    """Byte ends [T] from the spans [T] that a library reports for a normalised text.

    Tokens that share characters (an emoji cut into bytes) are separated by their own bytes where
    these spell the text; elsewhere the library's ends are used, made monotone. Of the tokens that a
    normaliser makes of one character, or of reordered marks, the last covers it, and those before
    cover nothing. Bytes between two spans belong to the token before (a combining mark that was
    composed away), white space to the one after. The last end is N.

    Args:
        spans: Begin and end of each token in bytes, as the library reports them.
        pieces: Bytes of each token.
        text: The whole text, N bytes.
    """
    ends: list[int] = []
    spans = spans_of_marks(spans, pieces, text)
    first = begin = high = 0
    for index, (start, end) in enumerate(spans):
        # A group continues while it covers nothing, or a token begins before its end.
        if high > begin and start >= high:
            _tell_apart(ends, spans, pieces, first, begin, text[begin:high])
            if start > high and not text[high:start].decode(errors="ignore")[:1].isspace():
                ends[-1] = high = min(start, len(text))
            first, begin = index, high
        high = max(high, min(end, len(text)))
        ends.append(high)
    if ends:
        _tell_apart(ends, spans, pieces, first, begin, text[begin:])
        ends[-1] = len(text)
    return ends


def _tell_apart(
    ends: list[int],
    spans: Sequence[tuple[int, int]],
    pieces: Sequence[bytes],
    first: int,
    begin: int,
    covered: bytes,
) -> None:
    """Set ``ends[first:]``, which share the bytes ``covered`` from ``begin`` on, by their pieces.

    Where the pieces do not spell them, the last token of each end covers its bytes.
    """
    if len(ends) - first < 2:
        return
    group = pieces[first : len(ends)]
    joined = b"".join(group)
    extra = len(joined) - len(covered)
    if joined == covered or (extra == 1 and joined == b" " + covered):
        sums = accumulate(map(len, group))
        ends[first:] = [begin + max(0, total - extra) for total in sums]
        return
    before = begin
    for end, run in groupby(range(first, len(ends)), key=list(ends).__getitem__):
        alike = list(run)
        covering = max((at for at in alike if spans[at][0] < spans[at][1]), default=alike[0])
        for at in range(alike[0], covering):
            ends[at] = before
        before = end
