"""Old tokens that each token of a new vocabulary is made of.

A token whose bytes the old vocabulary has is a copy. Of several old ids with equal bytes, as ``A``
and ``<0x41>`` of a vocabulary with byte fallback, it is that of the one that the tokenizer emits.
A new id that its own tokenizer never emits copies the old id of its own name, or is the mean: a
second copy would take half of the first one's probability.

Control tokens are copies by name, then by role, those of turns in chat templates last; an old one
is copied once at most. A token that is spelled by old ones has these as its pieces; what is left is
the mean of all old tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Final

import numpy as np
from numpy.typing import NDArray

from megatron_ext.alignment.control_pairs import match_control_tokens
from megatron_ext.conversation.encoded_conversation import encode_conversation
from megatron_ext.conversation.message import byte_offsets
from megatron_ext.conversation.prompt_format import prompt_config_of
from megatron_ext.errors import MegatronExtError
from megatron_ext.projection.builder import emitted_tokens, match_ordinary_tokens
from megatron_ext.projection.speller import Speller
from megatron_ext.tokenizers import MegatronTokenizerText
from megatron_ext.tokenizers.base import ByteTokenizer

NO_SOURCE: Final = -1


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RowSources:
    """Copies and pieces of the tokens of a new vocabulary."""

    copied: NDArray[np.int64]
    """[V'] old id, or ``NO_SOURCE``."""

    pieces: Sequence[Sequence[int]]
    """[V'] old ids that spell a token, in order; empty for copies and where nothing does."""

    is_control: NDArray[np.bool_]
    """[V'] control tokens and unused ids, which have no bytes."""

    piece_bytes: NDArray[np.int64]
    """[V] bytes of each old token; 0 for control tokens."""

    is_identity: bool = False
    """Whether the two vocabularies are the same, id by id."""

    @property
    def spelled(self) -> NDArray[np.int64]:
        """New ids that have pieces, ascending."""
        return np.flatnonzero([len(pieces) > 0 for pieces in self.pieces]).astype(np.int64)

    @property
    def unmatched(self) -> NDArray[np.int64]:
        """New ids that nothing stands for, ascending; their rows are the mean."""
        has_pieces = np.array([len(pieces) > 0 for pieces in self.pieces], dtype=np.bool_)
        return np.flatnonzero((self.copied == NO_SOURCE) & ~has_pieces).astype(np.int64)

    @property
    def anchors(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """New and old ids [N] of ordinary tokens that are copies."""
        new = np.flatnonzero((self.copied != NO_SOURCE) & ~self.is_control).astype(np.int64)
        return new, self.copied[new]


def row_sources(new: ByteTokenizer, old: ByteTokenizer) -> RowSources:
    """Find what each token of ``new`` is made of in the vocabulary of ``old``."""
    news, olds = Speller(new), Speller(old)
    is_control = np.zeros(len(news.tokens), dtype=np.bool_)
    is_control[news.control_ids] = True
    lengths = np.array([len(token or b"") for token in olds.tokens], dtype=np.int64)
    if new.fingerprint() == old.fingerprint():
        return RowSources(
            copied=np.arange(len(news.tokens), dtype=np.int64),
            pieces=[()] * len(news.tokens),
            is_control=is_control,
            piece_bytes=lengths,
            is_identity=True,
        )
    copied = match_ordinary_tokens(news, olds)
    never_emitted = ~emitted_tokens(news) & ~is_control
    spelled_alike = {
        (old.id_to_token(i), olds.tokens[i]): i
        for i in np.flatnonzero(~emitted_tokens(olds)).tolist()
        if olds.tokens[i]
    }
    for token_id in np.flatnonzero(never_emitted).tolist():
        name = (new.id_to_token(token_id), news.tokens[token_id])
        copied[token_id] = spelled_alike.get(name, NO_SOURCE)
    for token_id, source in _control_sources(new, old, news, olds).items():
        copied[token_id] = source
    pieces: list[Sequence[int]] = [()] * len(news.tokens)
    lacking = np.flatnonzero((copied == NO_SOURCE) & ~is_control & ~never_emitted).tolist()
    spellings = olds.spell([news.tokens[token_id] or b"" for token_id in lacking])
    for token_id, spelling in zip(lacking, spellings, strict=True):
        pieces[token_id] = spelling
    return RowSources(copied=copied, pieces=pieces, is_control=is_control, piece_bytes=lengths)


def _control_sources(
    new: ByteTokenizer, old: ByteTokenizer, news: Speller, olds: Speller
) -> dict[int, int]:
    """Old control id of each new one that has one: by name, then by role, each once at most."""
    of_name = {old.id_to_token(i): i for i in reversed(olds.control_ids.tolist())}
    of_name.pop("", None)
    sources: dict[int, int] = {}
    taken: set[int] = set()

    def take(new_id: int, old_id: int | None) -> None:
        if old_id is not None and old_id not in taken and new_id not in sources:
            sources[new_id] = old_id
            taken.add(old_id)

    for token_id in news.control_ids.tolist():
        take(token_id, of_name.get(new.id_to_token(token_id)))
    by_role = match_control_tokens(new, old, news.control_ids)
    # The end of a text is what a model predicts; its beginning is only read.
    for token_id in (new.eos_id, *by_role):
        if token_id is not None:
            take(token_id, by_role.get(token_id))
    markers = turn_markers(old)
    for role, token_id in turn_markers(new).items():
        take(token_id, markers.get(role))
    return sources


_TURNS: Final = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "x"}]


def turn_markers(tokenizer: ByteTokenizer) -> dict[str, int]:
    """Control tokens with which a chat template ends an answer (``end``), and opens (``open``) and
    closes (``header``) what it writes before one; those that it has."""
    if not isinstance(tokenizer, MegatronTokenizerText) or tokenizer.chat_template is None:
        return {}
    try:
        encoded = encode_conversation(tokenizer, _TURNS, prompt_config_of("auto", tokenizer))
    except MegatronExtError:
        # A template that asks for more than two plain turns.
        return {}
    offsets = byte_offsets(encoded.text)
    places: dict[str, tuple[int, int]] = {}
    for start, end, its in encoded.spans:
        if its.message == 1:
            places[its.field] = int(offsets[start]), int(offsets[end])
    turn = [(offsets[start], offsets[end]) for start, end, its in encoded.spans if its.turn == 1]
    if "content" not in places or not turn:
        return {}
    content = places["content"]
    markers: dict[str, int] = {}
    begins = np.concatenate([[0], encoded.byte_ends[:-1]]).tolist()
    for begin, token in zip(begins, encoded.ids.tolist(), strict=True):
        if not tokenizer.is_control(token) or not turn[0][0] <= begin < turn[-1][1]:
            continue
        if begin >= content[1]:
            markers.setdefault("end", token)
        elif begin < content[0]:
            markers.setdefault("open", token)
        # What stands right behind the role, not what opens a thought.
        if "role" in places and begin == places["role"][1]:
            markers["header"] = token
    return markers


def flattened(
    rows: Sequence[Sequence[int]],
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Bounds [V' + 1] and entries of rows of different lengths."""
    counts = np.fromiter(map(len, rows), dtype=np.int64, count=len(rows))
    bounds = np.concatenate([[0], np.cumsum(counts)])
    flat = np.fromiter(chain.from_iterable(rows), dtype=np.int64, count=int(counts.sum()))
    return bounds, flat
