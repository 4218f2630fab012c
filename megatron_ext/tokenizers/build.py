"""A tokenizer from its configuration, and the vocabulary size that a model gives it."""

from __future__ import annotations

from typing import Any

from megatron_ext.errors import ConfigError
from megatron_ext.tokenizers.config import TokenizerConfig
from megatron_ext.tokenizers.file_kind import file_kind
from megatron_ext.tokenizers.text_tokenizer import MegatronTokenizerText


def build_tokenizer(config: TokenizerConfig) -> MegatronTokenizerText:
    """The tokenizer that ``config`` describes; its library is told from the file when unset.

    Raises:
        ConfigError: No model is named, or an option is for another library.
        TokenizerError: The file is missing, broken or of another library.
        MissingDependencyError: The library is not installed.
    """
    if config.model is None:
        raise ConfigError("no tokenizer is named", fix="set model to a file", where="model")
    library = config.library or file_kind(config.model).library
    if library != config.library:
        # The configuration checks its options against its library: it has one now.
        TokenizerConfig(
            library=library,
            tiktoken_pattern=config.tiktoken_pattern,
            tiktoken_num_special_tokens=config.tiktoken_num_special_tokens,
            vocab_size=config.vocab_size,
        )
    options: dict[str, Any] = {
        "pattern": config.tiktoken_pattern,
        "num_special_tokens": config.tiktoken_num_special_tokens,
        "vocab_size": config.vocab_size,
    }
    return MegatronTokenizerText(
        config.model,
        {"library": library},
        **{name: value for name, value in options.items() if value is not None},
    )


def padded_vocab_size(
    vocab_size: int, *, make_vocab_size_divisible_by: int, tensor_model_parallel_size: int
) -> int:
    """The least multiple of both divisors' product that holds ``vocab_size`` ids.

    Raises:
        ConfigError: A size is not positive.
    """
    for name, value in (
        ("vocab_size", vocab_size),
        ("make_vocab_size_divisible_by", make_vocab_size_divisible_by),
        ("tensor_model_parallel_size", tensor_model_parallel_size),
    ):
        if value < 1:
            raise ConfigError("the size is too small", got=value, expected=">= 1", where=name)
    multiple = make_vocab_size_divisible_by * tensor_model_parallel_size
    return -(-vocab_size // multiple) * multiple
