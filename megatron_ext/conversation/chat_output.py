"""Options of transformers' ``apply_chat_template``, and the forms in which it returns ids.

Refuses options that are not supported, and tokenizers of other packages.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from importlib import import_module
from typing import Any, Final

import numpy as np

from megatron_ext.errors import TokenizerError


@dataclass(frozen=True, kw_only=True, slots=True)
class ChatOutput:
    """Form in which ids are returned, in the options of transformers.

    Raises:
        TokenizerError: A value is not supported.
    """

    truncation: bool = False
    """Keep the first ``max_length`` ids."""
    max_length: int | None = None
    """Most ids; of no effect without ``truncation``."""
    return_tensors: str | None = None
    """``np`` or ``pt``: int64 [1, T] instead of a list."""
    return_dict: bool = False
    """``input_ids`` and ``attention_mask``."""

    def __post_init__(self) -> None:
        for name in ("truncation", "return_dict"):
            self._check(name, isinstance(getattr(self, name), bool), "True or False")
        self._check("return_tensors", self.return_tensors in (None, "np", "pt"), "np or pt")
        if self.truncation:
            is_length = isinstance(self.max_length, int) and self.max_length >= 1
            self._check("max_length", is_length, "how many ids to keep, >= 1")

    def _check(self, name: str, holds: bool, expected: str) -> None:
        if not holds:
            raise TokenizerError(
                "apply_chat_template cannot use the option",
                got=repr(getattr(self, name)),
                expected=expected,
                where=name,
            )

    def of(self, ids: list[int]) -> Any:
        """``ids`` [T] in this form."""
        shown = ids[: self.max_length] if self.truncation else ids
        if not self.return_dict:
            return self._formed(shown)
        return {"input_ids": self._formed(shown), "attention_mask": self._formed([1] * len(shown))}

    def _formed(self, row: list[int]) -> Any:
        if self.return_tensors is None:
            return row
        array = np.array([row], np.int64)
        return array if self.return_tensors == "np" else import_module("torch").from_numpy(array)


def refuse_other_options(options: Mapping[str, Any]) -> None:
    """Refuse options of transformers that are not supported here and are no template variables.

    Raises:
        TokenizerError: One of ``options`` is such, with a value other than its neutral one.
    """
    for name, (neutral, fix) in _NOT_TAKEN.items():
        if name in options and options[name] not in neutral:
            taken = ", ".join(option.name for option in fields(ChatOutput))
            raise TokenizerError(
                "apply_chat_template does not take this option of transformers",
                got=f"{name}={options[name]!r}",
                expected=f"{taken}, or a template variable such as tools or documents",
                fix=fix,
            )


_NOT_TAKEN: Final[Mapping[str, tuple[tuple[object, ...], str]]] = {
    "padding": ((None, False, "do_not_pad"), "fill the row up with the tokenizer's pad_id"),
    "continue_final_message": ((None, False), "cut the text of tokenize=False where it goes on"),
    "return_assistant_tokens_mask": (
        (None, False),
        "take the target of tokenize_conversation(messages, True, False), which is -100 where a"
        " token is not trained and is not shifted yet",
    ),
    "sanitize_control_tokens": (
        (None, True),
        "leave it out, or set allow_control_tokens_in_content for the tokenizer",
    ),
    "tokenizer_kwargs": ((None, {}), "leave it out"),
}
"""Option -> its neutral values, which are accepted, and what to do instead of others."""


def refuse_foreign(tokenizer: object, method: str) -> None:
    """Refuse an object that is not a tokenizer of this package, such as one of transformers.

    Args:
        tokenizer: The object that a caller passed.
        method: A method that the tokenizers of this package have here.

    Raises:
        TokenizerError: ``tokenizer`` does not have it.
    """
    if hasattr(tokenizer, method):
        return
    kind = type(tokenizer)
    call = "MegatronTokenizer.from_pretrained"
    fix = f"call {call} with the folder of its files"
    if isinstance(tokenizer, str):
        fix = f"pass {call}({tokenizer!r})"
    elif hasattr(tokenizer, "convert_tokens_to_ids"):
        fix = "pass megatron_ext.from_huggingface(tokenizer)"
    raise TokenizerError(
        "this is not a tokenizer of megatron_ext",
        got=f"{kind.__module__.partition('.')[0]}.{kind.__qualname__}",
        expected=f"what {call} or from_huggingface returns",
        fix=fix,
    )
