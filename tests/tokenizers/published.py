"""Published vocabularies and texts, where they are at hand."""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path

import pytest

SHARED = Path(
    os.environ.get("MEGATRON_EXT_SHARED") or Path(__file__).parents[2] / ".." / "shared"
).resolve()
needs_published_files = pytest.mark.skipif(
    not (SHARED / "tokenizers").is_dir() or not (SHARED / "corpora").is_dir(),
    reason="published vocabularies are absent: set MEGATRON_EXT_SHARED to a folder that has them",
)


def folders_with(name: str) -> list[Path]:
    """Tokenizer folders that hold a file of this name."""
    return sorted(file.parent for file in SHARED.glob(f"tokenizers/*/{name}"))


EVERY_STRETCH = bool(os.environ.get("MEGATRON_EXT_ALL_TEXT"))
"""Set it to read all 10 MB; otherwise one stretch in 19 is read, which keeps the suite short."""


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
    return [text for text in texts if text][:: 1 if EVERY_STRETCH else 19]
