"""Tokenizer files: recognition of their format, and download from the HuggingFace hub."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatch
from importlib.util import find_spec
from pathlib import Path
from typing import Final, Literal, TypeGuard

from megatron_ext import files
from megatron_ext.errors import TokenizerError, refused_by_system
from megatron_ext.registry import with_near_path

# One or two words. A name with the ending of a tokenizer file is a misspelled path.
_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?", re.ASCII)
_FILE_ENDING = re.compile(r"\.(json|model|tiktoken|txt|jinja|vocab|bin)$")
# A tokenizer is read from the first of these that exists.
_VOCABULARIES = (("tokenizer.json",), ("tekken.json", "tokenizer.model", "*.tiktoken"))
_CONFIG = "tokenizer_config.json"
TEMPLATE_FILE: Final = "chat_template.jinja"
"""Name of the file with the default chat template of a HuggingFace tokenizer."""
TEMPLATE_FOLDER: Final = "additional_chat_templates"
"""Folder beside it with the other ones."""
TEMPLATE_NAME: Final = re.compile(r"[\w. -]{1,100}")
"""Form of the name of a template, which is printed, and names its file."""
_BESIDE = (_CONFIG, "special_tokens_map.json", TEMPLATE_FILE, f"{TEMPLATE_FOLDER}/*.jinja")
_SECONDS_TO_ANSWER = 5.0
_JINJA = re.compile(r"\{[{%]")


def is_hub_name(path: str | os.PathLike[str]) -> bool:
    """Whether ``path`` could be a name on the hub: ``gpt2`` or ``organisation/model``."""
    name = os.fspath(path)
    return bool(_NAME.fullmatch(name)) and not _FILE_ENDING.search(name) and ".." not in name


def local_files(name: str) -> Path:
    """The local folder with the files of a tokenizer on the hub.

    A tokenizer in the hub's cache with its configuration is used without a request, so that ranks
    agree and a resumed run reads the same files. Others are downloaded; several processes may do so
    at once, because the hub's library locks and renames the files it writes.

    Raises:
        TokenizerError: The hub does not have it or cannot be reached, or its library is missing.
    """
    if not is_hub_name(name):
        raise _not_found(name, "no such file or directory")
    if find_spec("huggingface_hub") is None:
        raise _not_found(
            name,
            "no such file or directory; the hub cannot be asked without the package "
            "huggingface_hub",
            fix='correct it, or for a name on the hub: pip install "megatron-ext[huggingface]"',
        )
    cached = _cached_folder(name)
    if cached is not None and _is_complete(cached):
        return cached
    try:
        return _fetch(name)
    except Exception as error:
        # Releases of the library raise exceptions of different network libraries.
        if cached is not None and _vocabulary_in([file.name for file in cached.iterdir()]):
            return cached
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise _not_found(name, f"no such file or directory; the hub: {reason}") from error


def _cached_folder(name: str) -> Path | None:
    from huggingface_hub import snapshot_download

    try:
        # Without patterns the library does not check for missing files.
        return Path(snapshot_download(name, allow_patterns=[], local_files_only=True))
    except Exception:
        # As above; a download reports problems of the cache better.
        return None


def _is_complete(folder: Path) -> bool:
    """Whether both files exist: other tools cache the first one only."""
    return all((folder / name).is_file() for name in (*_VOCABULARIES[0], _CONFIG))


def _fetch(name: str) -> Path:
    """Download the first vocabulary that the hub has, with what is read beside it."""
    from huggingface_hub import HfApi, snapshot_download

    # This call comes first because it has a timeout, unlike the other.
    files = HfApi().model_info(name, timeout=_SECONDS_TO_ANSWER).siblings or []
    vocabulary = _vocabulary_in([file.rfilename for file in files])
    if vocabulary is None:
        raise LookupError("there is no tokenizer in it")
    return Path(snapshot_download(name, allow_patterns=[*vocabulary, *_BESIDE]))


def _vocabulary_in(names: list[str]) -> tuple[str, ...] | None:
    top = [name for name in names if "/" not in name]
    return next(
        (v for v in _VOCABULARIES if any(fnmatch(name, p) for name in top for p in v)), None
    )


def _not_found(name: str, reason: object, *, fix: str | None = None) -> TokenizerError:
    return TokenizerError(
        "the tokenizer does not exist",
        got=reason,
        expected="a file or a directory on this machine, or a name on the HuggingFace hub",
        where=name,
        fix=with_near_path(fix, name),
    )


FileFormat = Literal["huggingface", "sentencepiece", "tiktoken-json", "tekken", "tiktoken-ranks"]
FileLibrary = Literal["huggingface", "sentencepiece", "tiktoken"]

_LIBRARY_OF: Mapping[FileFormat, FileLibrary] = {
    "huggingface": "huggingface",
    "sentencepiece": "sentencepiece",
    "tiktoken-json": "tiktoken",
    "tekken": "tiktoken",
    "tiktoken-ranks": "tiktoken",
}
# In a directory, the first of these that exists is the tokenizer.
_NAMES_IN_DIRECTORY = ("tokenizer.json", "tekken.json", "tokenizer.model")
_SUFFIXES_IN_DIRECTORY = (".model", ".tiktoken")
_HEAD_BYTES = 1 << 16
_RANK_LINE = re.compile(rb"[A-Za-z0-9+/]+={0,2} \d+\s*\n")
_HUGGINGFACE_KEY = re.compile(rb'"(added_tokens|pre_tokenizer|normalizer|truncation)"\s*:')
_TEKKEN_KEY = re.compile(rb'"(num_vocab_tokens|default_num_special_tokens|token_bytes)"\s*:')


@dataclass(frozen=True, slots=True)
class FileKind:
    """A tokenizer file and its format."""

    file: Path
    """The file itself, also where a directory was given."""
    format: FileFormat
    """Format of its contents."""

    @property
    def library(self) -> FileLibrary:
        """Name in ``TOKENIZER_LIBRARIES`` of the library that reads it."""
        return _LIBRARY_OF[self.format]


def file_kind(path: str | os.PathLike[str]) -> FileKind:
    """Recognise the tokenizer file at a path, in a directory, or of a name on the hub.

    Raises:
        TokenizerError: It does not exist, cannot be read or is not a recognised tokenizer file.
    """
    file = _tokenizer_file(Path(path))
    with (
        refused_by_system("cannot read the tokenizer file", where=file, kind=TokenizerError),
        file.open("rb") as stream,
    ):
        head = stream.read(_HEAD_BYTES)
    file_format = _format_of(head, file)
    if file_format is None:
        raise TokenizerError(
            "not a recognised tokenizer file",
            got="an empty file" if not head else f"a file that begins with {head[:16]!r}",
            expected="tokenizer.json (huggingface), a SentencePiece model or a tiktoken rank list",
            where=file,
        )
    return FileKind(file, file_format)


def require_library(path: str | os.PathLike[str], library: FileLibrary) -> FileKind:
    """The tokenizer file at ``path``, which ``library`` has to be able to read.

    Of a folder with files of several libraries it is the one of ``library``.

    Raises:
        TokenizerError: As ``file_kind``, or the file belongs to another library.
    """
    kind = file_kind(path)
    if kind.library != library and kind.file != Path(path):
        others = (kind.file.parent / name for name in _NAMES_IN_DIRECTORY)
        kinds = (file_kind(file) for file in others if file.is_file())
        kind = next((other for other in kinds if other.library == library), kind)
    if kind.library != library:
        raise TokenizerError(
            f"the {library} library cannot read this file",
            got=f"a {kind.format} file",
            fix=f"use library {kind.library!r}",
            where=kind.file,
        )
    return kind


def read_json(file: Path) -> object:
    """The JSON document in ``file``.

    Raises:
        TokenizerError: It cannot be read, or is not JSON, for example because it is truncated.
    """
    return parse_json(read_file(file), file)


def read_file(file: Path) -> bytes:
    """The bytes of ``file``.

    Raises:
        TokenizerError: It cannot be read.
    """
    with refused_by_system("cannot read the file", where=file, kind=TokenizerError):
        return files.read_bytes(file)


def read_template(file: Path) -> str:
    """The Jinja source in a file.

    Raises:
        TokenizerError: It cannot be read, or is not UTF-8.
    """
    try:
        return files.read_bytes(file).decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise TokenizerError(
            "cannot read the chat template",
            got=error.strerror if isinstance(error, OSError) else "text that is not UTF-8",
            where=file,
        ) from error


def template_files(folder: Path) -> list[Path]:
    """Files of the chat templates beside a HuggingFace tokenizer that are not the default."""
    files = (folder / TEMPLATE_FOLDER).glob("*.jinja")
    return sorted(file for file in files if TEMPLATE_NAME.fullmatch(file.stem) and file.is_file())


def names_template(text: object) -> TypeGuard[str]:
    """Whether a chat template is the path of a file, and no Jinja source."""
    return isinstance(text, str) and text.endswith(".jinja") and "\n" not in text


def given_template(template: object, own: Mapping[str, str]) -> str:
    """Jinja source of a chat template that a user gives.

    Args:
        template: A name in ``own``, the path of a file that ends in .jinja, or the source.
        own: The tokenizer's own templates by name.

    Raises:
        TokenizerError: It is none of these, or the file cannot be read.
    """
    if isinstance(template, str):
        if template in own:
            return own[template]
        if names_template(template):
            return read_template(Path(template))
        if _JINJA.search(template):
            return template
    names = f", or a name: {', '.join(sorted(own))}" if own else ""
    raise TokenizerError(
        "there is no such chat template"
        if isinstance(template, str)
        else "the chat template is not a text",
        got=repr(template) if isinstance(template, str) else type(template).__name__,
        expected=f"Jinja source, the path of a file that ends in .jinja{names}",
        where="chat_template",
    )


def path_inside(folder: Path, name: str, where: Path) -> Path:
    """The path of a template that a file of a tokenizer's folder names.

    Whoever made the tokenizer says which file is read, so only its own files are.

    Args:
        folder: The tokenizer's folder.
        name: Relative to it, or absolute.
        where: The file that names it, for the error.

    Raises:
        TokenizerError: The path leaves the folder.
    """
    folder = folder.absolute()
    place = Path(os.path.normpath(folder / name))
    if not place.is_relative_to(folder):
        raise TokenizerError(
            "a tokenizer names a template outside its folder",
            got=name,
            expected=f"a file in {folder}",
            fix="if it is yours, pass it by --chat-template or --tokenizer-prompt-format",
            where=where,
        )
    return place


def parse_json(contents: bytes, file: Path) -> object:
    """The JSON document ``contents``, which were read from ``file``.

    Raises:
        TokenizerError: It is not JSON, for example because it is truncated.
    """
    try:
        return files.parse_json(contents)
    except ValueError as error:
        raise TokenizerError(
            "the file is not valid JSON",
            got=str(error),
            fix="fetch it again: it may be truncated",
            where=file,
        ) from error


def _tokenizer_file(path: Path) -> Path:
    if path.is_file():
        return path
    if not path.is_dir():
        path = local_files(os.fspath(path))
    for name in _NAMES_IN_DIRECTORY:
        if (path / name).is_file():
            return path / name
    candidates = sorted(file for file in path.iterdir() if file.suffix in _SUFFIXES_IN_DIRECTORY)
    if len(candidates) == 1:
        return candidates[0]
    raise TokenizerError(
        "the directory holds no tokenizer" if not candidates else "the directory holds several",
        got=", ".join(file.name for file in candidates) or "none",
        expected=f"one of {', '.join(_NAMES_IN_DIRECTORY)}",
        fix="name the file itself" if candidates else None,
        where=path,
    )


def _format_of(head: bytes, file: Path) -> FileFormat | None:
    text = head.removeprefix(b"\xef\xbb\xbf").lstrip()
    if text.startswith(b"["):
        return "tiktoken-json"
    if text.startswith(b"{"):
        return _json_format(text, file)
    if _RANK_LINE.match(head):
        return "tiktoken-ranks"
    return "sentencepiece" if _is_sentencepiece(head) else None


def _json_format(head: bytes, file: Path) -> FileFormat | None:
    if _HUGGINGFACE_KEY.search(head):
        return "huggingface"
    if _TEKKEN_KEY.search(head):
        return "tekken"
    document = read_json(file)
    if isinstance(document, dict):
        if "model" in document:
            return "huggingface"
        if {"config", "vocab"} <= document.keys():
            return "tekken"
    return None


def _is_sentencepiece(head: bytes) -> bool:
    """Whether a ModelProto begins here, with its first piece: field 1, a length, field 1 inside."""
    return len(head) > 4 and head[0] == 0x0A and head[1] < 0x80 and head[2] == 0x0A
