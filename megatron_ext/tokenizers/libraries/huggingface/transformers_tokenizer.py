"""A tokenizer as an object of the transformers package, for serving code that asks for one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any

from megatron_ext.errors import TokenizerError

_NOT_DONE_HERE = ("return_tensors", "return_dict", "padding", "truncation", "max_length")
"""What transformers does with the ids of a conversation, and we do not."""


def transformers_tokenizer(tokenizer: Any, served_by: Any) -> Any:
    """A ``PreTrainedTokenizerFast`` around ``tokenizer``, an object of the tokenizers library.

    Conversations go through ``served_by``, a ``MegatronTokenizerText``: with the template that its
    user chose, and without reading control tokens that somebody wrote into a message.

    Raises:
        ImportError: transformers is not installed.
    """

    def chat(
        self: Any,
        conversation: Sequence[Mapping[str, Any]],
        tools: Sequence[Any] | None = None,
        documents: Sequence[Any] | None = None,
        chat_template: str | None = None,
        add_generation_prompt: bool = False,
        tokenize: bool = True,
        **options: Any,
    ) -> str | list[int]:
        written: str | list[int] = served_by.apply_chat_template(
            conversation,
            self.chat_template if chat_template is None else chat_template,
            tokenize=tokenize,
            add_generation_prompt=add_generation_prompt,
            tools=tools,
            documents=documents,
            **_variables(options),
        )
        return written

    base = import_module("transformers").PreTrainedTokenizerFast
    kind: Any = type("TransformersTokenizer", (base,), {"apply_chat_template": chat})
    return kind(
        tokenizer_object=tokenizer,
        chat_template=served_by.chat_template,
        **served_by.special_token_names,
    )


def _variables(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options that a template may see.

    Raises:
        TokenizerError: One asks for more than ids.
    """
    for name in _NOT_DONE_HERE:
        if options.get(name):
            raise TokenizerError(
                "a conversation gives a list of ids and nothing else",
                got=f"{name}={options[name]!r}",
                fix="leave it out",
            )
    return {name: value for name, value in options.items() if name not in _NOT_DONE_HERE}
