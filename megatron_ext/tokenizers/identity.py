"""Identity of a tokenizer: the values on which its ids and trained tokens depend."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from megatron_ext.conversation.message import TOOL_TEMPLATE
from megatron_ext.errors import TokenizerError
from megatron_ext.tokenizers import MegatronTokenizerText
from megatron_ext.tokenizers.tokenizer_files import file_kind

_WITHOUT_INFLUENCE = ("tokenizer_path", "engine")
"""Identifiers that do not affect the ids: the path of the file, and the engine."""


def tokenizer_identity(tokenizer: MegatronTokenizerText) -> dict[str, str]:
    """Plain values that determine the ids and trained tokens of a text or conversation.

    The fingerprint of the vocabulary does not cover merges and normalisers, so the hash of the file
    is included; its path is not, because a file may move.
    """
    identity = {
        name: _by_content(value)
        for name, value in tokenizer.unique_identifiers.items()
        if name not in _WITHOUT_INFLUENCE
    }
    identity["fingerprint"] = tokenizer.fingerprint()
    if tokenizer.path is not None:
        identity["file"] = _by_content(tokenizer.path)
    if tokenizer.prompt_config is not None:
        identity["prompt"] = _sha256(_written(tokenizer.prompt_config).encode())
        # Others than these two are written by nothing.
        for_tools = tokenizer.chat_templates.get(TOOL_TEMPLATE, "")
        identity["template"] = _sha256((str(tokenizer.chat_template) + for_tools).encode())
    return identity


def _by_content(value: str) -> str:
    """The hash of the file that ``value`` names, or of the tokenizer file in its folder."""
    if not os.path.exists(value):
        return value
    try:
        file = file_kind(value).file if os.path.isdir(value) else Path(value)
        status = file.stat()
        return _sha256_of(file, status.st_size, status.st_mtime_ns)
    except (OSError, TokenizerError):
        return value


@lru_cache(maxsize=64)
def _sha256_of(file: Path, size: int, modified: int) -> str:
    """Hash of a file, cached by its size and time of modification."""
    return _sha256(file.read_bytes())


def _written(value: Any) -> str:
    """``repr`` that is the same in every process: the order of a set depends on the hash seed."""
    if is_dataclass(value):
        value = {field.name: getattr(value, field.name) for field in fields(value)}
    if isinstance(value, Mapping):
        return str(sorted((str(name), _written(entry)) for name, entry in value.items()))
    if isinstance(value, set | frozenset):
        return str(sorted(map(_written, value)))
    if isinstance(value, list | tuple):
        return str(list(map(_written, value)))
    return repr(value)


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
