"""Spelling of bytes with a vocabulary's tokens, and options of building a projection."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray

from megatron_ext.errors import ProjectionError
from megatron_ext.projection.compressed_rows import check_top_k
from megatron_ext.tokenizers.base import ByteTokenizer
from megatron_ext.tokenizers.token_bytes import TokenBytes


class Speller:
    """Spelling of byte strings with the ids of a tokenizer, as in the middle of a text.

    Args:
        tokenizer: Tokenizer of the ids; control tokens are never used.
    """

    def __init__(self, tokenizer: ByteTokenizer) -> None:
        self._tokenizer = tokenizer
        self.tokens = TokenBytes.of(tokenizer).tokens()
        """[V] bytes of each id; None of a control token or an unused id."""
        self._bytes = [token or b"" for token in self.tokens]
        # SentencePiece adds a space to the start of every text. After a line break, which it never
        # merges, the pieces are those of the middle of a text.
        starts_clean = self._trailing(tokenizer.text_to_ids("a"), b"a")
        self._context = "" if starts_clean else "\n"
        self._id_of = self._preferred_ids()
        self._longest = max((len(token) for token in self._id_of), default=0)

    @property
    def emitted_ids(self) -> Collection[int]:
        """Ids with bytes; of several with the same bytes only the one that ``id_of`` returns."""
        return self._id_of.values()

    @property
    def control_ids(self) -> NDArray[np.int64]:
        """Ids without bytes of their own, ascending."""
        return np.flatnonzero([token is None for token in self.tokens]).astype(np.int64)

    def id_of(self, token: bytes) -> int | None:
        """Id with exactly these bytes, or None.

        Of several, as ``A`` and ``<0x41>`` of a vocabulary with byte fallback, it is the one that
        the tokenizer emits, and if it emits none of them the lowest.
        """
        return self._id_of.get(token)

    def spell(self, tokens: Sequence[bytes]) -> list[list[int]]:
        """Spell each of ``tokens``: ids whose joined bytes are the token; empty where impossible.

        Valid UTF-8 is tokenized as in the middle of a text. Parts of characters, and text that the
        tokenizer would normalise, are cut into the longest tokens that fit, from the left.
        """
        spelled = self._encode(tokens)
        return [ids or self._segment(token) for ids, token in zip(spelled, tokens, strict=True)]

    def _preferred_ids(self) -> dict[bytes, int]:
        preferred: dict[bytes, int] = {}
        shared: dict[bytes, set[int]] = {}
        for token_id, token in enumerate(self._bytes):
            if token and preferred.setdefault(token, token_id) != token_id:
                shared.setdefault(token, {preferred[token]}).add(token_id)
        for (token, ids), emitted in zip(shared.items(), self._encode(list(shared)), strict=True):
            if len(emitted) == 1 and emitted[0] in ids:
                preferred[token] = emitted[0]
        return preferred

    def _encode(self, tokens: Sequence[bytes]) -> list[list[int]]:
        """Ids of each of ``tokens`` in the middle of a text; empty where they do not spell it."""
        texts = {at: text for at, token in enumerate(tokens) if (text := _text_of(token))}
        batch = self._tokenizer.text_to_ids_batch([self._context + t for t in texts.values()])
        spelled: list[list[int]] = [[] for _ in tokens]
        for at, ids in zip(texts, batch, strict=True):
            spelled[at] = self._trailing(ids.tolist(), tokens[at])
        return spelled

    def _trailing(self, ids: list[int], token: bytes) -> list[int]:
        """Trailing ``ids`` with bytes, if they spell ``token``; else none."""
        left, at = len(token), len(ids)
        while left > 0 and at > 0:
            at -= 1
            left -= len(self._bytes[ids[at]])
        spelled = [self._bytes[piece] for piece in ids[at:]]
        if b"".join(spelled) != token:
            return []
        return [piece for piece, text in zip(ids[at:], spelled, strict=True) if text]

    def _segment(self, token: bytes) -> list[int]:
        ids, at = [], 0
        while at < len(token):
            for stop in range(min(len(token), at + self._longest), at, -1):
                token_id = self._id_of.get(token[at:stop])
                if token_id is not None:
                    break
            else:
                return []
            ids.append(token_id)
            at = stop
        return ids


def _text_of(token: bytes) -> str | None:
    try:
        return token.decode()
    except UnicodeDecodeError:
        return None


ProjectionMethod = Literal["exact", "retokenized", "first_piece", "mined"]

_ONE_ENTRY: Final = ("first_piece", "mined")
"""Methods that leave one entry in a row."""

PIECE_DECAY = 0.1
"""Weight of each piece relative to the one before: 0.9, 0.09, ... before a row is normalised."""


@dataclass(kw_only=True, frozen=True, slots=True)
class ProjectionOptions:
    """Options of ``SparseProjection.from_tokenizers``.

    Raises:
        ProjectionError: An invalid number, or options that exclude each other.
    """

    method: ProjectionMethod = "retokenized"
    """Entries of a token that the teacher lacks. ``exact``: none. ``retokenized``: the pieces that
    the teacher spells it with, in falling shares. ``first_piece``: the first of them alone.
    ``mined``: the one token that is nearest in spelling (``nearest_tokens``)."""

    top_k: int = 4
    """Most teacher tokens in a row."""

    pieces: int | None = None
    """Most pieces of a spelling that count; ``top_k`` where None."""

    decay: float = PIECE_DECAY
    """Weight of each piece of a spelling relative to the one before it; 1 weighs all alike."""

    reverse_pass: bool = False
    """Also spell the tokens that the student lacks with the student's, and add these entries.
    Exact rows and control tokens stay as they are."""

    control_similarity: float | None = None
    """Least similarity of names, above 0 and at most 1, at which a control token without a
    match by role or name maps to another; None leaves its row empty."""

    def __post_init__(self) -> None:
        check_top_k(self.top_k)
        if self.pieces is not None and self.pieces < 1:
            raise ProjectionError(
                "no piece of a spelling counts",
                got=self.pieces,
                expected="at least 1, or None",
                where="pieces",
            )
        if not 0 < self.decay <= 1:
            raise ProjectionError(
                "the decay of pieces cannot be used",
                got=self.decay,
                expected="above 0 and at most 1",
                where="decay",
            )
        if self.control_similarity is not None and not 0 < self.control_similarity <= 1:
            raise ProjectionError(
                "the least similarity of control tokens cannot be used",
                got=self.control_similarity,
                expected="above 0 and at most 1, or None",
                where="control_similarity",
            )
        if self.method in _ONE_ENTRY and self.reverse_pass:
            raise ProjectionError(
                f"a reverse pass adds entries to rows that {self.method} keeps at one",
                got=f"method {self.method} with reverse_pass",
                fix="use the method retokenized",
            )

    @property
    def piece_limit(self) -> int:
        """Most pieces of a spelling."""
        return self.top_k if self.pieces is None else self.pieces

    @property
    def row_limit(self) -> int:
        """Most entries of a row."""
        return 1 if self.method in _ONE_ENTRY else self.top_k
