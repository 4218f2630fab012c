"""Published vocabularies and texts, where they are at hand."""

import os
from collections.abc import Iterable
from functools import cache
from pathlib import Path

import pytest

from tests.conversation.shared_files import SHARED

needs_published_files = pytest.mark.skipif(
    not (SHARED / "tokenizers").is_dir() or not (SHARED / "corpora").is_dir(),
    reason="published vocabularies are absent: set MEGATRON_EXT_SHARED to a folder that has them",
)


EVERY_STRETCH = bool(os.environ.get("MEGATRON_EXT_ALL_TEXT"))
"""Set it to read all 10 MB; otherwise one stretch in 41 is read, which keeps the suite short."""

LARGE = (
    *("gemma3", "llama3_2", "mistral_nemo", "phi4_mini", "qwen2_5", "o200k_base.tiktoken"),
    *("p50k_base.tiktoken", "tekken_240718.json"),
    *("mistral_instruct_tokenizer_240216.model.v2", "mistral_instruct_tokenizer_241114.model.v7m1"),
    "mistral_instruct_tokenizer_241114.model.v7",
)
"""Vocabularies that take long, or hardly differ from others; of each kind some are left."""


def taken(paths: Iterable[Path]) -> list[Path]:
    """Those to read, in order: all of them only with all of the text."""
    return sorted(path for path in paths if EVERY_STRETCH or path.name not in LARGE)


def folders_with(name: str) -> list[Path]:
    """Tokenizer folders that hold a file of this name."""
    return taken(file.parent for file in SHARED.glob(f"tokenizers/*/{name}"))


@cache
def corpora() -> list[str]:
    """The texts in stretches of about 4,000 characters that end at a line."""
    texts = []
    for file in sorted(path for path in SHARED.glob("corpora/*/*") if path.is_file()):
        lines = file.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True)
        stretch = ""
        for line in lines:
            stretch += line
            if len(stretch) >= 4000:
                texts.append(stretch)
                stretch = ""
        texts.append(stretch)
    return [text for text in texts if text][:: 1 if EVERY_STRETCH else 41]
