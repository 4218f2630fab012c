"""What a user says about a tokenizer; help texts come from the strings under the fields."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from megatron_ext.errors import ConfigError
from megatron_ext.tokenizers.file_kind import Library

TokenizerMode = Literal["text", "sft", "multimodal"]


@dataclass(kw_only=True, frozen=True, slots=True)
class TokenizerConfig:
    """One tokenizer, as flags or a configuration file describe it.

    Raises:
        ConfigError: A value that cannot be used, named by its field.
    """

    library: Library | None = None
    """Tokenizer library: huggingface, sentencepiece or tiktoken; told from the file when unset."""

    model: str | None = None
    """Tokenizer file, or a directory that holds one."""

    mode: TokenizerMode = "text"
    """What the tokenizer reads: text, sft (conversations) or multimodal."""

    prompt_format: str | None = None
    """Name of the prompt format that renders and masks conversations."""

    tiktoken_pattern: str | None = None
    """Pattern that cuts text before merging: v1, v2 or a regular expression; v2 when unset."""

    tiktoken_num_special_tokens: int | None = None
    """Ids kept for special tokens of a tiktoken vocabulary; 1000 unless set here or in the file."""

    vocab_size: int | None = None
    """Cut a tiktoken vocabulary to this many ids, special tokens included."""

    def __post_init__(self) -> None:
        _check_choice("library", self.library, (*get_args(Library), None))
        _check_choice("mode", self.mode, get_args(TokenizerMode))
        if self.mode != "text":
            raise ConfigError(
                f"the mode {self.mode!r} is not available in this version",
                fix="use text",
                where="mode",
            )
        if self.prompt_format is not None:
            raise ConfigError(
                "prompt formats are not available in this version",
                got=repr(self.prompt_format),
                fix="leave it unset",
                where="prompt_format",
            )
        for name in ("tiktoken_num_special_tokens", "vocab_size"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError("the value is too small", got=value, expected=">= 1", where=name)
        if self.library in ("huggingface", "sentencepiece"):
            self._refuse_tiktoken_options()

    def _refuse_tiktoken_options(self) -> None:
        for name in ("tiktoken_pattern", "tiktoken_num_special_tokens", "vocab_size"):
            if getattr(self, name) is not None:
                raise ConfigError(
                    "the option is for the tiktoken library",
                    got=f"library {self.library}",
                    fix="leave it unset",
                    where=name,
                )


def _check_choice(name: str, value: object, choices: tuple[object, ...]) -> None:
    if value not in choices:
        raise ConfigError(
            "unknown value",
            got=repr(value),
            expected=f"one of {', '.join(str(choice) for choice in choices)}",
            where=name,
        )
