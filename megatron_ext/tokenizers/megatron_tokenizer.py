"""``MegatronTokenizer``, Megatron's entry point: a tokenizer from a path and its metadata.

The classes that Megatron's releases have for tokenizers of a model family are aliases of ours: a
tokenizer does not depend on the model that it serves.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, Final, TypeAlias

from megatron_ext.errors import TokenizerError
from megatron_ext.registry import did_you_mean
from megatron_ext.tokenizers.libraries import library_of
from megatron_ext.tokenizers.libraries.huggingface_vocab import vocab_files_at
from megatron_ext.tokenizers.metadata import (
    MEGATRON_PACKAGE,
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
from megatron_ext.tokenizers.tokenizer_files import FileLibrary, file_kind
from megatron_ext.tokenizers.vision_tokenizer import MegatronTokenizerVision

DefaultTokenizerText: TypeAlias = MegatronTokenizerText
GPTTokenizer: TypeAlias = MegatronTokenizerText
BertTokenizer: TypeAlias = MegatronTokenizerText
MambaTokenizer: TypeAlias = MegatronTokenizerText
T5Tokenizer: TypeAlias = MegatronTokenizerText
DefaultTokenizerVision: TypeAlias = MegatronTokenizerVision

MEGATRON_CLASSES: Final[Mapping[str, type[MegatronTokenizerText]]] = {
    "MegatronTokenizerText": MegatronTokenizerText,
    "DefaultTokenizerText": DefaultTokenizerText,
    "GPTTokenizer": GPTTokenizer,
    "BertTokenizer": BertTokenizer,
    "MambaTokenizer": MambaTokenizer,
    "T5Tokenizer": T5Tokenizer,
    "RetroTokenizer": MegatronTokenizerText,
    "MegatronTokenizerVision": MegatronTokenizerVision,
    "DefaultTokenizerVision": DefaultTokenizerVision,
}
"""Name of a class in Megatron's package of tokenizers -> our class."""


def tokenizer_class(metadata: Mapping[str, Any]) -> type[MegatronTokenizerText]:
    """The class that checked metadata name, else the one for the mode.

    A class of Megatron, of any release, is mapped to ours without importing megatron-core.

    Raises:
        TokenizerError: The class cannot be imported, or is not a ``MegatronTokenizerText``.
        UnknownNameError: The library is unknown.
    """
    name, module_name = metadata.get("class_name"), metadata.get("class_path")
    if name is None or module_name is None:
        return _class_for_mode(metadata)
    if f"{module_name}.".startswith(f"{MEGATRON_PACKAGE}."):
        return _megatron_class(metadata, name, module_name)
    kind = _import_class(name, module_name)
    if not (isinstance(kind, type) and issubclass(kind, MegatronTokenizerText)):
        raise TokenizerError(
            "this is not a tokenizer class",
            expected="a subclass of megatron_ext.tokenizers.MegatronTokenizerText",
            fix="derive it from that instead of Megatron's class",
            where=f"{module_name}.{name}",
        )
    return kind


def _class_for_mode(metadata: Mapping[str, Any]) -> type[MegatronTokenizerText]:
    mode = metadata.get("mode") or library_of(metadata["library"]).mode
    return MegatronTokenizerVision if mode == "multimodal" else MegatronTokenizerText


def _megatron_class(
    metadata: Mapping[str, Any], name: str, module_name: str
) -> type[MegatronTokenizerText]:
    """Our class for one of Megatron's; multimodal where the class or the mode is."""
    if name not in MEGATRON_CLASSES:
        raise TokenizerError(
            "Megatron has no such tokenizer class",
            got=repr(name),
            expected=f"one of {', '.join(MEGATRON_CLASSES)}",
            fix=did_you_mean(name, MEGATRON_CLASSES),
            where=module_name,
        )
    ours, for_mode = MEGATRON_CLASSES[name], _class_for_mode(metadata)
    return for_mode if issubclass(for_mode, ours) else ours


def _import_class(name: str, module_name: str) -> object:
    try:
        module = import_module(module_name)
    except ImportError as error:
        raise TokenizerError(
            "cannot import the tokenizer class", got=str(error), where=f"{module_name}.{name}"
        ) from error
    try:
        found: object = getattr(module, name)
    except AttributeError:
        raise TokenizerError(
            "the module has no such class",
            got=repr(name),
            fix=did_you_mean(name, dir(module)),
            where=module_name,
        ) from None
    return found


def library_at(path: str | os.PathLike[str]) -> FileLibrary:
    """The library of a tokenizer file, of the one in a directory, or of its vocabulary files.

    ``vocab.json`` with ``merges.txt``, and ``vocab.txt``, which Megatron writes to a checkpoint,
    are read by the HuggingFace library.

    Raises:
        TokenizerError: There is no file, or it is not a recognised tokenizer file.
    """
    return "huggingface" if vocab_files_at(path) is not None else file_kind(path).library


class MegatronTokenizer:
    """Namespace of Megatron's two entry points; it has no instances."""

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
                verified against its record.
            metadata_path: A metadata file, or its contents, which are copied; by default
                ``tokenizer_metadata.json`` beside the tokenizer, and without one the library is
                detected from the tokenizer file.
            options: Options of the class (``prompt_format``, ``chat_template`` ...) and of the
                library's adapter.

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

        Without a class it names Megatron's, as its main branch does; with a ``model_type`` none, as
        0.16 does.
        The file appears whole or not at all, so several ranks may write and read it at once.

        Raises:
            TokenizerError: The tokenizer does not exist, or the file does and ``overwrite`` is not
                set, or it cannot be written.
            UnknownNameError: The library is unknown.
        """
        if metadata_path is None and not Path(tokenizer_path).exists():
            raise TokenizerError(
                "the tokenizer does not exist",
                fix="for a name that is not a path, say with metadata_path where to write",
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
    """The checked metadata, and the folder of the tokenizer."""
    if given is not None and not isinstance(given, Mapping | str | os.PathLike):
        raise TokenizerError(
            "the metadata is neither a file nor a mapping",
            got=type(given).__name__,
            where="metadata_path",
        )
    if tokenizer_path is not None and not isinstance(tokenizer_path, str | os.PathLike):
        raise TokenizerError(
            "the tokenizer's path is not a path",
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
