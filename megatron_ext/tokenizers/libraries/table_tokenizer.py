"""Base of adapters whose vocabulary is fixed, so that a table holds the bytes of each id."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from itertools import chain, groupby, pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_ext.errors import TokenizerError
from megatron_ext.tokenizers.base import MegatronTokenizerTextAbstract, ParseSpecial
from megatron_ext.tokenizers.config import Engine
from megatron_ext.tokenizers.engine import FastEncoder, GigatokenEngine, flat_ids, interleave
from megatron_ext.tokenizers.special_ids import are_forged, markers
from megatron_ext.tokenizers.special_tokens import (
    ControlMatch,
    ControlToken,
    ControlTokens,
    SpecialRole,
)
from megatron_ext.tokenizers.token_bytes import DummyPrefix, TokenBytes, character_starts, utf8
from megatron_ext.tokenizers.token_ids import ByteEnds, IdArray, checked_texts

_TELLING = 16
"""Least number of segments, all normalised, that shows a library to normalise every text."""


class TableTokenizer(MegatronTokenizerTextAbstract):
    """Base of adapters, which give ids and, where their normaliser changes text, spans.

    A text is cut into segments at its control tokens, whose ids and byte ends are concatenated: an
    adapter encodes text without control tokens.

    Args:
        files: Files that the tokenizer was read from, by the name they keep in a checkpoint.
        pieces: Display string of each id [V]; the empty string marks an unused id.
        token_bytes: Bytes of each id [V]; None for a control token or an unused id.
        special_ids: Id of each special role that the tokenizer has.
        dummy_prefix: Segments of text that start with a space that the library adds.
        control_tokens: Tokens that are parsed where control tokens are read; by default every id
            without bytes that has a name.
        additional_special_tokens: Names of special tokens without a role; by default all of them.
        affixes: Ids that the library adds before and after each text.
        always_read: Control tokens that are parsed in every text.
    """

    engine: Engine = "auto"
    """Engine that encodes batches; an adapter sets it before it calls this constructor."""
    _batches_segments = True
    """Encode segments as a batch; false in a changed copy, for which no engine is proven."""

    def __init__(
        self,
        *,
        files: Mapping[str, Path],
        pieces: list[str],
        token_bytes: Sequence[bytes | None],
        special_ids: Mapping[SpecialRole, int | None],
        dummy_prefix: DummyPrefix,
        control_tokens: Sequence[ControlToken] | None = None,
        additional_special_tokens: Sequence[str] | None = None,
        affixes: tuple[Sequence[int], Sequence[int]] = ((), ()),
        always_read: Sequence[ControlToken] = (),
    ) -> None:
        self._files = dict(files)
        self._pieces = pieces
        self._table = TokenBytes.from_tokens(token_bytes)
        self._special_ids = dict(special_ids)
        self._dummy_prefix: DummyPrefix = dummy_prefix
        self._control = ControlTokens(
            self._silent_tokens() if control_tokens is None else control_tokens
        )
        self._always_read = ControlTokens(always_read)
        self._additional = additional_special_tokens
        self._prefix, self._suffix = (np.array(ids, np.int32) for ids in affixes)
        self._fast = FastEncoder(
            self.engine,
            build=self._build_engine,
            reference=self._encode_batch,
            table=self._table,
            pieces=self._pieces,
            where=next(iter(files.values()), None),
        )

    @abstractmethod
    def _encode(self, text: str) -> tuple[list[int], Any]:
        """Ids of ``text`` [T] and a result that ``_locate`` can reuse, by the fastest call."""

    @abstractmethod
    def _locate(self, text: str, raw: bytes, encoded: Any) -> tuple[list[int], list[int]]:
        """Ids and byte ends of a ``text`` (its UTF-8 is ``raw``) that the tokens do not spell."""

    @abstractmethod
    def _encode_batch(self, texts: Sequence[str]) -> Iterable[Sequence[int] | IdArray]:
        """Ids of each text, in parallel inside the library where it can."""

    def _build_engine(self) -> GigatokenEngine:
        """The fast engine of this vocabulary, in which no text spells a control token.

        Raises:
            TokenizerError: There is none.
            MissingDependencyError: gigatoken is not installed.
        """
        raise TokenizerError(f"the {self.library} library has no fast engine")

    def _tokens_read(self, parse_special: ParseSpecial) -> ControlTokens:
        """Control tokens that are parsed in a text with ``parse_special``."""
        if isinstance(parse_special, bool):
            return self._control if parse_special else self._always_read
        return self._control.named(parse_special.union(self._always_read.by_name))

    def _user_defined_tokens(self) -> Sequence[ControlToken]:
        """Tokens of the vocabulary that the library matches in any text first."""
        return ()

    def _hiding(self, names: frozenset[str]) -> TableTokenizer:
        """The tokenizer with some of its user-defined tokens as control tokens."""
        raise AssertionError("only a tokenizer with user-defined tokens is asked")

    @property
    def vocab_size(self) -> int:
        return len(self._pieces)

    def text_to_ids(self, text: str, *, parse_special: ParseSpecial = False) -> list[int]:
        utf8(text)
        ids: list[int] = self._prefix.tolist()
        done = 0
        for begin, end, token_id in self._tokens_read(parse_special).find(text):
            ids += self._segment_ids(text, done, begin)
            ids.append(token_id)
            done = end
        ids += self._segment_ids(text, done, len(text))
        ids += self._suffix.tolist()
        return ids

    def text_to_flat_ids(
        self, texts: Sequence[str], *, parse_special: ParseSpecial = False
    ) -> tuple[IdArray, ByteEnds]:
        texts = checked_texts(texts)
        read = self._tokens_read(parse_special)
        aside = [i for i, text in enumerate(texts) if next(read.find(text), None) is not None]
        if not aside:
            return self._with_affixes(*self._fast.encode_batch(texts))
        apart = set(aside)
        rest = self._fast.encode_batch([text for i, text in enumerate(texts) if i not in apart])
        spelled = (self.text_to_ids(texts[i], parse_special=parse_special) for i in aside)
        return interleave(self._with_affixes(*rest), flat_ids(spelled), aside)

    def prepare_engine(self) -> str | None:
        """Build and prove the engine for batches now, for example before a fork.

        Returns:
            Reason why it is not used, in one line; None where it is used.

        Raises:
            TokenizerError: It was asked for by name and cannot be used.
            MissingDependencyError: It was asked for by name and is not installed.
        """
        if self.engine == "reference":
            return "the reference was asked for"
        self._fast.prepare()
        return self._fast.refusal

    def encode_with_byte_ends(
        self, text: str, *, parse_special: ParseSpecial = False
    ) -> tuple[IdArray, ByteEnds]:
        ids, ends = self._encode_around(text, self._tokens_read(parse_special).find(text))
        before, after = len(self._prefix), len(self._suffix)
        if not before and not after:
            return ids, ends
        last = len(utf8(text))
        ends = np.concatenate((np.zeros(before, np.int64), ends, np.full(after, last)))
        return np.concatenate((self._prefix, ids, self._suffix)), ends

    def encode_with_control_spans(
        self, text: str, spans: Sequence[tuple[int, int]]
    ) -> tuple[IdArray, ByteEnds]:
        ids, ends = self._encode_around(text, self._control.find(text, spans))
        written = list(self._markers.find(text, spans))
        if not written or not are_forged(text, written, ids, ends):
            return ids, ends
        names = frozenset(text[match.begin : match.end] for match in written)
        if names not in self._hiders:
            self._hiders[names] = self._hiding(names)
        hiding = self._hiders[names]
        return hiding._encode_around(text, hiding._control.find(text, spans))

    def _continued(self, *, to_the_end: bool) -> TableTokenizer:
        """The tokenizer of text after a control token: itself, unless the library differs there.

        Args:
            to_the_end: No other control token follows.
        """
        return self

    def _encoder(self, text: str, begin: int, end: int) -> TableTokenizer:
        """The tokenizer of a segment of a text."""
        return self if begin == 0 else self._continued(to_the_end=end == len(text))

    def _encode_around(
        self, text: str, matches: Iterable[ControlMatch]
    ) -> tuple[IdArray, ByteEnds]:
        """Ids and byte ends of a text with control tokens at ``matches`` and nowhere else."""
        raw = utf8(text)
        control = np.fromiter(chain.from_iterable(matches), np.int64).reshape(-1, 3)
        bounds = control[:, :2]
        # A segment, maybe empty, is before each control token and behind the last.
        begins = np.concatenate(([0], bounds[:, 1]))
        ends = np.concatenate((bounds[:, 0], [len(text)]))
        is_text = begins < ends
        begins, ends = begins[is_text], ends[is_text]
        ids, byte_ends, counts = self._encode_segments(text, begins.tolist(), ends.tolist())
        if len(raw) != len(text):
            starts = character_starts(raw)
            bounds, begins = starts[bounds], starts[begins]
        byte_ends = byte_ends + np.repeat(begins, counts)
        if len(control):
            sizes = np.ones(2 * len(control) + 1, np.int64)
            sizes[::2] = 0
            sizes[::2][is_text] = counts
            is_control = np.repeat(np.arange(len(sizes)) % 2 == 1, sizes)
            ids = _merged(ids, control[:, 2].astype(np.int32), is_control)
            byte_ends = _merged(byte_ends, bounds[:, 1], is_control)
        if len(byte_ends):
            # Text that gives no token (white space, to some) belongs to the token before it.
            byte_ends[-1] = len(raw)
        return ids, byte_ends

    def _encode_segments(
        self, text: str, begins: Sequence[int], ends: Sequence[int]
    ) -> tuple[IdArray, ByteEnds, NDArray[np.int64]]:
        """Ids, byte ends counted from the begin of each segment, and number of ids of each."""
        encoded: list[tuple[IdArray, ByteEnds, list[int]]] = []
        bounds = zip(begins, ends, strict=True)
        for encoder, places in groupby(bounds, lambda place: self._encoder(text, *place)):
            texts = [text[begin:end] for begin, end in places]
            if len(texts) > 1 and encoder._batches_segments:
                encoded += encoder._encode_as_batch(texts)
            else:
                encoded += map(encoder._encode_one, texts)
        ids = np.concatenate([np.zeros(0, np.int32), *(ids for ids, _, _ in encoded)])
        byte_ends = np.concatenate([np.zeros(0, np.int64), *(ends for _, ends, _ in encoded)])
        return ids, byte_ends, np.array([n for _, _, counts in encoded for n in counts], np.int64)

    def _encode_as_batch(self, texts: Sequence[str]) -> list[tuple[IdArray, ByteEnds, list[int]]]:
        """Results of ``_encode_one`` for texts, combined into one where possible."""
        raws = [text.encode() for text in texts]
        ids, offsets = self._fast.encode_documents(texts, raws, self._encode_each)
        ends, lossy = self._table.ends_within_each(ids, offsets, raws)
        if not lossy:
            return [(ids, ends, np.diff(offsets).tolist())]
        # A library that normalises every text has to locate the ends itself: skip the batch then.
        if len(texts) >= _TELLING:
            self._batches_segments = len(lossy) < len(texts)
        aside = set(lossy)
        return [
            self._encode_one(text)
            if i in aside
            else (ids[begin:end], ends[begin:end], [end - begin])
            for i, (text, (begin, end)) in enumerate(
                zip(texts, pairwise(offsets.tolist()), strict=True)
            )
        ]

    def _encode_one(self, text: str) -> tuple[IdArray, ByteEnds, list[int]]:
        """Ids, byte ends and number of ids of a text without control tokens."""
        ids, ends = self._encode_segment(text, text.encode())
        return ids, ends, [len(ids)]

    def _segment_ids(self, text: str, begin: int, end: int) -> list[int]:
        """Ids of a segment of a text between control tokens, which may be empty."""
        if begin >= end:
            return []
        return self._encoder(text, begin, end)._encode(text[begin:end])[0]

    def _encode_each(self, texts: Sequence[str]) -> Iterable[Sequence[int] | IdArray]:
        """Ids of each of some short texts."""
        return [self._encode(text)[0] for text in texts]

    def _encode_segment(self, text: str, raw: bytes) -> tuple[IdArray, ByteEnds]:
        """Ids and byte ends of a text without control tokens; its UTF-8 is ``raw``."""
        ids, encoded = self._encode(text)
        array = np.array(ids, np.int32)
        ends = self._table.ends_within(array, raw)
        if ends is not None:
            return array, ends
        ids, located = self._locate(text, raw, encoded)
        return np.array(ids, np.int32), np.array(located, np.int64)

    def _with_affixes(self, ids: IdArray, offsets: ByteEnds) -> tuple[IdArray, ByteEnds]:
        """Flat ids of several texts with the affixes around each."""
        before, after = len(self._prefix), len(self._suffix)
        if not before and not after:
            return ids, offsets
        texts = range(len(offsets) - 1)
        parts = [
            part
            for i in texts
            for part in (self._prefix, ids[offsets[i] : offsets[i + 1]], self._suffix)
        ]
        shifted = offsets + (before + after) * np.arange(len(offsets))
        return np.concatenate([np.zeros(0, np.int32), *parts]), shifted

    @property
    def token_table(self) -> TokenBytes:
        """Bytes of every id."""
        return self._table

    def token_bytes(self, token_id: int) -> bytes | None:
        return self._table[token_id]

    def byte_ends(self, ids: Sequence[int] | IdArray) -> ByteEnds:
        return self._table.byte_ends(self._table.as_ids(ids), self._dummy_prefix)

    def token_to_id(self, token: str) -> int:
        return self._id_of_piece[token]

    def id_to_token(self, token_id: int) -> str:
        return self._pieces[self._table.check(token_id)]

    def is_control(self, token_id: int) -> bool:
        token_id = self._table.check(token_id)
        return bool(self._table.is_control[token_id]) or token_id in self._control.ids

    def special_id(self, role: SpecialRole) -> int | None:
        return self._special_ids.get(role)

    @property
    def additional_special_tokens_ids(self) -> list[int]:
        if self._additional is not None:
            return [self.token_to_id(name) for name in self._additional]
        with_role = set(self._special_ids.values())
        return [
            token.token_id
            for token in self._silent_tokens()
            if token.token_id not in with_role and token.name not in self._fillers
        ]

    @property
    def _fillers(self) -> frozenset[str]:
        """Names of placeholder ids."""
        return frozenset()

    def files(self) -> Mapping[str, Path]:
        return dict(self._files)

    def fingerprint(self) -> str:
        return self._fingerprint

    @cached_property
    def _markers(self) -> ControlTokens:
        """User-defined tokens that are ordinary text until a template writes them."""
        return ControlTokens(markers(self._user_defined_tokens()))

    @cached_property
    def _hiders(self) -> dict[frozenset[str], TableTokenizer]:
        """Tokenizers of contents that spell markers of the template, by the markers' names."""
        return {}

    @cached_property
    def _fingerprint(self) -> str:
        return self._table.fingerprint(self._pieces.__getitem__)

    @cached_property
    def _id_of_piece(self) -> dict[str, int]:
        """Id of each piece; of ids with the same piece a control token's, else the first."""
        ids = {name: token.token_id for name, token in self._control.by_name.items()}
        for token_id, piece in enumerate(self._pieces):
            if piece:
                ids.setdefault(piece, token_id)
        return ids

    def _silent_tokens(self) -> list[ControlToken]:
        """Every id with a name and without bytes, including the unknown token."""
        silent = np.flatnonzero(self._table.is_control).tolist()
        return [ControlToken(self._pieces[i], i) for i in silent if self._pieces[i]]

    def _decode_segments(
        self,
        ids: Sequence[int],
        decode: Callable[[IdArray], str],
        is_named: NDArray[np.bool_],
        *,
        skip_special_tokens: bool,
    ) -> str:
        """Text of ``ids``: decoded between control tokens, which are written by name or left out.

        Args:
            ids: A stream of ids.
            decode: Text of a run of ids that are no control tokens.
            is_named: Ids to write by name [V].
            skip_special_tokens: Leave them out and decode what remains as one run.
        """
        array = self._table.as_ids(ids)
        named = is_named[array]
        if skip_special_tokens or not named.any():
            return decode(array[~named])
        parts = []
        begin = 0
        for at in np.flatnonzero(named).tolist():
            parts += [decode(array[begin:at]), self._pieces[array[at]]]
            begin = at + 1
        return "".join([*parts, decode(array[begin:])])


def _merged(rest: NDArray[Any], chosen: NDArray[Any], is_chosen: NDArray[np.bool_]) -> NDArray[Any]:
    """An array of the values ``chosen`` at the mask ``is_chosen``, and ``rest`` elsewhere."""
    merged = np.empty(len(is_chosen), rest.dtype)
    merged[is_chosen] = chosen
    merged[~is_chosen] = rest
    return merged
