"""A tokenizer from its configuration, and the vocabulary size that a model gives it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from megatron_ext.errors import ConfigError
from megatron_ext.tokenizers.config import TokenizerConfig
from megatron_ext.tokenizers.file_kind import file_kind
from megatron_ext.tokenizers.libraries import TOKENIZER_LIBRARIES
from megatron_ext.tokenizers.megatron_tokenizer import MegatronTokenizer
from megatron_ext.tokenizers.namespace import config_from_namespace
from megatron_ext.tokenizers.text_tokenizer import MegatronTokenizerText
from megatron_ext.tokenizers.vision_tokenizer import MegatronTokenizerVision


def build_tokenizer(args: Any, **overrides: Any) -> MegatronTokenizerText | MegatronTokenizerVision:
    """The tokenizer that ``args`` describe.

    Args:
        args: A ``TokenizerConfig``, or a namespace of Megatron's: of ours or of Megatron-LM's own
            flags, with ``tokenizer_type`` or without. It is not changed.
        overrides: Fields of ``TokenizerConfig`` that win over ``args``.

    Raises:
        ConfigError: No model is named, an option is for another library, or two contradict.
        TokenizerError: The file is missing, broken or of another library.
        MissingDependencyError: The library is not installed.
    """
    config = args if isinstance(args, TokenizerConfig) else config_from_namespace(args)
    config = _with_library(replace(config, **overrides))
    metadata = {"library": config.library, "mode": config.mode}
    return MegatronTokenizer.from_pretrained(
        config.model,
        metadata if config.metadata is None else config.metadata,
        **_library_options(config),
        **_mode_options(config),
    )


def _with_library(config: TokenizerConfig) -> TokenizerConfig:
    """``config`` with its library, told from the file where it is unset."""
    if config.library is not None:
        if config.model is None and TOKENIZER_LIBRARIES[config.library].reads_file:
            raise ConfigError("no tokenizer is named", fix="set model to a file", where="model")
        return config
    if config.model is None:
        raise ConfigError("no tokenizer is named", fix="set model to a file", where="model")
    return replace(config, library=file_kind(config.model).library)


def _library_options(config: TokenizerConfig) -> dict[str, Any]:
    """What the library's adapter takes besides the path."""
    extra_ids = tuple(f"<extra_id_{i}>" for i in range(config.vocab_extra_ids))
    options: dict[str, Any] = {
        "engine": config.engine if config.engine != "auto" else None,
        "additional_special_tokens": extra_ids or None,
    }
    if config.library in ("huggingface", "megatron"):
        options |= {
            "include_special_tokens": config.hf_include_special_tokens or None,
            "additional_special_tokens": (*config.special_tokens, *extra_ids) or None,
            "vocab_file": config.vocab_file,
            "merges_file": config.merge_file,
        }
    elif config.library == "sentencepiece":
        keep = config.sentencepiece_ignore_extra_whitespaces
        options |= {
            "legacy": config.sentencepiece_legacy or None,
            "ignore_extra_whitespaces": None if keep else False,
            "special_tokens": config.special_tokens or None,
        }
    elif config.library == "tiktoken":
        options |= {
            "pattern": config.tiktoken_pattern,
            "vocab_size": config.vocab_size,
            "num_special_tokens": config.tiktoken_num_special_tokens,
            "special_tokens": config.special_tokens or None,
        }
    elif config.library == "byte-level":
        options |= {
            "vocab_size": config.vocab_size,
            "special_tokens": config.special_tokens or None,
        }
    else:
        options |= {
            "vocab_size": config.vocab_size,
            "eod_id": config.null_eod_id,
            "pad_id": config.null_pad_id,
            "add_eod": config.null_add_eod or None,
            "additional_special_tokens": (*config.special_tokens, *extra_ids) or None,
        }
    return {name: value for name, value in options.items() if value is not None}


def _mode_options(config: TokenizerConfig) -> dict[str, Any]:
    """What the tokenizer does with texts and conversations."""
    prompt_format = config.prompt_format
    if config.mode == "sft" and prompt_format is None:
        prompt_format = "auto"
    options: dict[str, Any] = {
        "prompt_format": prompt_format,
        "chat_template": config.chat_template,
        "parse_special_tokens": config.parse_special_tokens or None,
    }
    if config.mode == "multimodal":
        options |= {
            "image_tag_type": config.image_tag_type,
            "force_system_message": config.force_system_message,
        }
    return {name: value for name, value in options.items() if value is not None}


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
