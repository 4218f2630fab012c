"""The tokenizer types of Megatron-LM, and what each is called now."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal

Library = Literal["huggingface", "sentencepiece", "tiktoken", "megatron", "byte-level", "null"]
TokenizerMode = Literal["text", "sft", "multimodal"]


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

    @property
    def flags(self) -> str:
        """The same on a command line."""
        words = [f"--tokenizer-library {self.library}"]
        if self.mode != "text":
            words.append(f"--tokenizer-mode {self.mode}")
        if self.model is not None:
            words.append(f"--tokenizer-model {self.model}")
        if self.parses_special_tokens:
            words.append("--tokenizer-parse-special-tokens")
        return " ".join(words)


LEGACY_TYPES: Final[Mapping[str, LegacyType]] = {
    "BertWordPieceLowerCase": LegacyType(
        "megatron", model="BertWordPieceLowerCase", parses_special_tokens=True
    ),
    "BertWordPieceCase": LegacyType(
        "megatron", model="BertWordPieceCase", parses_special_tokens=True
    ),
    "GPT2BPETokenizer": LegacyType(
        "megatron", model="GPT2BPETokenizer", parses_special_tokens=True
    ),
    "SentencePieceTokenizer": LegacyType("sentencepiece"),
    "GPTSentencePieceTokenizer": LegacyType("sentencepiece"),
    "Llama2Tokenizer": LegacyType("sentencepiece"),
    "TikTokenizer": LegacyType("tiktoken", parses_special_tokens=True),
    "HuggingFaceTokenizer": LegacyType("huggingface", parses_special_tokens=True),
    "MultimodalTokenizer": LegacyType("huggingface", "multimodal"),
    "SFTTokenizer": LegacyType("huggingface", "sft"),
    "NullTokenizer": LegacyType("null"),
    "NullMultimodalTokenizer": LegacyType("null", "multimodal"),
}
"""``--tokenizer-type`` -> library and mode."""
