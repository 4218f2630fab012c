"""``tokenizer_metadata.json``, the file that Megatron keeps beside a tokenizer.

Every release's layout is read: with ``model_type`` or without, with a class or with nulls, and with
older names of the libraries. Unknown keys are kept, so that a file of another version survives a
rewrite. Files written here are read by every release that knows the library: Megatron takes its own
class where none is named.
"""

from __future__ import annotations

import copy
import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, get_args

from megatron_ext.conversation.prompt_format import TEMPLATE_FILE
from megatron_ext.errors import TokenizerError, refused_by_system
from megatron_ext.files import write_text
from megatron_ext.tokenizers.legacy_types import TokenizerMode
from megatron_ext.tokenizers.libraries import TOKENIZER_LIBRARIES, library_of
from megatron_ext.tokenizers.tokenizer_files import names_template, path_inside, read_json

METADATA_FILE: Final = "tokenizer_metadata.json"
"""Name of the file beside a tokenizer."""

MEGATRON_PACKAGE: Final = "megatron.core.tokenizers"
"""Package of Megatron's tokenizer classes, in every release that has them."""

_TEXT_KEYS = (
    *("library", "mode", "class_name", "class_path", "chat_template", "model_type"),
    "prompt_format",
)


def class_entry(mode: str) -> dict[str, str]:
    """``class_name`` and ``class_path`` for a tokenizer that has no class of its own.

    They name Megatron's own class, which every release reads, and which means ours here.
    """
    kind = "vision" if mode == "multimodal" else "text"
    return {
        "class_name": f"MegatronTokenizer{kind.title()}",
        "class_path": f"{MEGATRON_PACKAGE}.{kind}.{kind}_tokenizer",
    }


def importable_name(kind: type) -> dict[str, str]:
    """Name and module by which another process finds a class.

    Raises:
        TokenizerError: It is not a class, or is not found by its name.
    """
    if not isinstance(kind, type):
        raise TokenizerError("tokenizer_class is not a class", got=repr(kind))
    found: object = getattr(sys.modules.get(kind.__module__), kind.__name__, None)
    if kind.__module__ == "__main__" or found is not kind:
        raise TokenizerError(
            "another process cannot find the tokenizer class by its name",
            got=f"{kind.__module__}.{kind.__qualname__}",
            fix="define it at the top of a module that can be imported",
        )
    return {"class_name": kind.__name__, "class_path": kind.__module__}


def metadata_file(tokenizer_path: str | os.PathLike[str]) -> Path:
    """Path of the metadata of a tokenizer file or directory."""
    path = Path(tokenizer_path)
    return (path.parent if path.is_file() else path) / METADATA_FILE


def read_metadata(file: str | os.PathLike[str]) -> dict[str, Any]:
    """The metadata in ``file``, checked; templates that it names by path are in its folder.

    Raises:
        TokenizerError: It is missing, broken, names a template outside its folder, or
            ``check_metadata`` refuses it.
    """
    path = Path(file)
    if not path.is_file():
        raise TokenizerError(
            "there is no tokenizer metadata",
            fix="write it with MegatronTokenizer.write_metadata, or pass a dict",
            where=path,
        )
    document = read_json(path)
    if not isinstance(document, dict):
        raise TokenizerError(
            "the tokenizer metadata is no JSON object", got=type(document).__name__, where=path
        )
    metadata = check_metadata(document, where=path)
    template, prompt_format = metadata.get("chat_template"), metadata.get("prompt_format")
    if names_template(template):
        metadata["chat_template"] = str(path_inside(path.parent, template, path))
    if prompt_format is not None and prompt_format.startswith(TEMPLATE_FILE):
        place = path_inside(path.parent, prompt_format.removeprefix(TEMPLATE_FILE), path)
        metadata["prompt_format"] = f"{TEMPLATE_FILE}{place}"
    return metadata


def check_metadata(metadata: Mapping[str, Any], *, where: object = None) -> dict[str, Any]:
    """A checked copy of ``metadata``, nested values included.

    Raises:
        TokenizerError: A key has a value of the wrong type, or only one of ``class_name`` and
            ``class_path`` is set.
        UnknownNameError: ``library`` is not in ``TOKENIZER_LIBRARIES``, for a tokenizer that has no
            class of its own.
    """
    for key in _TEXT_KEYS:
        value = metadata.get(key)
        if value is not None and not isinstance(value, str):
            raise TokenizerError(
                f"the metadata key {key} is malformed",
                got=repr(value),
                expected="a string",
                where=where,
            )
    if (metadata.get("class_name") is None) != (metadata.get("class_path") is None):
        raise TokenizerError(
            "a tokenizer class needs both of its keys",
            got=f"class_name = {metadata.get('class_name')!r}, "
            f"class_path = {metadata.get('class_path')!r}",
            fix="set both or neither",
            where=where,
        )
    mode = metadata.get("mode")
    if mode is not None and mode not in get_args(TokenizerMode):
        raise TokenizerError(
            "the metadata name an unknown mode",
            got=repr(mode),
            expected=f"one of {', '.join(get_args(TokenizerMode))}",
            where=where,
        )
    library = metadata.get("library")
    if library is None:
        raise TokenizerError(
            "the metadata names no library",
            expected=f"library, one of {', '.join(TOKENIZER_LIBRARIES)}",
            where=where,
        )
    if metadata.get("class_name") is None:
        _ = library_of(library)
    return copy.deepcopy(dict(metadata))


def metadata_text(document: Mapping[str, Any]) -> str:
    """The contents of a metadata file."""
    return json.dumps(dict(document), ensure_ascii=False, indent=2)


def write_json(file: Path, document: Mapping[str, Any]) -> None:
    """Replace ``file`` by ``document`` in one step; folders on the way are made.

    Raises:
        TokenizerError: The directory cannot be written.
    """
    with refused_by_system("cannot write the file", where=file, kind=TokenizerError):
        write_text(file, metadata_text(document))
