"""What a user said in tokenizer flags of several Megatron releases at once."""

from __future__ import annotations

from collections.abc import Set
from typing import Any, Final

from megatron_ext.errors import ConfigError

_OPPOSITES: Final = {
    "tokenizer_hf_include_special_tokens": "tokenizer_hf_no_include_special_tokens",
    "tokenizer_hf_use_fast": "tokenizer_hf_no_use_fast",
}
SPOKEN_DESTINATIONS: Final[frozenset[str]] = frozenset(
    {*_OPPOSITES, *_OPPOSITES.values(), "sft_tokenizer_prompt_format"}
)
"""Attributes for which it matters whether the user said them: a release has its own defaults."""


def settle_spoken(namespace: Any, spoken: Set[str], *, has_legacy_tokenizers: bool = False) -> None:
    """Resolve what the user said in flags of several releases at once.

    Args:
        namespace: Parsed flags; ``tokenizer_prompt_format`` is set where only the old flag was
            given and no old type takes it.
        spoken: Those of ``SPOKEN_DESTINATIONS`` that were given.
        has_legacy_tokenizers: Whether something honours ``--legacy-tokenizer``.

    Raises:
        ConfigError: Flags contradict each other.
    """
    for name, opposite in _OPPOSITES.items():
        if {name, opposite} <= spoken and getattr(namespace, name):
            raise ConfigError(
                "two flags contradict each other",
                got=f"{_flag(name)} and {_flag(opposite)}",
                fix="leave one out",
            )
    if getattr(namespace, "legacy_tokenizer", False):
        _check_legacy_tokenizer(namespace, has_legacy_tokenizers)
    if "sft_tokenizer_prompt_format" not in spoken:
        return
    old, new = namespace.sft_tokenizer_prompt_format, _said(namespace, "tokenizer_prompt_format")
    if new is not None and new != old:
        raise ConfigError(
            "two flags name different prompt formats",
            got=f"--tokenizer-prompt-format {new} and --sft-tokenizer-prompt-format {old}",
            fix="leave --sft-tokenizer-prompt-format out",
        )
    if _said(namespace, "tokenizer_mode") == "sft":
        namespace.tokenizer_prompt_format = old


def _check_legacy_tokenizer(namespace: Any, available: bool) -> None:
    if not available:
        raise ConfigError(
            "nothing here tokenizes as Megatron-LM did before 0.16",
            fix="leave the flag out; the ids of Llama2Tokenizer lose their BOS",
            where="--legacy-tokenizer",
        )
    for name in ("tokenizer_library", "tokenizer_mode", "tokenizer_engine"):
        if _said(namespace, name) is not None:
            raise ConfigError(
                "two flags contradict each other",
                got=f"--legacy-tokenizer and {_flag(name)}",
                fix="leave --legacy-tokenizer out",
            )


def _said(namespace: Any, name: str) -> Any:
    return getattr(namespace, name, None)


def _flag(destination: str) -> str:
    return f"--{destination.replace('_', '-')}"
