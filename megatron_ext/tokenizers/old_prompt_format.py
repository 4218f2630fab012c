"""The prompt format that flags name, in today's words or in Megatron's old ones."""

from __future__ import annotations

import os
import warnings
from functools import cache
from typing import Any, Final

from megatron_ext.errors import ConfigError
from megatron_ext.tokenizers.legacy_types import LEGACY_TYPES, LegacyType

OLD_FLAG: Final = "--sft-tokenizer-prompt-format"
"""Megatron's flag, whose default is the format of ``SFTTokenizer``."""

UNSPOKEN: Final = "tokenizer_unspoken"
"""Attribute of a namespace: names of attributes that hold what no user said of them."""

OLD_FORMAT: Final = "sft_tokenizer_prompt_format"
"""Attribute that the flag sets."""


def prompt_format(args: Any, legacy: LegacyType | None) -> str | None:
    """The prompt format that a namespace of flags names; the mode sft has ``auto`` without one.

    The first of these: ``--tokenizer-prompt-format``; the old flag, where it was given; Megatron's
    default for the old type, where one was given.

    Args:
        args: Parsed flags.
        legacy: The old type that was given.

    Raises:
        ConfigError: Two different ones were given.
    """
    new: str | None = getattr(args, "tokenizer_prompt_format", None)
    if legacy is not None and legacy.prompt_format is None:
        # The type never minded the old flag.
        return new
    old = old_prompt_format(args)
    if new is not None and old is not None and new != old:
        raise ConfigError(
            "two flags name different prompt formats",
            got=f"--tokenizer-prompt-format {new} and {OLD_FLAG} {old}",
            fix=f"leave {OLD_FLAG} out",
        )
    # The warning of an old type that stands alone has the format in it.
    is_said = legacy is not None and getattr(args, "tokenizer_library", None) is None
    if old is not None and not is_said and os.environ.get("RANK", "0") == "0":
        _warn_once(old)
    default = None if legacy is None else legacy.prompt_format
    return next((name for name in (new, old, default) if name is not None), None)


def old_prompt_format(args: Any) -> str | None:
    """What the old flag was given; None where it was not.

    Megatron's parser puts a default in. Where it parsed without ``parse_noting_spoken``, nothing
    tells that from the same words of a user.
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
