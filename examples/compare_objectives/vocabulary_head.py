"""The head of a published vocabulary: a real tokenizer that a small model can learn quickly.

Merges come in the order in which they were learnt, so the first ids of a byte-level vocabulary are
a vocabulary themselves: the one that training would have stopped at.
"""

from __future__ import annotations

import base64
import json
from pathlib import Path

from megatron_ext.errors import TokenizerError
from megatron_ext.files import write_text
from megatron_ext.tokenizers.libraries.tiktoken_file import TiktokenFile, read_tiktoken_file

SPECIAL_TOKENS = (
    *("<unk>", "<s>", "</s>", "<mask>", "<pad>", "<cls>", "<sep>"),
    *(f"<SPECIAL_{i}>" for i in range(7, 16)),
)
"""As Megatron names those of a rank list."""


def write_head(source: Path, size: int, path: Path) -> Path:
    """Write the first ``size`` ids of ``source``, special tokens included, as a Tekken file.

    Args:
        source: A vocabulary that tiktoken reads and that is known to have a pattern: a Tekken file,
            or a published rank file.
        size: Ids to keep.
        path: The new file.

    Raises:
        TokenizerError: It has no pattern, or fewer ids.
    """
    whole = read_tiktoken_file(source)
    count = size - len(SPECIAL_TOKENS)
    tokens = sorted(whole.ranks, key=whole.ranks.__getitem__)
    if not 256 <= count <= len(tokens):
        raise TokenizerError(
            "no such head of the vocabulary",
            got=size,
            expected=f"{256 + len(SPECIAL_TOKENS)} to {len(tokens) + len(SPECIAL_TOKENS)} ids",
            where=source,
        )
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
    return path


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
