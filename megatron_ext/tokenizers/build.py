"""Construction of a tokenizer from its configuration, and padding of the vocabulary size."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any, cast

from megatron_ext.errors import ConfigError
from megatron_ext.registry import did_you_mean
from megatron_ext.tokenizers.config import TokenizerConfig
from megatron_ext.tokenizers.legacy_types import Library
from megatron_ext.tokenizers.libraries import TOKENIZER_LIBRARIES, LibraryName, library_of
from megatron_ext.tokenizers.megatron_tokenizer import MegatronTokenizer, library_at
from megatron_ext.tokenizers.metadata import check_metadata, metadata_file, read_metadata
from megatron_ext.tokenizers.namespace import config_from_namespace
from megatron_ext.tokenizers.text_tokenizer import MegatronTokenizerText
from megatron_ext.tokenizers.vision_tokenizer import MegatronTokenizerVision


def build_tokenizer(args: Any, **overrides: Any) -> MegatronTokenizerText | MegatronTokenizerVision:
    """Build the tokenizer that ``args`` describe.

    Args:
        args: A ``TokenizerConfig``, or a namespace of our flags or of Megatron-LM's own, with
            ``tokenizer_type`` or without. It is not changed.
        overrides: Fields of ``TokenizerConfig`` that override ``args``.

    Raises:
        ConfigError: No model is named, an option is for another library, two contradict, or there
            is no prompt format for the mode sft.
        TokenizerError: The file is missing, broken or of another library.
        MissingDependencyError: The library is not installed.
    """
    config = _with_overrides(_config(args), overrides)
    metadata = _metadata(config)
    config = replace(config, library=_library(config, metadata))
    tokenizer = MegatronTokenizer.from_pretrained(
        config.model,
        _checked_metadata(metadata, config),
        **_library_options(config),
        **_mode_options(config),
    )
    if config.mode == "sft":
        tokenizer.required_prompt_config()
    return tokenizer


def _config(args: Any) -> TokenizerConfig:
    """``args`` as a configuration."""
    if isinstance(args, TokenizerConfig):
        return args
    if not hasattr(args, "__dict__"):
        # Every attribute would be missing, and the error would name a missing tokenizer.
        raise ConfigError(
            "this describes no tokenizer",
            got=type(args).__name__,
            expected="a TokenizerConfig, or a namespace of Megatron's flags",
            fix="pass TokenizerConfig(**fields)" if isinstance(args, Mapping) else None,
        )
    return config_from_namespace(args)


def _with_overrides(config: TokenizerConfig, overrides: Mapping[str, Any]) -> TokenizerConfig:
    names = [option.name for option in fields(TokenizerConfig)]
    for name in overrides:
        if name not in names:
            raise ConfigError(
                "a tokenizer's configuration has no such field",
                got=repr(name),
                expected=f"one of {', '.join(names)}",
                fix=did_you_mean(name, names),
            )
    return replace(config, **overrides)


def _metadata(config: TokenizerConfig) -> dict[str, Any]:
    """Metadata that the configuration names, or beside the tokenizer; empty without any."""
    if isinstance(config.metadata, Mapping):
        return check_metadata(config.metadata, where="metadata")
    if config.metadata is not None:
        return read_metadata(config.metadata)
    beside = None if config.model is None else metadata_file(config.model)
    return read_metadata(beside) if beside is not None and beside.is_file() else {}


def tokenizer_library(config: TokenizerConfig) -> Library:
    """The library of a tokenizer; where unset, it is found from the metadata or the file.

    Raises:
        ConfigError: No model is named.
        TokenizerError: The file is missing, or is no tokenizer.
    """
    return _library(config, _metadata(config))


def names_tokenizer(config: TokenizerConfig) -> bool:
    """Whether the configuration names a tokenizer: a file, or a library that reads none."""
    return config.model is not None or _reads_no_file(_stated_library(config, _metadata(config)))


def _library(config: TokenizerConfig, metadata: Mapping[str, Any]) -> Library:
    library = _stated_library(config, metadata)
    if config.model is None and not _reads_no_file(library):
        raise ConfigError(
            "no tokenizer is named",
            expected="a tokenizer file, a directory that holds one, or a name on the hub",
            fix="set model, or pass --tokenizer-model",
            where="model",
        )
    return library_at(str(config.model)) if library is None else library


def _stated_library(config: TokenizerConfig, metadata: Mapping[str, Any]) -> Library | None:
    if config.library is None and metadata:
        return cast(Library, library_of(metadata["library"]).library)
    return config.library


def _reads_no_file(library: Library | None) -> bool:
    return library is not None and not TOKENIZER_LIBRARIES[library].reads_file


def _checked_metadata(metadata: Mapping[str, Any], config: TokenizerConfig) -> dict[str, Any]:
    """``metadata`` with the library and the mode of ``config``.

    Raises:
        ConfigError: The metadata name another library.
    """
    stated = library_of(metadata["library"]) if metadata else LibraryName(str(config.library))
    if stated.library != config.library:
        raise ConfigError(
            "the tokenizer's metadata name another library",
            got=config.library,
            expected=stated.library,
            fix="leave the library out, or name other metadata",
            where="library",
        )
    mode = metadata.get("mode") or stated.mode if config.mode == "text" else config.mode
    return {**metadata, "library": config.library, "mode": mode}


def _library_options(config: TokenizerConfig) -> dict[str, Any]:
    """Options of the library's adapter, without those at their defaults."""
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
    """Options for texts and conversations, without those at their defaults."""
    options: dict[str, Any] = {
        "prompt_format": config.prompt_format,
        "chat_template": config.chat_template,
        "parse_special_tokens": config.parse_special_tokens or None,
        **config.conversation_options(),
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
    """The least multiple of the product of both divisors that is at least ``vocab_size``.

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
