"""The tokenizers of a run's models, and warnings before it starts, on standard error."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable

from megatron_ext.errors import ConfigError
from megatron_ext.tokenizers import MegatronTokenizerText, TokenizerConfig, build_tokenizer
from megatron_ext.tokenizers.build import names_tokenizer


def read_tokenizer(
    config: TokenizerConfig, section: str, *, conversations: bool = False
) -> MegatronTokenizerText:
    """The tokenizer that a section of the configuration describes.

    Args:
        section: Name of the section, for errors.
        conversations: Whether it has to render conversations.

    Raises:
        ConfigError: No tokenizer is named, it is for images or numbers, or lacks a prompt format.
        TokenizerError: It cannot be read.
    """
    if not names_tokenizer(config):
        raise ConfigError(
            "no tokenizer is named",
            where=f"{section}.model",
            expected="a tokenizer file, a directory that holds one, or a library without files",
            fix=f"set it{_flag(section, 'model')}",
        )
    if config.mode == "multimodal":
        raise ConfigError("a run reads no images", got="mode multimodal", where=section)
    tokenizer = build_tokenizer(config)
    if tokenizer.library == "null":
        raise ConfigError(
            "a run reads texts, of which a null tokenizer knows only numbers",
            where=section,
            got="library null",
            fix="take another library; byte-level needs no file either",
        )
    if conversations and tokenizer.prompt_config is None:
        has_template = tokenizer.chat_template is not None
        raise ConfigError(
            "conversations need a prompt format",
            got="a tokenizer without one, "
            + ("whose chat template is not asked for" if has_template else "or a chat template"),
            fix=f"set {section}.prompt_format"
            + (" to auto" if has_template else "")
            + _flag(section, "prompt-format auto" if has_template else "prompt-format")
            + ("" if has_template else ", see docs/prompt_formats.md"),
            where=section,
        )
    return tokenizer


def _flag(section: str, flag: str) -> str:
    """The end of a hint with the flag; empty for one of several teachers, which have no flags."""
    if section.startswith("teachers."):
        return ""
    return f", or pass --{section.replace('.', '-')}-{flag}"


def write_warnings(warnings: Iterable[str]) -> None:
    """Write a line for each warning, on rank 0."""
    if os.environ.get("RANK", "0") == "0":
        sys.stderr.writelines(f"warning: {warning}\n" for warning in warnings)
        sys.stderr.flush()
