"""Megatron's entry point: a tokenizer from a path and its metadata."""

from __future__ import annotations

import os
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from megatron_ext.errors import TokenizerError
from megatron_ext.registry import did_you_mean
from megatron_ext.tokenizers.file_kind import file_kind
from megatron_ext.tokenizers.libraries import library_of
from megatron_ext.tokenizers.metadata import (
    check_metadata,
    metadata_file,
    read_metadata,
    write_json,
)
from megatron_ext.tokenizers.text_tokenizer import MegatronTokenizerText
from megatron_ext.tokenizers.vision_tokenizer import MegatronTokenizerVision

_CLASSES = (MegatronTokenizerText, MegatronTokenizerVision)


class MegatronTokenizer:
    """Two functions under the name that Megatron users know; it has no instances."""

    def __init__(self) -> None:
        raise TokenizerError(
            "MegatronTokenizer has no instances", fix="call MegatronTokenizer.from_pretrained"
        )

    @staticmethod
    def from_pretrained(
        tokenizer_path: str | os.PathLike[str] | None = None,
        metadata_path: str | os.PathLike[str] | Mapping[str, Any] | None = None,
        **options: Any,
    ) -> MegatronTokenizerText | MegatronTokenizerVision:
        """A tokenizer with its metadata.

        Args:
            tokenizer_path: The tokenizer file or its directory.
            metadata_path: A metadata file, or its contents, which are copied; by default
                ``tokenizer_metadata.json`` beside the tokenizer, and without one the library is
                told from the tokenizer file.
            options: What the class takes (``prompt_format``, ``chat_template`` ...) and what the
                library takes besides the path.

        Returns:
            A ``MegatronTokenizerVision`` where the metadata's ``mode`` or ``library`` is
            multimodal, or the class that they name; else a ``MegatronTokenizerText``.

        Raises:
            TokenizerError: The tokenizer, its metadata or an option is unusable.
            ConfigError: The prompt format is unusable, or the library unknown.
            MissingDependencyError: The library is not installed.
        """
        metadata = _metadata(tokenizer_path, metadata_path)
        return _class_of(metadata)(tokenizer_path, metadata, **options)

    @staticmethod
    def write_metadata(
        tokenizer_path: str | os.PathLike[str],
        tokenizer_library: str,
        model_type: str | None = None,
        tokenizer_class: type[MegatronTokenizerText] | None = None,
        chat_template: str | None = None,
        overwrite: bool = False,
        metadata_path: str | os.PathLike[str] | None = None,
    ) -> None:
        """Write ``tokenizer_metadata.json`` beside a tokenizer, or to ``metadata_path``.

        The file appears whole or not at all, so several ranks may write and read it at once.

        Raises:
            TokenizerError: The tokenizer does not exist, or the file does and ``overwrite`` is not
                set, or it cannot be written.
            UnknownNameError: The library is unknown.
        """
        if not Path(tokenizer_path).exists():
            raise TokenizerError("the tokenizer does not exist", where=tokenizer_path)
        metadata = {
            "library": tokenizer_library,
            "class_name": None if tokenizer_class is None else tokenizer_class.__name__,
            "class_path": None if tokenizer_class is None else tokenizer_class.__module__,
            "chat_template": chat_template,
        }
        if model_type is not None:
            metadata["model_type"] = model_type
        file = metadata_file(tokenizer_path) if metadata_path is None else Path(metadata_path)
        _ = library_of(tokenizer_library)
        if file.exists() and not overwrite:
            raise TokenizerError(
                "the metadata file exists already", fix="pass overwrite=True", where=file
            )
        write_json(file, check_metadata(metadata, where=file))


def _metadata(
    tokenizer_path: str | os.PathLike[str] | None,
    given: str | os.PathLike[str] | Mapping[str, Any] | None,
) -> dict[str, Any]:
    if isinstance(given, Mapping):
        return check_metadata(given, where="metadata_path")
    if given is not None:
        if not isinstance(given, str | os.PathLike):
            raise TokenizerError(
                "the metadata is neither a file nor a mapping",
                got=type(given).__name__,
                where="metadata_path",
            )
        return read_metadata(given)
    if tokenizer_path is None:
        raise TokenizerError("no tokenizer is named", fix="pass tokenizer_path")
    beside = metadata_file(tokenizer_path)
    if beside.is_file():
        return read_metadata(beside)
    return {"library": file_kind(tokenizer_path).library}


def _class_of(
    metadata: Mapping[str, Any],
) -> type[MegatronTokenizerText | MegatronTokenizerVision]:
    """The class that the metadata names, else the one for their mode.

    Raises:
        TokenizerError: The class cannot be imported, or is no tokenizer.
    """
    name, module_name = metadata.get("class_name"), metadata.get("class_path")
    if name is None or module_name is None:
        mode = metadata.get("mode") or library_of(metadata["library"]).mode
        return MegatronTokenizerVision if mode == "multimodal" else MegatronTokenizerText
    try:
        found = getattr(import_module(module_name), name)
    except ImportError as error:
        raise TokenizerError(
            "cannot import the tokenizer class", got=str(error), where=f"{module_name}.{name}"
        ) from error
    except AttributeError:
        raise TokenizerError(
            "the module has no such class",
            got=repr(name),
            fix=did_you_mean(name, dir(import_module(module_name))),
            where=module_name,
        ) from None
    if not (isinstance(found, type) and issubclass(found, _CLASSES)):
        raise TokenizerError(
            "this is no tokenizer class",
            expected="a subclass of MegatronTokenizerText or MegatronTokenizerVision",
            where=f"{module_name}.{name}",
        )
    return found
