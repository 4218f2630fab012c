"""Files that a page holds, so that it needs no other file and no network."""

from __future__ import annotations

import base64
import hashlib
from functools import cached_property
from pathlib import Path

from markupsafe import Markup


class InlinedFile:
    """A style or a script of ours that a page holds.

    Args:
        path: The file.
    """

    def __init__(self, path: Path) -> None:
        self._text = path.read_text(encoding="utf-8")

    @property
    def source(self) -> Markup:
        """The file's text, which is ours and escapes nothing."""
        return Markup(self._text)

    @cached_property
    def hash(self) -> str:
        """What the page's policy calls it."""
        digest = hashlib.sha256(self._text.encode()).digest()
        return f"sha256-{base64.b64encode(digest).decode()}"
