"""Index of the character in which each token of a given stream begins.

Shape letters: T tokens, N bytes, M characters.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from megatron_ext.errors import TokenizerError
from megatron_ext.tokenizers.token_bytes import character_starts, utf8
from megatron_ext.tokenizers.token_ids import ByteEnds, integers

if TYPE_CHECKING:
    from megatron_ext.tokenizers.base import MegatronTokenizerTextAbstract


def text_offsets(
    tokenizer: MegatronTokenizerTextAbstract, ids: Sequence[int], text: str
) -> list[int]:
    """Index of the character of ``text`` in which each of ``ids`` begins [T].

    Args:
        tokenizer: Adapter of the library.
        ids: A tokenization of ``text``, or any stream that decodes to it, with control tokens
            written by name or left out, and with bytes that are not UTF-8.
        text: The text.

    Raises:
        TokenizerError: ``ids`` do not decode to ``text``, or one is outside the vocabulary.
    """
    stream: list[int] = integers(ids).tolist()
    raw = utf8(text)
    ends = _ends_of_encoding(tokenizer, stream, text)
    if ends is not None:
        return characters_of(character_starts(raw), ends)
    for named in (False, True):
        pieces = _pieces(tokenizer, stream, named=named)
        starts = _starts_in(b"".join(pieces), text)
        if starts is not None:
            return characters_of(starts, np.cumsum([len(piece) for piece in pieces]))
    return _by_prefixes(tokenizer, stream, text)


def _ends_of_encoding(
    tokenizer: MegatronTokenizerTextAbstract, ids: list[int], text: str
) -> ByteEnds | None:
    """Byte ends [T] if the library encodes the text to exactly these ids, else None."""
    for parse_special in (False, True):
        try:
            encoded_ids, ends = tokenizer.encode_with_byte_ends(text, parse_special=parse_special)
        except TokenizerError:
            # The null tokenizer, for one, refuses names of special tokens.
            continue
        if encoded_ids.tolist() == ids:
            return ends
    return None


def _pieces(
    tokenizer: MegatronTokenizerTextAbstract, ids: list[int], *, named: bool
) -> list[bytes]:
    """Bytes that each token adds to the stream: its name or nothing for a control token."""
    lengths = np.diff(tokenizer.byte_ends(ids), prepend=0).tolist()
    pieces = []
    for token_id, length in zip(ids, lengths, strict=True):
        token = tokenizer.token_bytes(token_id)
        if token is None:
            pieces.append(tokenizer.id_to_token(token_id).encode() if named else b"")
        else:
            # A dummy prefix is in the token's bytes and not in the text's.
            pieces.append(token[len(token) - length :])
    return pieces


def _starts_in(raw: bytes, text: str) -> NDArray[np.int64] | None:
    """Begin of each character of ``text`` in ``raw`` [M + 1]; None unless it decodes to it."""
    if raw.decode(errors="replace") != text:
        return None
    starts: list[int] = []
    done = 0
    while done < len(raw):
        try:
            good, bad = raw[done:].decode(), 0
        except UnicodeDecodeError as error:
            good, bad = raw[done : done + error.start].decode(), error.end - error.start
        lengths = [len(character.encode()) for character in good]
        starts += accumulate(lengths[:-1], initial=done) if lengths else ()
        done += sum(lengths)
        if bad:
            # One U+FFFD for each run of undecodable bytes.
            starts.append(done)
            done += bad
    return np.array([*starts, len(raw)])


def characters_of(starts: NDArray[np.int64], ends: ByteEnds) -> list[int]:
    """Index of the character in which each token begins [T]; characters are at ``starts``."""
    begins = np.concatenate(([0], ends[:-1]))[: len(ends)]
    characters: list[int] = (np.searchsorted(starts, begins, side="right") - 1).tolist()
    return characters


def _by_prefixes(tokenizer: MegatronTokenizerTextAbstract, ids: list[int], text: str) -> list[int]:
    """Offsets by decoding every prefix, for libraries that clean up white space in decoding."""
    for skip in (True, False):
        if tokenizer.ids_to_text(ids, skip_special_tokens=skip) != text:
            continue
        lengths = [
            len(tokenizer.ids_to_text(ids[:i], skip_special_tokens=skip)) for i in range(len(ids))
        ]
        return [min(length, len(text)) for length in accumulate(lengths, max)]
    raise TokenizerError(
        "the ids are not a tokenization of the text",
        got=f"ids that decode to {tokenizer.ids_to_text(ids)[:40]!r}",
        expected=repr(text[:40]),
    )
