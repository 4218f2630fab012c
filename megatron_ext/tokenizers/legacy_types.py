"""The tokenizer types of Megatron-LM, and what each is called now."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

Library = Literal["huggingface", "sentencepiece", "tiktoken", "megatron", "byte-level", "null"]
TokenizerMode = Literal["text", "sft", "multimodal"]


@dataclass(frozen=True, slots=True)
class ReleaseFlag:
    """What a type meant besides in some releases."""

    flag: str
    """The same on a command line."""
    field: str
    """The field of ``TokenizerConfig`` that the flag sets."""
    releases: str
    """Which releases, for readers."""


@dataclass(frozen=True, slots=True)
class LegacyType:
    """A value of ``--tokenizer-type`` in today's words."""

    library: Library
    """``--tokenizer-library``."""
    mode: TokenizerMode = "text"
    """``--tokenizer-mode``."""
    model: str | None = None
    """``--tokenizer-model`` where the type says it all."""
    parses_special_tokens: bool = False
    """Special tokens that a text spells became their ids: ``--tokenizer-parse-special-tokens``."""
    vocab_extra_ids: int = 0
    """Sentinels that the type added: ``--vocab-extra-ids``."""
    release_flag: ReleaseFlag | None = None
    """What it meant besides in some releases."""
    prompt_format: str | None = None
    """``--tokenizer-prompt-format`` where nobody names one: Megatron's default for the type."""

    @property
    def flags(self) -> str:
        """The same on a command line."""
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
    """A type that says which tokenizer it is."""
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
