"""A tiktoken rank list in gigatoken."""

from __future__ import annotations

import tempfile
from binascii import b2a_base64
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from megatron_ext.errors import TokenizerError
from megatron_ext.tokenizers.engine.gigatoken_engine import GigatokenEngine, building
from megatron_ext.tokenizers.libraries.tiktoken.patterns import (
    CL100K,
    LLAMA_3,
    O200K,
    PATTERNS,
    R50K,
)
from megatron_ext.tokenizers.token_bytes import TokenBytes

_SCHEMES: Mapping[str, str] = {
    R50K: "gpt2",
    CL100K: "gpt4",
    O200K: "o200k",
    LLAMA_3: "olmo3",
    LLAMA_3.replace("{1,3}", ""): "qwen2",
    PATTERNS["v2"]: "nemotron",
    # Other spellings of the first two.
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+": "gpt2",
    r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+": "gpt2",
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]|\s+(?!\S)|\s+": "gpt4",
}
"""What gigatoken calls a pattern. The proof at load decides whether the two are the same."""


def tiktoken_engine(table: TokenBytes, pattern: str, where: object) -> GigatokenEngine:
    """The engine of a rank list.

    Args:
        table: Bytes of each id; the ids that are no control tokens merge in id order.
        pattern: Regular expression that cuts a text before merging.
        where: The file it came from, for errors.

    Raises:
        TokenizerError: gigatoken does not have the pattern, or cannot rebuild the merges.
        MissingDependencyError: gigatoken is not installed.
    """
    scheme = _SCHEMES.get(pattern)
    if scheme is None:
        raise TokenizerError("gigatoken does not have the pattern", got=repr(pattern), where=where)
    ids = np.flatnonzero(~table.is_control).astype(np.int32)
    ranked = [table.rows[i] for i in ids.tolist()]
    if sorted(ranked[:256]) != [bytes([byte]) for byte in range(256)]:
        # gigatoken takes the ranks of single bytes for bytes.
        raise TokenizerError("the first 256 ranks are not the single bytes", where=where)
    lines = (b"%s %d\n" % (b2a_base64(row, newline=False), i) for i, row in enumerate(ranked))
    with building(where) as gigatoken, tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "ranks.tiktoken")
        file.write_bytes(b"".join(lines))
        return GigatokenEngine(
            lambda: gigatoken.Tokenizer.from_tiktoken(file, pretokenizer=scheme),
            ids=ids,
        )
