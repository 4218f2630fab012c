"""The head of a published vocabulary: a real tokenizer that a small model can learn quickly.

Merges come in the order in which they were learnt, so the first ids of a BPE vocabulary are a
vocabulary themselves: the one that training would have stopped at. SentencePiece lists single
characters behind all merges; of these a head keeps ASCII and the space, and spells others by bytes.
"""

from __future__ import annotations

import base64
import json
from pathlib import Path

from megatron_ext.errors import TokenizerError
from megatron_ext.files import write_bytes, write_text
from megatron_ext.tokenizers.libraries.sentencepiece_model import (
    PIECE,
    SELF_TEST,
    SPACE,
    fields,
    piece_name,
)
from megatron_ext.tokenizers.libraries.tiktoken_file import TiktokenFile, read_tiktoken_file
from megatron_ext.tokenizers.libraries.tiktoken_layout import MEGATRON_SPECIAL_TOKENS
from megatron_ext.tokenizers.tokenizer_files import file_kind

SPECIAL_TOKENS = (
    *MEGATRON_SPECIAL_TOKENS,
    *(f"<SPECIAL_{i}>" for i in range(7, 16)),
)
"""As Megatron names those of a rank list."""

_BYTE_PIECES = 3 + 256
"""Pieces that a SentencePiece model begins with: unknown, begin, end, and one a byte."""


def write_head(source: Path, size: int, path: Path) -> Path:
    """Write the first ``size`` ids of ``source``, special tokens included.

    Args:
        source: A SentencePiece model of BPE with byte fallback, or a vocabulary that tiktoken reads
            and that is known to have a pattern: a Tekken file, or a published rank file.
        size: Ids to keep.
        path: The new file: a SentencePiece model, or a Tekken file.

    Raises:
        TokenizerError: It has no pattern, or fewer ids.
    """
    if file_kind(source).library == "sentencepiece":
        write_bytes(path, _sentencepiece_head(source, size))
    else:
        _write_tiktoken_head(source, size, path)
    return path


def _sentencepiece_head(source: Path, size: int) -> bytes:
    """A serialised model of the first pieces, and of single characters from anywhere."""
    model = source.read_bytes()
    pieces = []
    others = []
    for number, length, begin, end in fields(model):
        if number == PIECE:
            pieces.append((piece_name(model[end - length : end]).decode(), model[begin:end]))
        elif number != SELF_TEST:
            others.append(model[begin:end])
    is_character = [name == SPACE or (len(name) == 1 and name.isascii()) for name, _ in pieces]
    listed = size - sum(is_character)
    if not _BYTE_PIECES < listed <= len(pieces) - sum(is_character):
        raise _no_head(source, size, _BYTE_PIECES + sum(is_character) + 1, len(pieces))
    head = [field for _, field in pieces[:listed]]
    head += [field for (_, field), kept in zip(pieces, is_character, strict=True) if kept]
    return b"".join([*head, *others])


def _no_head(source: Path, size: int, least: int, most: int) -> TokenizerError:
    return TokenizerError(
        "no such head of the vocabulary",
        got=size,
        expected=f"{least} to {most} ids",
        where=source,
    )


def _write_tiktoken_head(source: Path, size: int, path: Path) -> None:
    whole = read_tiktoken_file(source)
    count = size - len(SPECIAL_TOKENS)
    tokens = sorted(whole.ranks, key=whole.ranks.__getitem__)
    if not 256 <= count <= len(tokens):
        special = len(SPECIAL_TOKENS)
        raise _no_head(source, size, 256 + special, len(tokens) + special)
    document = {
        "config": {
            "pattern": _pattern(whole),
            "num_vocab_tokens": count,
            "default_vocab_size": size,
            "default_num_special_tokens": len(SPECIAL_TOKENS),
            "version": "v7",
        },
        "vocab": [
            {
                "rank": rank,
                "token_bytes": base64.b64encode(token).decode(),
                "token_str": token.decode(errors="replace"),
            }
            for rank, token in enumerate(tokens[:count])
        ],
        "special_tokens": [
            {"rank": rank, "token_str": name, "is_control": True}
            for rank, name in enumerate(SPECIAL_TOKENS)
        ],
    }
    write_text(path, json.dumps(document))


def _pattern(whole: TiktokenFile) -> str:
    if whole.published is not None:
        return whole.published.pattern
    try:
        return str(whole.says["pattern"])
    except KeyError:
        raise TokenizerError(
            "nothing says how this vocabulary cuts text before merging",
            got="a rank file that is not among the published ones",
            expected="a Tekken file, or one of OpenAI's or Meta's rank files",
            where=whole.file,
        ) from None
