"""Registry of tokenizer libraries, and checks of options that several of them take."""

from __future__ import annotations

import inspect
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib import import_module
from numbers import Integral
from typing import Any, get_args

from megatron_ext.errors import TokenizerError, refused_input
from megatron_ext.registry import Registry, did_you_mean
from megatron_ext.tokenizers.base import MegatronTokenizerTextAbstract
from megatron_ext.tokenizers.config import Engine
from megatron_ext.tokenizers.legacy_types import TokenizerMode


def _option_types(kind: type[object]) -> dict[str, str]:
    """Type of each option of a class, as the class writes it."""
    return {
        name: str(parameter.annotation)
        for name, parameter in inspect.signature(kind).parameters.items()
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY
    }


@dataclass(frozen=True, slots=True)
class TokenizerLibrary:
    """An adapter class by name, so that the registry imports none."""

    module: str
    class_name: str
    reads_file: bool = True
    """Whether the adapter takes a path."""

    def adapter(self) -> type[MegatronTokenizerTextAbstract]:
        """The adapter class; its module is imported, the third-party library is not."""
        adapter: type[MegatronTokenizerTextAbstract] = getattr(
            import_module(self.module), self.class_name
        )
        return adapter

    def options(self) -> list[str]:
        """Names of the options that the adapter takes besides the path."""
        return list(self._types())

    def _types(self) -> dict[str, str]:
        """Type of each option, as the adapter writes it."""
        return _option_types(self.adapter())

    def build(
        self,
        path: str | os.PathLike[str] | None,
        options: Mapping[str, Any] | None = None,
        *,
        wrapper: type[object] = object,
    ) -> MegatronTokenizerTextAbstract:
        """Construct the adapter.

        Args:
            path: The tokenizer file or its directory.
            options: Options of the adapter.
            wrapper: Class of the tokenizer around it, whose own options an error names too.

        Raises:
            TokenizerError: The library reads a file and none is named, it does not have an option
                or not of this type, or the file is unusable.
            MissingDependencyError: The third-party library is not installed.
        """
        types = self._types()
        names = list(types)
        for name, value in (options or {}).items():
            if name not in names:
                taken = [*names, *(own for kind in wrapper.__mro__ for own in _option_types(kind))]
                raise TokenizerError(
                    f"the {self.adapter().library} library has no such option",
                    got=repr(name),
                    expected=f"one of {', '.join(taken)}" if taken else "no options",
                    fix=did_you_mean(name, taken),
                )
            kind = _CHECKED.get(types[name].removesuffix(" | None"))
            if value is not None and kind is not None and not isinstance(value, kind):
                raise TokenizerError(
                    f"the option of the {self.adapter().library} library has the wrong type",
                    got=f"{type(value).__name__}, {value!r}",
                    expected=types[name],
                    where=name,
                )
        if path is None and self.reads_file:
            raise TokenizerError(
                "no tokenizer is named", fix="pass a file, its directory or its name on the hub"
            )
        factory: Any = self.adapter()
        arguments = (path,) if self.reads_file else ()
        with refused_input("the tokenizer cannot be read", where=path, kind=TokenizerError):
            built: MegatronTokenizerTextAbstract = factory(*arguments, **(options or {}))
        return built


_CHECKED: Mapping[str, type] = {"int": Integral, "str": str}
"""Types of options that are checked before an adapter gets them."""

TOKENIZER_LIBRARIES: Registry[TokenizerLibrary] = Registry("tokenizer library")

for _name, _class_name, _reads_file in (
    ("huggingface", "HuggingFaceTokenizer", True),
    ("sentencepiece", "SentencePieceTokenizer", True),
    ("tiktoken", "TiktokenTokenizer", True),
    ("megatron", "MegatronHFTokenizer", True),
    ("byte-level", "ByteLevelTokenizer", False),
    ("null", "NullTokenizer", False),
):
    _module = f"{__package__}.{_name.replace('-', '_')}"
    TOKENIZER_LIBRARIES.register(_name, TokenizerLibrary(_module, _class_name, _reads_file))


@dataclass(frozen=True, slots=True)
class LibraryName:
    """Library and mode that a name in metadata stands for."""

    library: str
    """Name in ``TOKENIZER_LIBRARIES``."""
    mode: TokenizerMode = "text"
    """Use of the tokenizer."""


_NAMES_IN_METADATA: Mapping[str, LibraryName] = {
    "null-text": LibraryName("null"),
    "sft": LibraryName("huggingface", "sft"),
    "multimodal": LibraryName("huggingface", "multimodal"),
    "null-multimodal": LibraryName("null", "multimodal"),
}


def library_of(name: object) -> LibraryName:
    """The library that a metadata file of any Megatron release names.

    Raises:
        UnknownNameError: There is no such library.
    """
    if name in _NAMES_IN_METADATA:
        return _NAMES_IN_METADATA[str(name)]
    _ = TOKENIZER_LIBRARIES[str(name)]
    return LibraryName(str(name))


def engine_choice(name: str, *, reference_only: str | None = None) -> Engine:
    """``name`` as a checked engine.

    Args:
        name: Name of an engine.
        reference_only: Name of the library, where it has no fast engine.

    Raises:
        TokenizerError: There is no such engine, or the library does not have it.
    """
    for engine in get_args(Engine):
        if engine != name:
            continue
        if reference_only is not None and engine == "gigatoken":
            raise TokenizerError(
                f"the {reference_only} library has no fast engine",
                got="engine gigatoken",
                fix="leave engine at auto",
            )
        choice: Engine = engine
        return choice
    raise TokenizerError(
        "unknown engine", got=repr(name), expected=f"one of {', '.join(get_args(Engine))}"
    )


def distinct_names(given: Iterable[str], option: str) -> tuple[str, ...]:
    """The names of a list, checked.

    Args:
        given: Names that the user gave.
        option: Name of the option.

    Raises:
        TokenizerError: It is not a list of names, or a name is empty or repeated.
    """
    names = () if isinstance(given, str) else tuple(given)
    wrong = next((name for name in names if not isinstance(name, str) or not name), None)
    if isinstance(given, str) or wrong is not None:
        raise TokenizerError(
            "special tokens are given as a list of names",
            got=repr(given if wrong is None else wrong),
            expected="strings that are not empty",
            where=option,
        )
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise TokenizerError("a special token is named twice", got=repr(twice), where=option)
    return names
