"""A tokenizer as an object of the transformers package, for serving code that asks for one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any


def transformers_tokenizer(tokenizer: Any, served_by: Any) -> Any:
    """A ``PreTrainedTokenizerFast`` around ``tokenizer``, an object of the tokenizers library.

    Conversations go through ``served_by``, a ``MegatronTokenizerText`` or a library's adapter: with
    the template that its user chose, and without reading control tokens in a message.

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
    ) -> Any:
        return served_by.apply_chat_template(
            conversation,
            self.chat_template if chat_template is None else chat_template,
            tokenize=tokenize,
            add_generation_prompt=add_generation_prompt,
            tools=tools,
            documents=documents,
            **options,
        )

    base = import_module("transformers").PreTrainedTokenizerFast
    kind: Any = type("TransformersTokenizer", (base,), {"apply_chat_template": chat})
    return kind(
        tokenizer_object=tokenizer,
        chat_template=served_by.chat_template,
        **served_by.special_token_names,
    )
