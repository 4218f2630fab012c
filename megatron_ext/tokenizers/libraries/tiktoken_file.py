"""A tiktoken vocabulary as its file and the options give it, whatever the file's format."""

from __future__ import annotations

import base64
import binascii
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_ext.errors import TokenizerError
from megatron_ext.tokenizers.file_kind import FileKind, read_json, require_library

_V2_WORD = r"[^\r\n\p{L}\p{N}]?"
_V2_UPPER, _V2_LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
PATTERNS: Mapping[str, str] = {
    "v1": r"[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+",
    "v2": "|".join(
        (
            rf"{_V2_WORD}[{_V2_UPPER}]*[{_V2_LOWER}]+",
            rf"{_V2_WORD}[{_V2_UPPER}]+[{_V2_LOWER}]*",
            r"\p{N}",
            r" ?[^\s\p{L}\p{N}]+[\r\n/]*",
            r"\s*[\r\n]+",
            r"\s+(?!\S)",
            r"\s+",
        )
    ),
}
"""Megatron's named patterns."""

MEGATRON_SPECIAL_TOKENS = ("<unk>", "<s>", "</s>", "<mask>", "<pad>", "<cls>", "<sep>")
"""Special tokens of a file that names none, in id order."""

EARLY_TEKKEN_SPECIAL_TOKENS = (
    *("<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]"),
    *("[TOOL_RESULTS]", "[/TOOL_RESULTS]", "[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]"),
    *("[IMG_END]", "[PREFIX]", "[MIDDLE]", "[SUFFIX]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]"),
    "[TOOL_CONTENT]",
)
"""Special tokens of a Tekken file from before these were written into it (version 7 and less)."""

_NUM_SPECIAL_TOKENS = 1000
_LARGEST_JSON_VOCABULARY = 1 << 17


@dataclass(frozen=True, kw_only=True)
class TiktokenVocabulary:
    """What tiktoken needs, with final ids."""

    file: Path
    """Where it came from."""
    pattern: str
    """Regular expression that cuts the text."""
    ids: dict[bytes, int]
    """Id of each ordinary token; tiktoken merges in id order."""
    special_ids: dict[str, int]
    """Id of each special token, fillers included."""
    vocab_size: int
    """Largest id plus one."""


def read_vocabulary(
    path: str | os.PathLike[str],
    *,
    pattern: str | None,
    vocab_size: int | None,
    num_special_tokens: int | None,
    special_tokens: Sequence[str] | None,
) -> TiktokenVocabulary:
    """Read a file and lay its ids out; an option left at None takes the file's word or a default.

    Raises:
        TokenizerError: The file is missing, broken or of another library, or an option does not
            fit the file.
    """
    kind = require_library(path, "tiktoken")
    tokens, from_file = _read(kind)
    given = {
        "pattern": None if pattern is None else _pattern(pattern),
        "vocab_size": vocab_size,
        "num_special_tokens": num_special_tokens,
        "special_tokens": None if special_tokens is None else list(special_tokens),
    }
    said = _settle_options(given, from_file, kind.file)
    names = _special_names(said["special_tokens"], said["num_special_tokens"])
    specials_first = kind.format != "tiktoken-ranks"
    size = _size(said.get("vocab_size"), tokens, len(names), specials_first, kind.file)
    shift = len(names) if specials_first else 0
    special_begin = 0 if specials_first else size - len(names)
    ordinary_stop = size if specials_first else special_begin
    return TiktokenVocabulary(
        file=kind.file,
        pattern=said["pattern"],
        ids={token: rank + shift for token, rank in tokens.items() if rank + shift < ordinary_stop},
        special_ids={name: special_begin + i for i, name in enumerate(names)},
        vocab_size=size,
    )


def _settle_options(
    given: Mapping[str, Any], from_file: Mapping[str, Any], file: Path
) -> dict[str, Any]:
    """The options given, else those of the file, else the defaults."""
    said: dict[str, Any] = {
        "pattern": PATTERNS["v2"],
        "num_special_tokens": _NUM_SPECIAL_TOKENS,
        "special_tokens": list(MEGATRON_SPECIAL_TOKENS),
        **from_file,
    }
    for name, value in given.items():
        if value is None:
            continue
        if name in from_file and from_file[name] != value:
            raise TokenizerError(
                f"the option {name} differs from what the file says",
                got=value,
                expected=from_file[name],
                fix="leave it out",
                where=file,
            )
        said[name] = value
    return said


def _pattern(pattern: str) -> str:
    if re.fullmatch(r"\w+", pattern) and pattern not in PATTERNS:
        raise TokenizerError(
            "unknown tiktoken pattern",
            got=repr(pattern),
            expected="v1, v2 or a regular expression",
            where="pattern",
        )
    return PATTERNS.get(pattern, pattern)


def _special_names(names: Sequence[str], count: int) -> list[str]:
    """``names`` filled up to ``count``."""
    if count < len(names):
        raise TokenizerError(
            "there are more special tokens than ids kept for them",
            got=f"{len(names)} names",
            expected=f"at most num_special_tokens = {count}",
            fix="raise num_special_tokens",
        )
    filled = [*names, *(f"<SPECIAL_{i}>" for i in range(len(names), count))]
    if len(set(filled)) < len(filled):
        twice = next(name for name in filled if filled.count(name) > 1)
        raise TokenizerError(
            "a special token is named twice", got=repr(twice), where="special_tokens"
        )
    return filled


def _size(
    wanted: int | None,
    tokens: Mapping[bytes, int],
    num_special: int,
    specials_first: bool,
    file: Path,
) -> int:
    """Vocabulary size, special tokens included, which the file must be able to fill."""
    full = max(tokens.values()) + 1 + num_special
    if wanted is None:
        return min(full, _LARGEST_JSON_VOCABULARY) if specials_first else full
    if not num_special + 256 <= wanted <= full:
        raise TokenizerError(
            "the file cannot fill this vocabulary",
            got=f"vocab_size = {wanted}",
            expected=f"{num_special + 256} to {full}: {num_special} special tokens and at least "
            f"the 256 bytes of {full - num_special} ranks",
            where=file,
        )
    return wanted


def _read(kind: FileKind) -> tuple[dict[bytes, int], dict[str, Any]]:
    """Rank of each token, and what the file says of the options."""
    if kind.format == "tiktoken-ranks":
        return _rank_lines(kind.file), {}
    document = read_json(kind.file)
    if isinstance(document, list):
        return _rank_list(document, kind.file), {}
    assert isinstance(document, dict)
    return _tekken(document, kind.file)


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
