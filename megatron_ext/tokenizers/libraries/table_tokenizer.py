"""Base of adapters whose vocabulary is fixed, so that a table holds the bytes of each id."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from megatron_ext.errors import TokenizerError
from megatron_ext.tokenizers.base import ParseSpecial
from megatron_ext.tokenizers.config import Engine
from megatron_ext.tokenizers.engine import FastEncoder, GigatokenEngine, flat_ids, interleave
from megatron_ext.tokenizers.libraries.segment_tokenizer import SegmentTokenizer
from megatron_ext.tokenizers.special_ids import are_forged, markers
from megatron_ext.tokenizers.special_tokens import ControlToken, ControlTokens, SpecialRole
from megatron_ext.tokenizers.token_bytes import DummyPrefix, TokenBytes, utf8
from megatron_ext.tokenizers.token_ids import ByteEnds, IdArray, checked_texts


class TableTokenizer(SegmentTokenizer):
    """Base of adapters, which give ids and, where their normaliser changes text, spans.

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
