"""The files of a HuggingFace tokenizer: ``tokenizer.json`` and what lies beside it."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from megatron_ext.errors import TokenizerError
from megatron_ext.tokenizers.file_kind import parse_json, read_file, read_json

_CONFIG = "tokenizer_config.json"
_TEMPLATE = "chat_template.jinja"


class HuggingFaceSource:
    """Where the contents of a tokenizer come from.

    The files are read once: a run that goes on for weeks does not mind what becomes of them.

    Args:
        file: The ``tokenizer.json``.
        folder: Where its configuration and its template lie; None for a tokenizer that has none.
    """

    def __init__(self, file: Path, folder: Path | None) -> None:
        self.file = file
        self._folder = folder
        self._kept: bytes | None = None

    @property
    def files(self) -> dict[str, Path]:
        """Every file that is read, by the name that it must have."""
        beside = (self._beside(name) for name in (_CONFIG, _TEMPLATE))
        return self._own_files() | {file.name: file for file in beside if file is not None}

    def _own_files(self) -> dict[str, Path]:
        """What holds the vocabulary."""
        return {"tokenizer.json": self.file}

    def document(self) -> object:
        """The ``tokenizer.json``, a new object.

        Raises:
            TokenizerError: It cannot be read, or is broken.
        """
        if self._kept is None:
            contents = self._read()
            # As an object it would take a hundred bytes for each of a piece.
            self._kept = zlib.compress(contents, level=1)
        else:
            contents = zlib.decompress(self._kept)
        return parse_json(contents, self.file)

    def _read(self) -> bytes:
        """The ``tokenizer.json`` as its file has it."""
        return read_file(self.file)

    @cached_property
    def config(self) -> Mapping[str, Any] | None:
        """The ``tokenizer_config.json``; None where there is none.

        Raises:
            TokenizerError: It is broken.
        """
        return self._read_config()

    def _read_config(self) -> Mapping[str, Any] | None:
        file = self._beside(_CONFIG)
        if file is None:
            return None
        config = read_json(file)
        if not isinstance(config, dict):
            raise TokenizerError("the configuration is no JSON object", where=file)
        return config

    def chat_template(self) -> str | None:
        """The template in ``chat_template.jinja``, else the default one of the configuration."""
        file = self._beside(_TEMPLATE)
        if file is not None:
            return file.read_text(encoding="utf-8")
        template = (self.config or {}).get("chat_template")
        if isinstance(template, list):
            named = {row.get("name"): row.get("template") for row in template}
            template = named.get("default")
        return template if isinstance(template, str) else None

    def _beside(self, name: str) -> Path | None:
        file = None if self._folder is None else self._folder / name
        return file if file is not None and file.is_file() else None
