"""Tokenizer configuration from parsed flags of any Megatron release.

The attributes of the namespace tell the release, and with it the defaults of an old type:

* 0.16 has ``tokenizer_hf_include_special_tokens``, False unless asked for;
* 0.17 has ``tokenizer_hf_no_include_special_tokens`` too, which wins, and the other is True;
* 0.18 and later have the second alone;
* 0.18 and later have ``null_tokenizer_eod_id``: their null tokenizer's last id is the end of
  document, which was one more id before.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import Field, fields, replace
from functools import cache
from typing import Any

from megatron_ext.errors import ConfigError
from megatron_ext.registry import did_you_mean
from megatron_ext.tokenizers.config import TokenizerConfig
from megatron_ext.tokenizers.legacy_types import (
    LEGACY_TYPES,
    OLD_FLAG,
    LegacyType,
    old_prompt_format,
    prompt_format,
)

# Defaults of Megatron's parsers that differ from those of the fields.
_UNSET: dict[str, int] = {"tiktoken_num_special_tokens": 1000, "null_pad_id": -1}
_OF_IMAGES = ("image_tag_type", "force_system_message")
_SPECIAL_TOKENS = ("tokenizer_special_tokens", "special_tokens", "tiktoken_special_tokens")


def config_from_namespace(args: Any) -> TokenizerConfig:
    """The configuration that a namespace of Megatron's flags describes.

    Options that the library does not have are left out: Megatron's namespaces hold all options.
    Where ``tokenizer_type_implied`` is true, ``tokenizer_type`` only repeats the library for other
    code and is ignored here.

    Raises:
        ConfigError: The tokenizer type is unknown, flags contradict each other, or a value is
            unusable.
    """
    legacy = _legacy_type(args)
    values = _settle(args, legacy)
    values |= {
        "model": _first(args, ("tokenizer_model",)),
        "prompt_format": prompt_format(args, legacy),
        "special_tokens": tuple(_first(args, _SPECIAL_TOKENS) or ()),
        "engine": _engine(args, legacy),
        "hf_include_special_tokens": _include_special_tokens(args, legacy),
        "hf_use_fast": not getattr(args, "tokenizer_hf_no_use_fast", False),
    }
    for option in fields(TokenizerConfig):
        if option.name not in values:
            value = _first(args, _attributes(option))
            if value is not None and value != _UNSET.get(option.name):
                values[option.name] = value
    if legacy is not None:
        values = _with_implied_options(values, legacy, args)
        _warn_of_type(args, legacy, values)
    return TokenizerConfig(**_without_foreign_options(values))


def _legacy_type(args: Any) -> LegacyType | None:
    name = getattr(args, "tokenizer_type", None)
    if name is None or getattr(args, "tokenizer_type_implied", False):
        return None
    if name not in LEGACY_TYPES:
        raise ConfigError(
            "unknown tokenizer type",
            got=repr(name),
            expected=f"one of {', '.join(LEGACY_TYPES)}",
            fix=did_you_mean(name, list(LEGACY_TYPES)) or "use --tokenizer-library",
            where="--tokenizer-type",
        )
    return LEGACY_TYPES[name]


def _warn_of_type(args: Any, legacy: LegacyType, values: Mapping[str, Any]) -> None:
    """Warn in the first process of a run, with the equivalent flags."""
    if getattr(args, "tokenizer_library", None) is None and os.environ.get("RANK", "0") == "0":
        more = legacy.release_flag
        has_release_flag = more is not None and values.get(more.field)
        old_format = old_prompt_format(args) if legacy.prompt_format else None
        _warn_once(args.tokenizer_type, old_format, with_release_flag=bool(has_release_flag))


@cache
def _warn_once(name: str, old_format: str | None, *, with_release_flag: bool) -> None:
    """Warn of an old type, and of the old flag of its prompt format where that was given."""
    legacy, old = LEGACY_TYPES[name], f"--tokenizer-type {name} is an old name"
    if old_format is not None:
        legacy = replace(legacy, prompt_format=old_format)
        old = f"--tokenizer-type {name} and {OLD_FLAG} are old names"
    flags = legacy.flags
    if with_release_flag and legacy.release_flag is not None:
        flags = f"{flags} {legacy.release_flag.flag}"
    special = (
        " With --tokenizer-parse-special-tokens, special tokens that a text spells become their "
        "ids, as this type has it; without it they are text."
    )
    warnings.warn(
        f"{old}: use {flags}.{special if legacy.parses_special_tokens else ''}",
        FutureWarning,
        stacklevel=4,
    )


def _settle(args: Any, legacy: LegacyType | None) -> dict[str, Any]:
    """Library and mode, given by new flags, by a type or by both alike."""
    values: dict[str, Any] = {
        "library": getattr(args, "tokenizer_library", None),
        "mode": getattr(args, "tokenizer_mode", None),
    }
    for name, value in values.items():
        implied = None if legacy is None else getattr(legacy, name)
        if implied is None or value == implied:
            continue
        if value is not None:
            raise ConfigError(
                f"two flags name different values of the tokenizer's {name}",
                got=f"--tokenizer-{name} {value} and --tokenizer-type {args.tokenizer_type}, "
                f"which is {legacy.flags if legacy else ''}",
                fix="leave --tokenizer-type out",
                where=f"--tokenizer-{name}",
            )
        values[name] = implied
    values["mode"] = values["mode"] or "text"
    return values


def _engine(args: Any, legacy: LegacyType | None) -> str:
    engine: str | None = getattr(args, "tokenizer_engine", None)
    # Old types of other libraries ignore the flag.
    reads_flag = legacy is None or legacy.library in ("huggingface", "megatron")
    if not (reads_flag and getattr(args, "use_gigatoken", False)):
        return "auto" if engine is None else engine
    if engine not in (None, "gigatoken"):
        raise ConfigError(
            "two flags name different engines",
            got=f"--tokenizer-engine {engine} and --use-gigatoken",
            fix="leave --use-gigatoken out",
            where="--tokenizer-engine",
        )
    return "gigatoken"


def _include_special_tokens(args: Any, legacy: LegacyType | None) -> bool:
    include = getattr(args, "tokenizer_hf_include_special_tokens", None)
    leave_out = getattr(args, "tokenizer_hf_no_include_special_tokens", None)
    if leave_out or (legacy is not None and legacy.mode != "text"):
        return False
    if include is not None:
        return bool(include)
    return legacy is not None and leave_out is not None


def _with_implied_options(values: dict[str, Any], legacy: LegacyType, args: Any) -> dict[str, Any]:
    """``values`` with the options that an old type implies."""
    values = {
        "parse_special_tokens": legacy.parses_special_tokens,
        **values,
        "model": values["model"] if legacy.model is None else legacy.model,
    }
    if legacy.vocab_extra_ids:
        # The type takes no other special tokens.
        values["special_tokens"] = ()
        values["vocab_extra_ids"] = max(values.get("vocab_extra_ids", 0), legacy.vocab_extra_ids)
    if args.tokenizer_type == "NullMultimodalTokenizer" or (
        args.tokenizer_type == "NullTokenizer" and not hasattr(args, "null_tokenizer_eod_id")
    ):
        values["null_add_eod"] = True
    # Multimodal scripts pass all of these whatever the type, and most types ignore them.
    unread: tuple[str, ...] = () if legacy.mode == "multimodal" else _OF_IMAGES
    if args.tokenizer_type == "NullMultimodalTokenizer":
        unread = ("prompt_format", "special_tokens", *_OF_IMAGES)
    return {name: value for name, value in values.items() if name not in unread}


def _without_foreign_options(values: dict[str, Any]) -> dict[str, Any]:
    """``values`` without options that the library does not have."""
    library = values["library"]
    if library is None:
        return values
    others = {
        option.name
        for option in fields(TokenizerConfig)
        if library not in (option.metadata.get("only") or (library,))
    }
    return {name: value for name, value in values.items() if name not in others}


def _attributes(option: Field[Any]) -> tuple[str, ...]:
    """Attributes that may hold a field: those that its flag sets."""
    if option.name == "metadata":
        return ("tokenizer_metadata", "metadata_path")
    flag = option.metadata.get("flag")
    return (f"tokenizer_{option.name}" if flag is None else flag[2:].replace("-", "_"),)


def _first(args: Any, attributes: Sequence[str]) -> Any:
    """Value of the first attribute that exists and is set."""
    values = (getattr(args, name, None) for name in attributes)
    return next((value for value in values if value is not None), None)
