"""Library name -> adapter; a new library is a row here."""

from __future__ import annotations

import inspect
import os
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from megatron_ext.errors import TokenizerError
from megatron_ext.registry import Registry, did_you_mean
from megatron_ext.tokenizers.base import MegatronTokenizerTextAbstract


@dataclass(frozen=True, slots=True)
class TokenizerLibrary:
    """An adapter class by name, so that the table imports none."""

    module: str
    class_name: str

    def adapter(self) -> type[MegatronTokenizerTextAbstract]:
        """The adapter class; its module is imported, the third-party library is not."""
        adapter: type[MegatronTokenizerTextAbstract] = getattr(
            import_module(self.module), self.class_name
        )
        return adapter

    def options(self) -> list[str]:
        """Names of the options that the adapter takes besides the path."""
        return [
            name
            for name, parameter in inspect.signature(self.adapter()).parameters.items()
            if parameter.kind is inspect.Parameter.KEYWORD_ONLY
        ]

    def build(
        self, path: str | os.PathLike[str], options: dict[str, Any] | None = None
    ) -> MegatronTokenizerTextAbstract:
        """Construct the adapter.

        Raises:
            TokenizerError: An option that the library does not have, or the file is unusable.
            MissingDependencyError: The third-party library is not installed.
        """
        known = self.options()
        for name in options or {}:
            if name not in known:
                raise TokenizerError(
                    f"the {self.adapter().library} library has no such option",
                    got=repr(name),
                    expected=f"one of {', '.join(known)}" if known else "no options",
                    fix=did_you_mean(name, known),
                )
        factory: Any = self.adapter()
        built: MegatronTokenizerTextAbstract = factory(path, **(options or {}))
        return built


TOKENIZER_LIBRARIES: Registry[TokenizerLibrary] = Registry("tokenizer library")

for _name, _class_name in {
    "huggingface": "HuggingFaceTokenizer",
    "sentencepiece": "SentencePieceTokenizer",
    "tiktoken": "TiktokenTokenizer",
}.items():
    TOKENIZER_LIBRARIES.register(
        _name, TokenizerLibrary(f"{__package__}.{_name}_tokenizer", _class_name)
    )
