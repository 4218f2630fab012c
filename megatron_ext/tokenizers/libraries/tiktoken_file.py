"""Contents of tiktoken vocabulary files, and the published vocabularies and patterns.

Base64 rank files state neither pattern nor special tokens, so published ones are recognised by
their contents. The alternatives of a pattern stand in the order in which they are tried: words,
digits, signs, line ends, white space.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from megatron_ext.errors import TokenizerError
from megatron_ext.tokenizers.tokenizer_files import read_json, require_library

_BEFORE_WORD = r"[^\r\n\p{L}\p{N}]?"
_UPPER, _LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"


def _cased_words(ending: str) -> str:
    """Words cut where lower case is followed by upper case."""
    return (
        rf"{_BEFORE_WORD}[{_UPPER}]*[{_LOWER}]+{ending}"
        rf"|{_BEFORE_WORD}[{_UPPER}]+[{_LOWER}]*{ending}"
    )


PATTERNS: Mapping[str, str] = {
    "v1": r"[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+",
    "v2": "|".join(
        (
            _cased_words(""),
            r"\p{N}",
            r" ?[^\s\p{L}\p{N}]+[\r\n/]*",
            r"\s*[\r\n]+",
            r"\s+(?!\S)",
            r"\s+",
        )
    ),
}
"""Megatron's named patterns."""

R50K = "|".join(
    (
        r"'(?:[sdmt]|ll|ve|re)",
        r" ?\p{L}++",
        r" ?\p{N}++",
        r" ?[^\s\p{L}\p{N}]++",
        r"\s++$|\s+(?!\S)|\s",
    )
)
"""GPT-2's, as r50k_base and p50k_base have it."""

CL100K = "|".join(
    (
        r"'(?i:[sdmt]|ll|ve|re)",
        rf"{_BEFORE_WORD}+\p{{L}}++",
        r"\p{N}{1,3}+",
        r" ?[^\s\p{L}\p{N}]++[\r\n]*+",
        r"\s++$|\s*[\r\n]|\s+(?!\S)|\s",
    )
)
"""GPT-4's."""

O200K = "|".join(
    (
        _cased_words(f"{_CONTRACTION}?"),
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n/]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)
"""GPT-4o's."""

LLAMA_3 = "|".join(
    (
        _CONTRACTION,
        rf"{_BEFORE_WORD}\p{{L}}+",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)
"""Llama 3's."""


def pattern_of(name: str) -> str:
    """The pattern of an option: the name of one of Megatron's, or a regular expression.

    Raises:
        TokenizerError: It is a word that names no pattern.
    """
    if re.fullmatch(r"\w+", name) and name not in PATTERNS:
        raise TokenizerError(
            "unknown tiktoken pattern",
            got=repr(name),
            expected="v1, v2 or a regular expression",
            where="pattern",
        )
    return PATTERNS.get(name, name)


@dataclass(frozen=True, slots=True)
class PublishedVocabulary:
    """Facts of a published rank file that the file does not state."""

    name: str
    """Name in tiktoken; ``llama3`` for Meta's."""
    num_ranks: int
    """Number of lines."""
    digest: str
    """``rank_digest`` of its ranks."""
    pattern: str
    """Regular expression that cuts the text."""
    special_ids: Mapping[str, int]
    """Id of each special token."""


def published_vocabulary(ranks: Mapping[bytes, int]) -> PublishedVocabulary | None:
    """The published vocabulary with exactly these ranks; None for other ranks."""
    rows = [row for row in PUBLISHED if row.num_ranks == len(ranks)]
    digest = rank_digest(ranks) if rows else ""
    return next((row for row in rows if row.digest == digest), None)


def rank_digest(ranks: Mapping[bytes, int]) -> str:
    """SHA-256 (hex) of ranks, in order, of the lengths of their tokens and of the tokens."""
    rows = sorted((rank, token) for token, rank in ranks.items())
    digest = hashlib.sha256(np.array([rank for rank, _ in rows], "<i8").tobytes())
    digest.update(np.array([len(token) for _, token in rows], "<i8").tobytes())
    digest.update(b"".join(token for _, token in rows))
    return digest.hexdigest()


def _llama_3_special_ids() -> dict[str, int]:
    """The 256 special tokens of Llama 3.1 and later; Llama 3 keeps some of these free."""
    named = {
        0: "<|begin_of_text|>",
        1: "<|end_of_text|>",
        4: "<|finetune_right_pad_id|>",
        6: "<|start_header_id|>",
        7: "<|end_header_id|>",
        8: "<|eom_id|>",
        9: "<|eot_id|>",
        10: "<|python_tag|>",
    }
    free = (i for i in range(256) if i not in named)
    reserved = {i: f"<|reserved_special_token_{n}|>" for n, i in enumerate(free)}
    return {name: 128000 + i for i, name in sorted((named | reserved).items())}


PUBLISHED = (
    PublishedVocabulary(
        "r50k_base",
        50256,
        "f20abb9232bc4c470775de87a1860f01bb4cf83f9e379070959ab65bfdbd1770",
        R50K,
        {"<|endoftext|>": 50256},
    ),
    PublishedVocabulary(
        "p50k_base",
        50280,
        "a82cc3820597b79c734cfdf89c2397eb837a2f40a0c07bfba3412721a844d541",
        R50K,
        {"<|endoftext|>": 50256},
    ),
    PublishedVocabulary(
        "cl100k_base",
        100256,
        "978dd8b84676858022e9110e9a8e6fccd3a8edf5b350882bff0452909df3d7aa",
        CL100K,
        {
            "<|endoftext|>": 100257,
            "<|fim_prefix|>": 100258,
            "<|fim_middle|>": 100259,
            "<|fim_suffix|>": 100260,
            "<|endofprompt|>": 100276,
        },
    ),
    PublishedVocabulary(
        "o200k_base",
        199998,
        "f7c6a8755cb027d16b7c82e1d2800337790ded75d50c7b08967430cd06406e40",
        O200K,
        {"<|endoftext|>": 199999, "<|endofprompt|>": 200018},
    ),
    PublishedVocabulary(
        "llama3",
        128000,
        "f4c1520eadaafffd5a1fe294cc19d2017996389d54f4fea6a0edf2782eaf6a1c",
        LLAMA_3,
        _llama_3_special_ids(),
    ),
)


EARLY_TEKKEN_SPECIAL_TOKENS = (
    *("<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]"),
    *("[TOOL_RESULTS]", "[/TOOL_RESULTS]", "[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]"),
    *("[IMG_END]", "[PREFIX]", "[MIDDLE]", "[SUFFIX]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]"),
    "[TOOL_CONTENT]",
)
"""Special tokens of a Tekken file of version 7 or less, which does not hold them."""


@dataclass(frozen=True, kw_only=True)
class TiktokenFile:
    """Contents of a tiktoken vocabulary file of any format."""

    file: Path
    """Path of the file."""
    ranks: Mapping[bytes, int]
    """Rank of each token."""
    specials_first: bool
    """Whether special tokens have the first ids and the ranks are shifted behind them."""
    says: Mapping[str, Any] = field(default_factory=dict)
    """Options that the file itself states."""
    published: PublishedVocabulary | None = None
    """The published vocabulary that a rank file holds."""


def read_tiktoken_file(path: str | os.PathLike[str]) -> TiktokenFile:
    """Read a JSON rank list, a Tekken file or a base64 rank file.

    Raises:
        TokenizerError: The file is missing, broken, of another library, or not what it is named.
    """
    kind = require_library(path, "tiktoken")
    if kind.format == "tiktoken-ranks":
        ranks = _rank_lines(kind.file)
        published = published_vocabulary(ranks)
        if published is None:
            _check_name(kind.file, len(ranks))
        return TiktokenFile(file=kind.file, ranks=ranks, specials_first=False, published=published)
    document = read_json(kind.file)
    if isinstance(document, list):
        ranks = _rank_list(document, kind.file)
        return TiktokenFile(file=kind.file, ranks=ranks, specials_first=True)
    assert isinstance(document, dict)
    ranks, says = _tekken(document, kind.file)
    return TiktokenFile(file=kind.file, ranks=ranks, specials_first=True, says=says)


def _check_name(file: Path, num_ranks: int) -> None:
    """Refuse a file with the name of a published vocabulary and other contents."""
    for row in PUBLISHED:
        if file.name == f"{row.name}.tiktoken":
            raise TokenizerError(
                f"the file is not the {row.name} that its name says",
                got=f"other tokens, {num_ranks} of them",
                expected=f"the {row.num_ranks} tokens that were published",
                fix="fetch it again: it may be truncated; or rename it if it is another vocabulary",
                where=file,
            )


def _tekken(document: dict[str, Any], file: Path) -> tuple[dict[bytes, int], dict[str, Any]]:
    try:
        config = document["config"]
        stated = {
            "pattern": config["pattern"],
            "vocab_size": config["default_vocab_size"],
            "num_special_tokens": config["default_num_special_tokens"],
        }
        rows = document.get("special_tokens")
        ranked = sorted(rows or (), key=lambda row: int(row["rank"]))
        names = [row["token_str"] for row in ranked]
        stated["special_tokens"] = names or list(EARLY_TEKKEN_SPECIAL_TOKENS)
        return _rank_list(document["vocab"], file), stated
    except (KeyError, TypeError) as error:
        raise TokenizerError(
            "the Tekken file is incomplete", got=f"no {error}", where=file
        ) from error


def _rank_list(rows: Sequence[Any], file: Path) -> dict[bytes, int]:
    try:
        ranks = {base64.b64decode(row["token_bytes"]): row["rank"] for row in rows}
    except (KeyError, TypeError, binascii.Error) as error:
        raise TokenizerError(
            "a row of the rank list is malformed",
            got=repr(error),
            expected="{rank, token_bytes (base64), token_str}",
            where=file,
        ) from error
    if list(ranks.values()) != list(range(len(rows))):
        raise TokenizerError(
            "the ranks are not 0, 1, 2, ... in order, or a token is listed twice", where=file
        )
    return _with_all_bytes(ranks, file)


def _rank_lines(file: Path) -> dict[bytes, int]:
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(file.read_bytes().splitlines(), start=1):
        if not line.strip():
            continue
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except ValueError:
            raise TokenizerError(
                "the line is malformed",
                got=repr(line[:60]),
                expected="a token in base64, a space, its rank",
                fix="fetch the file again: it may be truncated",
                where=f"{file}:{number}",
            ) from None
    if min(ranks.values(), default=0) < 0 or len(set(ranks.values())) < len(ranks):
        raise TokenizerError("two tokens share a rank, or a rank is negative", where=file)
    return _with_all_bytes(ranks, file)


def _with_all_bytes(ranks: dict[bytes, int], file: Path) -> dict[bytes, int]:
    missing = next((byte for byte in range(256) if bytes([byte]) not in ranks), None)
    if missing is not None:
        raise TokenizerError(
            "a byte-level vocabulary must hold every byte",
            got=f"no token for byte 0x{missing:02X}",
            where=file,
        )
    return ranks
