"""Megatron's entry point: a tokenizer from a path and its metadata."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_ext.errors import TokenizerError
from megatron_ext.tokenizers.libraries import library_of
from megatron_ext.tokenizers.library_at import library_at
from megatron_ext.tokenizers.metadata import (
    METADATA_FILE,
    check_metadata,
    class_entry,
    importable_name,
    metadata_file,
    read_metadata,
    write_json,
)
from megatron_ext.tokenizers.saved_tokenizer import SavedTokenizer
from megatron_ext.tokenizers.text_tokenizer import MegatronTokenizerText
from megatron_ext.tokenizers.tokenizer_class import tokenizer_class


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
    ) -> MegatronTokenizerText:
        """A tokenizer with its metadata.

        Args:
            tokenizer_path: The tokenizer file or its directory. A folder of ``save_pretrained`` is
                held to what was saved.
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
        metadata, folder = _metadata(tokenizer_path, metadata_path)
        saved = SavedTokenizer.read(metadata, folder)
        kind = tokenizer_class(metadata)
        if saved is None:
            return kind(path=tokenizer_path, config=metadata, **options)
        return saved.load(kind, metadata, tokenizer_path, options)

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

        Without a class it names Megatron's, as main does, or none with a ``model_type``, as 0.16.
        The file appears whole or not at all, so several ranks may write and read it at once.

        Raises:
            TokenizerError: The tokenizer does not exist, or the file does and ``overwrite`` is not
                set, or it cannot be written.
            UnknownNameError: The library is unknown.
        """
        if metadata_path is None and not Path(tokenizer_path).exists():
            raise TokenizerError(
                "the tokenizer does not exist",
                fix="for a name that is no path, say with metadata_path where to write",
                where=tokenizer_path,
            )
        mode = library_of(tokenizer_library).mode
        entry: dict[str, str | None] = {"class_name": None, "class_path": None}
        if tokenizer_class is not None:
            entry = {**importable_name(tokenizer_class)}
        elif model_type is None:
            entry = {**class_entry(mode)}
        if model_type is not None:
            entry["model_type"] = model_type
        metadata = {"library": tokenizer_library, **entry, "chat_template": chat_template}
        file = metadata_file(tokenizer_path) if metadata_path is None else Path(metadata_path)
        checked = check_metadata(metadata, where="write_metadata")
        if file.exists() and not overwrite:
            raise TokenizerError(
                "the metadata file exists already", fix="pass overwrite=True", where=file
            )
        write_json(file, checked)


def _metadata(
    tokenizer_path: str | os.PathLike[str] | None,
    given: str | os.PathLike[str] | Mapping[str, Any] | None,
) -> tuple[dict[str, Any], Path]:
    """The metadata, checked, and the folder that they are about."""
    if given is not None and not isinstance(given, Mapping | str | os.PathLike):
        raise TokenizerError(
            "the metadata is neither a file nor a mapping",
            got=type(given).__name__,
            where="metadata_path",
        )
    if tokenizer_path is not None and not isinstance(tokenizer_path, str | os.PathLike):
        raise TokenizerError(
            "the tokenizer's path is no path",
            got=type(tokenizer_path).__name__,
            where="tokenizer_path",
        )
    if tokenizer_path is not None:
        folder = metadata_file(tokenizer_path).parent
    else:
        folder = Path() if given is None or isinstance(given, Mapping) else Path(given).parent
    if isinstance(given, Mapping):
        return check_metadata(given, where="metadata_path"), folder
    if given is not None:
        return read_metadata(given), folder
    if tokenizer_path is None:
        raise TokenizerError("no tokenizer is named", fix="pass tokenizer_path")
    beside = folder / METADATA_FILE
    if beside.is_file():
        return read_metadata(beside), folder
    return {"library": library_at(tokenizer_path)}, folder
