"""Published vocabularies that are no part of the repository; tests that need them skip without."""

import os
from pathlib import Path

import pytest

SHARED = Path(
    os.environ.get("MEGATRON_EXT_SHARED") or Path(__file__).parents[2] / ".." / "shared"
).resolve()

needs_published = pytest.mark.skipif(
    not SHARED.is_dir(),
    reason="published vocabularies are absent: set MEGATRON_EXT_SHARED to a folder that has them",
)


def published(name):
    """Folder of a published tokenizer."""
    return SHARED / "tokenizers" / name
