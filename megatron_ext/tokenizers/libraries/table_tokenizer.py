"""What every library with a fixed vocabulary answers from its table of bytes."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_ext.tokenizers.base import ByteEnds, IdArray, MegatronTokenizerTextAbstract
from megatron_ext.tokenizers.special_names import SpecialRole
from megatron_ext.tokenizers.token_bytes import DummyPrefix, TokenBytes, utf8


class TableTokenizer(MegatronTokenizerTextAbstract):
    """An adapter that gives ids and, where its normaliser changes text, spans; the rest is here.

    Args:
        pieces: Display string of each id [V]; the empty string marks an unused id.
        token_bytes: Bytes of each id [V]; None for a control token or an unused id.
        special_ids: Id of each special role that the tokenizer has.
        dummy_prefix: Which stretches of text start with a space that the library puts there.
    """

    def __init__(
        self,
        *,
        pieces: list[str],
        token_bytes: Sequence[bytes | None],
        special_ids: dict[SpecialRole, int | None],
        dummy_prefix: DummyPrefix,
    ) -> None:
        self._pieces = pieces
        self._table = TokenBytes.from_tokens(token_bytes)
        self._special_ids = special_ids
        self._dummy_prefix: DummyPrefix = dummy_prefix

    @abstractmethod
    def _encode(self, text: str, *, parse_special: bool) -> tuple[list[int], Any]:
        """Ids of ``text`` [T] and whatever ``_locate`` can use again, by the fastest call."""

    @abstractmethod
    def _locate(
        self, text: str, raw: bytes, encoded: Any, *, parse_special: bool
    ) -> tuple[list[int], list[int]]:
        """Ids and byte ends of a ``text`` (its UTF-8 is ``raw``) that the tokens do not spell."""

    @property
    def vocab_size(self) -> int:
        return len(self._pieces)

    @property
    def pieces(self) -> list[str]:
        """Display string of every id, a new list."""
        return list(self._pieces)

    def text_to_ids(self, text: str) -> list[int]:
        utf8(text)
        return self._encode(text, parse_special=False)[0]

    def encode_with_byte_ends(
        self, text: str, *, parse_special: bool = False
    ) -> tuple[IdArray, ByteEnds]:
        raw = utf8(text)
        ids, encoded = self._encode(text, parse_special=parse_special)
        array = np.array(ids, np.int32)
        table = self._written_table if parse_special else self._table
        ends = table.ends_within(array, raw)
        if ends is not None:
            return array, ends
        ids, located = self._locate(text, raw, encoded, parse_special=parse_special)
        return np.array(ids, np.int32), np.array(located, np.int64)

    def token_bytes(self, token_id: int) -> bytes | None:
        return self._table[token_id]

    def byte_ends(self, ids: Sequence[int] | IdArray) -> ByteEnds:
        return self._table.byte_ends(self._table.as_ids(ids), self._dummy_prefix)

    def token_to_id(self, token: str) -> int:
        return self._id_of_piece[token]

    def id_to_token(self, token_id: int) -> str:
        self._table.check(token_id)
        return self._pieces[token_id]

    @property
    def bos_id(self) -> int | None:
        return self._special_ids.get("bos")

    @property
    def eos_id(self) -> int | None:
        return self._special_ids.get("eos")

    @property
    def pad_id(self) -> int | None:
        return self._special_ids.get("pad")

    @property
    def unk_id(self) -> int | None:
        return self._special_ids.get("unk")

    def fingerprint(self) -> str:
        return self._fingerprint

    @cached_property
    def _fingerprint(self) -> str:
        return self._table.fingerprint(self._pieces.__getitem__)

    @cached_property
    def _id_of_piece(self) -> dict[str, int]:
        """Id of each piece; where two ids show alike, the first."""
        ids: dict[str, int] = {}
        for token_id, piece in enumerate(self._pieces):
            if piece:
                ids.setdefault(piece, token_id)
        return ids

    @cached_property
    def _written_table(self) -> TokenBytes:
        """The table of a text that spells its control tokens out."""
        return TokenBytes.from_tokens(
            self._pieces[i].encode() if control else self._table[i]
            for i, control in enumerate(self._table.is_control.tolist())
        )

    def _decode_stretches(
        self,
        ids: Sequence[int],
        decode: Callable[[IdArray], str],
        is_named: NDArray[np.bool_],
        *,
        skip_special_tokens: bool,
    ) -> str:
        """Text of ``ids``: ``decode`` between control tokens, and these by name or not at all.

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
