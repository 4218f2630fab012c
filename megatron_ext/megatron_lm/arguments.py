"""Replacements for Megatron-LM's functions of tokenizer flags, building, saving and restoring.

A parser that has ``--sft`` gets a flag for every field of ``SFTConfig``, too.
"""

from __future__ import annotations

import argparse
import os
import warnings
from collections.abc import Callable, Sequence
from dataclasses import fields
from functools import wraps
from pathlib import Path
from typing import Any, Final, get_args

from megatron_ext.data.sft_records import SFTConfig
from megatron_ext.errors import ConfigError, TokenizerError
from megatron_ext.tokenizers.build import build_tokenizer, padded_vocab_size, tokenizer_library
from megatron_ext.tokenizers.config import TokenizerConfig
from megatron_ext.tokenizers.legacy_types import LEGACY_TYPES, OLD_FORMAT, UNSPOKEN
from megatron_ext.tokenizers.namespace import config_from_namespace
from megatron_ext.tokenizers.text_tokenizer import MegatronTokenizerText
from megatron_ext.tokenizers.tokenizer_files import FileLibrary, require_library
from megatron_ext.training.configuration.arguments import argparse_type, flags_of, terminal_help
from megatron_ext.training.configuration.tokenizer_arguments import (
    add_missing_flags,
    check_explicit_flags,
    explicit_flags,
    parse_noting_explicit_flags,
)


def with_our_flags(add_tokenizer_args: Callable[..., Any]) -> Callable[..., Any]:
    """``_add_tokenizer_args`` that adds our flags to its own, after all others."""

    @wraps(add_tokenizer_args)
    def add(parser: argparse.ArgumentParser, *args: Any, **options: Any) -> Any:
        result = add_tokenizer_args(parser, *args, **options)
        _take_our_flags(parser)
        return result

    return add


def _take_our_flags(parser: argparse.ArgumentParser) -> None:
    """Let ``parser`` take our flags, and set Megatron-LM's attributes from them.

    Flags are added when it parses, since a script adds its own until then, some of the same name.
    """
    parse = parser.parse_known_args
    has_legacy_tokenizers = "--legacy-tokenizer" in parser._option_string_actions

    def parse_known_args(
        args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[Any, list[str]]:
        add_missing_flags(parser)
        add_sft_arguments(parser)
        namespace, rest = parse_noting_explicit_flags(parser, parse, args, namespace)
        check_explicit_flags(namespace, has_legacy_tokenizers=has_legacy_tokenizers)
        check_sft_arguments(namespace)
        if not getattr(namespace, "legacy_tokenizer", False):
            config = config_from_namespace(namespace)
            if not _checkpoint_decides(namespace):
                _check_file(config)
            _keep_prompt_format(namespace, config)
            _imply_type(namespace, config)
        return namespace, rest

    parser.parse_known_args = parse_known_args  # type: ignore[method-assign, assignment]


def _checkpoint_decides(namespace: Any) -> bool:
    """Whether the arguments of a checkpoint will replace those of the tokenizer."""
    return bool(
        getattr(namespace, "use_checkpoint_args", False)
        and getattr(namespace, "use_tokenizer_model_from_checkpoint_args", True)
    )


def _keep_prompt_format(namespace: Any, config: TokenizerConfig) -> None:
    """Move the prompt format of the old flag to the new one, which checkpoints keep."""
    if getattr(namespace, "tokenizer_type", None) is None and config.prompt_format is not None:
        namespace.tokenizer_prompt_format = config.prompt_format
        setattr(namespace, UNSPOKEN, sorted({*getattr(namespace, UNSPOKEN, ()), OLD_FORMAT}))


def _imply_type(namespace: Any, config: TokenizerConfig) -> None:
    """Set ``tokenizer_type``, which Megatron-LM's scripts read, where new flags name a tokenizer.

    Without it scripts would set their own default.
    """
    if getattr(namespace, "tokenizer_type", None) is not None:
        return
    library = config.library
    if library is None:
        if config.model is None or _checkpoint_decides(namespace):
            return
        library = tokenizer_library(config)
    namespace.tokenizer_library = library
    namespace.tokenizer_type = _type_of(library, config.mode, config.model)
    namespace.tokenizer_type_implied = True
    include = "tokenizer_hf_include_special_tokens"
    if include not in explicit_flags(namespace) and hasattr(namespace, include):
        # On by default in one release; the new flags mean the same in all of them.
        setattr(namespace, include, False)


def _check_file(config: TokenizerConfig) -> None:
    """Check the tokenizer's file early: a script may build it where an error is not seen.

    ``preprocess_data.py`` of the main branch waits forever for a process that failed.
    """
    if config.model is None or config.vocab_file is not None:
        return
    for library in get_args(FileLibrary):
        if library == config.library:
            _ = require_library(config.model, library)


_TYPES = {
    "huggingface": "HuggingFaceTokenizer",
    "sentencepiece": "GPTSentencePieceTokenizer",
    "tiktoken": "TikTokenizer",
    "megatron": "GPT2BPETokenizer",
    "byte-level": "NullTokenizer",
    "null": "NullTokenizer",
}


def _type_of(library: str, mode: str, model: str | None) -> str:
    """The old type nearest to a library and mode."""
    if library == "megatron" and model is not None and model in LEGACY_TYPES:
        return model
    for name, legacy in LEGACY_TYPES.items():
        if mode != "text" and (legacy.library, legacy.mode) == (library, mode):
            return name
    return _TYPES[library]


RESTORED: Final = (
    "tokenizer_library",
    "tokenizer_mode",
    "tokenizer_prompt_format",
    "tokenizer_parse_special_tokens",
    "tokenizer_train_on",
    "tokenizer_train_thinking",
    "tokenizer_train_tool_calls",
    "tokenizer_exclude_unknown",
    "tokenizer_allow_control_tokens_in_content",
    "tokenizer_template_variables",
    "tokenizer_type_implied",
)
"""Attributes that, with ``tokenizer_type`` and ``tokenizer_model``, determine the tokenizer."""


def with_tokenizer_of_checkpoint(load_args: Callable[..., Any]) -> Callable[..., Any]:
    """``load_args_from_checkpoint`` that restores our flags where it restores the old type."""

    @wraps(load_args)
    def load(args: Any, *positional: Any, **options: Any) -> Any:
        loaded = load_args(args, *positional, **options)
        # Without a checkpoint it returns the arguments alone.
        if isinstance(loaded, tuple) and getattr(
            args, "use_tokenizer_model_from_checkpoint_args", False
        ):
            _restore(args, loaded[1])
        return loaded

    return load


def _restore(args: Any, saved: Any) -> None:
    for name in RESTORED:
        if hasattr(saved, name):
            setattr(args, name, getattr(saved, name))
        elif hasattr(args, name):
            delattr(args, name)


def with_whole_tokenizers(save_assets: Callable[..., Any]) -> Callable[..., Any]:
    """``save_tokenizer_assets`` that saves one of our tokenizers whole.

    The original goes by ``tokenizer_type`` and knows the files of some types. It is still used for
    checkpoints in an object store, which have no local folder.
    """

    @wraps(save_assets)
    def save(tokenizer: Any, config: Any, checkpoint_path: Any) -> Any:
        if not isinstance(tokenizer, MegatronTokenizerText) or "://" in str(checkpoint_path):
            return save_assets(tokenizer, config, checkpoint_path)
        if os.environ.get("RANK", "0") != "0":
            return None
        try:
            tokenizer.save_pretrained(Path(checkpoint_path) / "tokenizer", overwrite=True)
        except TokenizerError as error:
            # The checkpoint itself is complete, so the run goes on.
            warnings.warn(f"the checkpoint has no tokenizer: {error}", stacklevel=2)
        return None

    return save


_SFT: Final = "sft-"


def add_sft_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags to a parser that has ``--sft``, unless it has them already.

    A flag that is not given leaves no attribute.
    """
    known = parser._option_string_actions
    if "--sft" not in known:
        return
    flags = [flag for flag in flags_of(SFTConfig, prefix=_SFT) if flag.name not in known]
    group = parser.add_argument_group("conversations of --sft")
    for flag in flags:
        group.add_argument(
            flag.name,
            default=argparse.SUPPRESS,
            help=terminal_help(flag.help),
            **argparse_type(flag.hint),
        )


def sft_config(namespace: Any) -> SFTConfig:
    """The settings that parsed flags describe.

    Raises:
        ConfigError: A value cannot be used.
    """
    return SFTConfig(**_given_of_sft(namespace))


def check_sft_arguments(namespace: Any) -> None:
    """Check the flags before anything starts.

    Raises:
        ConfigError: A value cannot be used, a flag is given without ``--sft``, or ranks share
            sequences that the attention reads whole.
    """
    given = _given_of_sft(namespace)
    if given and not getattr(namespace, "sft", False):
        flag = f"--{_SFT}{next(iter(given)).replace('_', '-')}"
        raise ConfigError("the flag is for conversations", fix="add --sft", where=flag)
    SFTConfig(**given)
    ranks = getattr(namespace, "context_parallel_size", 1)
    is_local = getattr(namespace, "transformer_impl", None) == "local"
    if getattr(namespace, "sft", False) and is_local and ranks > 1:
        raise ConfigError(
            "megatron-core's local attention reads whole sequences alone",
            got=f"{ranks} with --transformer-impl local",
            expected="1, or --transformer-impl transformer_engine",
            where="--context-parallel-size",
        )


def _given_of_sft(namespace: Any) -> dict[str, Any]:
    names = {field.name: f"sft_{field.name}" for field in fields(SFTConfig)}
    return {
        name: getattr(namespace, attribute)
        for name, attribute in names.items()
        if hasattr(namespace, attribute)
    }


def with_our_tokenizers(original: Callable[..., Any]) -> Callable[..., Any]:
    """A builder in place of ``original``, which is still used for ``--legacy-tokenizer``."""

    @wraps(original)
    def build(args: Any, **overrides: Any) -> Any:
        if getattr(args, "legacy_tokenizer", False):
            return original(args, **overrides)
        tokenizer = build_tokenizer(args, **overrides)
        _set_padded_vocab_size(args, tokenizer.vocab_size)
        return tokenizer

    return build


def _set_padded_vocab_size(args: Any, vocab_size: int) -> None:
    """Set ``args.padded_vocab_size``, which Megatron-LM's models read, unless it is set.

    A bare tokenizer configuration, without the model's sizes, is left as it is.
    """
    if getattr(args, "padded_vocab_size", None) is not None:
        return
    divisor = getattr(args, "make_vocab_size_divisible_by", None)
    tensor_parallel = getattr(args, "tensor_model_parallel_size", None)
    if divisor is None or tensor_parallel is None or not getattr(args, "pad_vocab_size", True):
        return
    args.padded_vocab_size = padded_vocab_size(
        vocab_size,
        make_vocab_size_divisible_by=divisor,
        tensor_model_parallel_size=tensor_parallel,
    )
