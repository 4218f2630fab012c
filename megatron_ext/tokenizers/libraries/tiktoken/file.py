"""What a tiktoken vocabulary file holds, whatever its format."""

from __future__ import annotations

import base64
import binascii
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_ext.errors import TokenizerError
from megatron_ext.tokenizers.file_kind import read_json, require_library
from megatron_ext.tokenizers.libraries.tiktoken.published import (
    PUBLISHED,
    PublishedVocabulary,
    published_vocabulary,
)

EARLY_TEKKEN_SPECIAL_TOKENS = (
    *("<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]"),
    *("[TOOL_RESULTS]", "[/TOOL_RESULTS]", "[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]"),
    *("[IMG_END]", "[PREFIX]", "[MIDDLE]", "[SUFFIX]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]"),
    "[TOOL_CONTENT]",
)
"""Special tokens of a Tekken file from before these were written into it (version 7 and less)."""


@dataclass(frozen=True, kw_only=True)
class TiktokenFile:
    """Ranks, and what is known of the pattern and the special tokens."""

    file: Path
    """Where it came from."""
    ranks: Mapping[bytes, int]
    """Rank of each token."""
    specials_first: bool
    """Whether special tokens have the first ids and the ranks are shifted behind them."""
    says: Mapping[str, Any] = field(default_factory=dict)
    """Options that the file itself fixes."""
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
        said = {
            "pattern": config["pattern"],
            "vocab_size": config["default_vocab_size"],
            "num_special_tokens": config["default_num_special_tokens"],
        }
        rows = document.get("special_tokens")
        names = [row["token_str"] for row in sorted(rows, key=_rank_of)] if rows else None
        said["special_tokens"] = names or list(EARLY_TEKKEN_SPECIAL_TOKENS)
        return _rank_list(document["vocab"], file), said
    except (KeyError, TypeError) as error:
        raise TokenizerError(
            "the Tekken file is incomplete", got=f"no {error}", where=file
        ) from error


def _rank_of(row: Mapping[str, Any]) -> int:
    return int(row["rank"])


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
