"""Published files that are no part of the repository; tests that need them skip without."""

import os
from functools import lru_cache
from pathlib import Path

import pytest

from megatron_ext.tokenizers.libraries.huggingface import HuggingFaceTokenizer

SHARED = Path(
    os.environ.get("MEGATRON_EXT_SHARED") or Path(__file__).parents[2] / ".." / "shared"
).resolve()

needs_shared = pytest.mark.skipif(
    not SHARED.is_dir(),
    reason="published files are absent: set MEGATRON_EXT_SHARED to a folder that has them",
)

ADDED = ("<SPECIAL_10>", "<SPECIAL_11>", "<SPECIAL_12>")
IMAGES = ("<image>", "<img>", "</img>")


@lru_cache(maxsize=1)
def published_tokenizer(name: str) -> HuggingFaceTokenizer:
    """A vocabulary with the special tokens that the golden conversations were made with.

    One at a time: a test that needs several takes them in turn.
    """
    added = (*ADDED, *IMAGES) if name == "mistral_nemo" else IMAGES
    return HuggingFaceTokenizer(SHARED / "tokenizers" / name, additional_special_tokens=added)
