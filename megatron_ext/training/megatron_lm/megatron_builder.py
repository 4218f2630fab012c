"""Megatron-LM's ``build_tokenizer`` with our tokenizers."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from megatron_ext.tokenizers.build import build_tokenizer, padded_vocab_size


def with_our_tokenizers(original: Callable[..., Any]) -> Callable[..., Any]:
    """A builder that takes the place of ``original``, which stays for ``--legacy-tokenizer``."""

    @wraps(original)
    def build(args: Any, **overrides: Any) -> Any:
        if getattr(args, "legacy_tokenizer", False):
            return original(args, **overrides)
        tokenizer = build_tokenizer(args, **overrides)
        _set_padded_vocab_size(args, tokenizer.vocab_size)
        return tokenizer

    return build


def _set_padded_vocab_size(args: Any, vocab_size: int) -> None:
    """Set ``args.padded_vocab_size``, which Megatron-LM's models read, unless it is settled.

    A bare tokenizer configuration knows nothing of the model and is left as it is.
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
