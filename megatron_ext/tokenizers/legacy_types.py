"""Tokenizer types and prompt format flags of Megatron-LM, in today's terms."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Final, Literal

from megatron_ext.errors import ConfigError

Library = Literal["huggingface", "sentencepiece", "tiktoken", "megatron", "byte-level", "null"]
TokenizerMode = Literal["text", "sft", "multimodal"]


@dataclass(frozen=True, slots=True)
class ReleaseFlag:
    """An option that a type implied in some releases."""

    flag: str
    """The flag that sets the option."""
    field: str
    """The field of ``TokenizerConfig`` that the flag sets."""
    releases: str
    """Releases in which the type implied it, for readers."""


@dataclass(frozen=True, slots=True)
class LegacyType:
    """Equivalent of a value of ``--tokenizer-type`` in present flags."""

    library: Library
    """``--tokenizer-library``."""
    mode: TokenizerMode = "text"
    """``--tokenizer-mode``."""
    model: str | None = None
    """``--tokenizer-model`` where the type implies it."""
    parses_special_tokens: bool = False
    """Special tokens in texts were parsed: ``--tokenizer-parse-special-tokens``."""
    vocab_extra_ids: int = 0
    """Sentinels that the type added: ``--vocab-extra-ids``."""
    release_flag: ReleaseFlag | None = None
    """An option that it implied in some releases."""
    prompt_format: str | None = None
    """Default of ``--tokenizer-prompt-format``, as Megatron has it for the type."""

    @property
    def flags(self) -> str:
        """The present flags, as on a command line."""
        words = [f"--tokenizer-library {self.library}"]
        if self.mode != "text":
            words.append(f"--tokenizer-mode {self.mode}")
        if self.prompt_format is not None:
            words.append(f"--tokenizer-prompt-format {self.prompt_format}")
        if self.model is not None:
            words.append(f"--tokenizer-model {self.model}")
        if self.vocab_extra_ids:
            words.append(f"--vocab-extra-ids {self.vocab_extra_ids}")
        if self.parses_special_tokens:
            words.append("--tokenizer-parse-special-tokens")
        return " ".join(words)


_INCLUDES_SPECIAL_TOKENS = ReleaseFlag(
    "--tokenizer-hf-include-special-tokens", "hf_include_special_tokens", "0.17 and later"
)
_ADDS_EOD = ReleaseFlag("--null-tokenizer-add-eod", "null_add_eod", "0.17 and earlier")


def _named(model: str, **more: Any) -> LegacyType:
    """A type that names a tokenizer."""
    return LegacyType(
        "megatron",
        model=model,
        parses_special_tokens=True,
        release_flag=_INCLUDES_SPECIAL_TOKENS,
        **more,
    )


LEGACY_TYPES: Final[Mapping[str, LegacyType]] = {
    "BertWordPieceLowerCase": _named("BertWordPieceLowerCase"),
    "BertWordPieceCase": _named("BertWordPieceCase", vocab_extra_ids=100),
    "GPT2BPETokenizer": _named("GPT2BPETokenizer"),
    "SentencePieceTokenizer": LegacyType("sentencepiece"),
    "GPTSentencePieceTokenizer": LegacyType("sentencepiece"),
    "Llama2Tokenizer": LegacyType("sentencepiece"),
    "TikTokenizer": LegacyType("tiktoken", parses_special_tokens=True),
    "HuggingFaceTokenizer": LegacyType(
        "huggingface", parses_special_tokens=True, release_flag=_INCLUDES_SPECIAL_TOKENS
    ),
    "MultimodalTokenizer": LegacyType("huggingface", "multimodal"),
    "SFTTokenizer": LegacyType("huggingface", "sft", prompt_format="nemotron-h-aligned"),
    "NullTokenizer": LegacyType("null", release_flag=_ADDS_EOD),
    "NullMultimodalTokenizer": LegacyType("null", "multimodal"),
}
"""``--tokenizer-type`` -> library and mode."""


OLD_FLAG: Final = "--sft-tokenizer-prompt-format"
"""Megatron's flag, whose default is the format of ``SFTTokenizer``."""

UNSPOKEN: Final = "tokenizer_unspoken"
"""Attribute of a namespace that lists attributes holding defaults, not explicit flags."""

OLD_FORMAT: Final = "sft_tokenizer_prompt_format"
"""Attribute that the flag sets."""


def prompt_format(args: Any, legacy: LegacyType | None) -> str | None:
    """The prompt format that a namespace of flags names; None leaves ``auto`` to the mode sft.

    It is the first of these that is there: ``--tokenizer-prompt-format``; the old flag, if
    explicit; Megatron's default for the old type.

    Args:
        args: Parsed flags.
        legacy: The old type that was given.

    Raises:
        ConfigError: The flags name two different ones.
    """
    new: str | None = getattr(args, "tokenizer_prompt_format", None)
    if legacy is not None and legacy.prompt_format is None:
        # The type ignores the old flag.
        return new
    old = old_prompt_format(args)
    if new is not None and old is not None and new != old:
        raise ConfigError(
            "two flags name different prompt formats",
            got=f"--tokenizer-prompt-format {new} and {OLD_FLAG} {old}",
            fix=f"leave {OLD_FLAG} out",
        )
    # The warning about an old type without a library names the format already.
    is_warned = legacy is not None and getattr(args, "tokenizer_library", None) is None
    if old is not None and not is_warned and os.environ.get("RANK", "0") == "0":
        _warn_once(old)
    default = None if legacy is None else legacy.prompt_format
    return next((name for name in (new, old, default) if name is not None), None)


def old_prompt_format(args: Any) -> str | None:
    """Value of the old flag; None where it was not given explicitly.

    Megatron's parser sets a default. Where explicit flags were not noted, an explicit flag of the
    same value cannot be told from it.
    """
    value: str | None = getattr(args, OLD_FORMAT, None)
    unspoken = getattr(args, UNSPOKEN, None)
    if unspoken is not None:
        return None if OLD_FORMAT in unspoken else value
    is_megatrons = hasattr(args, "sft")
    return None if is_megatrons and value == LEGACY_TYPES["SFTTokenizer"].prompt_format else value


@cache
def _warn_once(name: str) -> None:
    warnings.warn(
        f"{OLD_FLAG} is an old name: use --tokenizer-prompt-format {name}.",
        FutureWarning,
        stacklevel=5,
    )
