"""Saving a tokenizer to a folder: its files under fixed names, and the metadata to rebuild it.

``tokenizer_metadata.json`` is what Megatron reads beside a tokenizer, with one key more. Under
``assets`` stand the options that the tokenizer was built with, its special tokens, the fingerprint
of its vocabulary, and size and hash of each file. No path is stored, so that a folder can be moved.
It is written whole or not at all.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from megatron_ext.errors import TokenizerError, refused_by_system
from megatron_ext.files import flush, new_folder
from megatron_ext.tokenizers.metadata import (
    METADATA_FILE,
    class_entry,
    importable_name,
    metadata_text,
    read_metadata,
)
from megatron_ext.tokenizers.tokenizer_files import FileFormat, file_kind

if TYPE_CHECKING:
    from megatron_ext.tokenizers.text_tokenizer import MegatronTokenizerText


def write_folder(
    folder: str | os.PathLike[str],
    contents: Mapping[str, bytes],
    *,
    check: Callable[[Path], object],
    replaceable: Callable[[Path], bool],
) -> None:
    """Write a folder of files in one step; an existing empty folder is replaced.

    It is written under a hidden name beside its own, flushed, checked, and then renamed: a reader
    sees all of it or nothing, whenever the writer dies. While a folder is replaced, a reader may
    find its files gone, but never files half written. Where the folder holds the same files already
    nothing is done, so that several ranks may write it.

    Args:
        folder: Path of the folder; its parents are made.
        contents: Bytes of each file by its name.
        check: Called with the written folder before the rename; its exceptions are raised.
        replaceable: Whether an existing folder that is not empty may be replaced.

    Raises:
        TokenizerError: Something exists that may not be replaced, or writing fails.
    """
    final = Path(os.path.realpath(folder))
    if _holds(final, contents):
        return
    _refuse_to_replace(final, replaceable)
    with (
        refused_by_system("cannot write the folder", where=final, kind=TokenizerError),
        new_folder(final) as hidden,
    ):
        for name, content in contents.items():
            (hidden / name).parent.mkdir(exist_ok=True)
            (hidden / name).write_bytes(content)
        flush(*hidden.rglob("*"), hidden)
        check(hidden)
        _publish(hidden, final, contents, replaceable)
        flush(final.parent)


def _refuse_to_replace(final: Path, replaceable: Callable[[Path], bool]) -> None:
    if not final.exists():
        return
    if not final.is_dir():
        raise TokenizerError(
            "a file is in the place of the folder", fix="name another folder", where=final
        )
    if any(final.iterdir()) and not replaceable(final):
        raise TokenizerError(
            "the folder exists already and is not empty",
            fix="name another folder, or pass overwrite=True",
            where=final,
        )


def _holds(folder: Path, contents: Mapping[str, bytes]) -> bool:
    """Whether a folder holds exactly these files."""
    try:
        return _names(folder) == sorted(contents) and all(
            (folder / name).read_bytes() == content for name, content in contents.items()
        )
    except OSError:
        return False


def _names(folder: Path) -> list[str]:
    """Relative path of each file in a folder, sorted; an empty folder in it counts as a file."""
    inside = [
        path
        for path in folder.rglob("*")
        if path.is_symlink() or not path.is_dir() or not any(path.iterdir())
    ]
    return sorted(path.relative_to(folder).as_posix() for path in inside)


def _publish(
    hidden: Path,
    final: Path,
    contents: Mapping[str, bytes],
    replaceable: Callable[[Path], bool],
) -> None:
    try:
        # Replaces an empty folder, and fails on any other.
        hidden.rename(final)
    except OSError:
        if _holds(final, contents):
            return
        if not final.is_dir():
            raise
        _refuse_to_replace(final, replaceable)
        old = final.with_name(f"{hidden.name}.old")
        final.rename(old)
        try:
            hidden.rename(final)
        except OSError:
            old.rename(final)
            raise
        shutil.rmtree(old)


ASSETS_KEY: Final = "assets"
"""Key that only the metadata of a saved tokenizer have."""
ASSETS_VERSION: Final = 1
"""Version of the record under that key."""
PROMPT_FILE: Final = "prompt_format.jinja"
"""Name of the file with the template of a prompt format that was read from a file."""

_FILE_PREFIX = "file:"
_NAMES: Mapping[FileFormat, str] = {
    "sentencepiece": "tokenizer.model",
    "tekken": "tekken.json",
    "tiktoken-json": "tokenizer.json",
    "tiktoken-ranks": "tokenizer.tiktoken",
}
"""Name of a folder's one file by format, for libraries that read any name."""


def save_assets(
    tokenizer: MegatronTokenizerText,
    folder: str | os.PathLike[str],
    *,
    check: Callable[[Path], object],
    overwrite: bool,
) -> None:
    """Write everything that rebuilds ``tokenizer`` to ``folder``, in one step.

    Args:
        folder: A folder that is empty or does not exist.
        check: Loads the written folder before it is renamed, and raises where it does not give
            ``tokenizer``: an existing folder can be loaded.
        overwrite: Whether an existing saved tokenizer may be replaced.

    Raises:
        TokenizerError: The folder holds something else, an option cannot be saved, a file of the
            tokenizer changed since it was read, or writing fails.
    """
    names = file_names(tokenizer)
    contents = {names[file]: _read(file) for file in names}
    template = _template_of_file(tokenizer)
    if template is not None:
        contents[PROMPT_FILE] = template.encode()
    metadata = _metadata(tokenizer, names, contents)
    write_folder(
        folder,
        {**contents, METADATA_FILE: metadata_text(metadata).encode()},
        check=check,
        replaceable=_is_saved_tokenizer if overwrite else lambda _: False,
    )


def file_names(tokenizer: MegatronTokenizerText) -> dict[Path, str]:
    """The tokenizer's files and the names that they have in a folder of assets."""
    files = tokenizer.files()
    if tokenizer.library in ("sentencepiece", "tiktoken"):
        return {file: _NAMES[file_kind(file).format] for file in files.values()}
    return {file: name for name, file in files.items()}


def _template_of_file(tokenizer: MegatronTokenizerText) -> str | None:
    """The template of a prompt format that was read from a file."""
    name, config = tokenizer.prompt_format, tokenizer.prompt_config
    if name is None or config is None or not name.startswith(_FILE_PREFIX):
        return None
    return config.custom_chat_template


def digest(content: bytes) -> dict[str, Any]:
    """Size and hash of a file, which tell a truncated one from an altered one."""
    return {"sha256": hashlib.sha256(content).hexdigest(), "bytes": len(content)}


def _metadata(
    tokenizer: MegatronTokenizerText, names: Mapping[Path, str], contents: Mapping[str, bytes]
) -> dict[str, Any]:
    """The metadata of the folder, in an order that depends on nothing but the tokenizer."""
    has_own_templates = tokenizer.chat_templates == tokenizer.own_chat_templates
    prompt_format = tokenizer.prompt_format
    named_keys = {
        "library": tokenizer.library,
        "mode": tokenizer.mode,
        **_class_keys(tokenizer),
        "chat_template": None if has_own_templates else tokenizer.chat_template,
        "prompt_format": _FILE_PREFIX + PROMPT_FILE if PROMPT_FILE in contents else prompt_format,
    }
    options, option_files = _split_options(tokenizer.constructor_options(), names)
    named = option_files and tokenizer.path is not None and not os.path.exists(tokenizer.path)
    assets = {
        "version": ASSETS_VERSION,
        "name": tokenizer.path if named else None,
        "options": options,
        "option_files": option_files,
        "special_tokens": tokenizer.special_token_names,
        "fingerprint": tokenizer.fingerprint(),
        "files": {name: digest(contents[name]) for name in sorted(contents)},
    }
    rest = tokenizer.config.keys() - named_keys.keys() - {ASSETS_KEY}
    others = {key: tokenizer.config[key] for key in sorted(rest)}
    return {
        key: _portable(value, key)
        for key, value in {**named_keys, **others, ASSETS_KEY: assets}.items()
    }


def _class_keys(tokenizer: MegatronTokenizerText) -> dict[str, str]:
    kind = type(tokenizer)
    if kind.__module__.startswith("megatron_ext."):
        return class_entry(tokenizer.mode)
    return importable_name(kind)


def _split_options(
    options: Mapping[str, Any], names: Mapping[Path, str]
) -> tuple[dict[str, Any], dict[str, str]]:
    """Options as they are, and those that name one of the tokenizer's files."""
    name_of = {os.path.realpath(file): name for file, name in names.items()}
    plain: dict[str, Any] = {}
    in_folder: dict[str, str] = {}
    for option in sorted(options):
        value = options[option]
        path = os.path.realpath(value) if isinstance(value, str | os.PathLike) else None
        if path in name_of:
            in_folder[option] = name_of[path]
        else:
            plain[option] = value
    return plain, in_folder


def _portable(value: Any, where: str) -> Any:
    """A copy that survives a round trip through JSON.

    Raises:
        TokenizerError: ``value`` has no such copy.
    """
    if value is None or isinstance(value, str | bool | int | float):
        return value
    if isinstance(value, Mapping):
        return {str(key): _portable(item, f"{where}: {key}") for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, bytes):
        return [_portable(item, where) for item in value]
    raise TokenizerError(
        "the value cannot be saved with the tokenizer",
        got=f"{type(value).__name__}, {value!r}",
        expected="text, a number, a list or a mapping of these",
        where=where,
    )


def _read(file: Path) -> bytes:
    with refused_by_system("cannot read a file of the tokenizer", where=file, kind=TokenizerError):
        return file.read_bytes()


def _is_saved_tokenizer(folder: Path) -> bool:
    """Whether a folder holds a saved tokenizer and nothing else."""
    try:
        assets = read_metadata(folder / METADATA_FILE).get(ASSETS_KEY)
    except (TokenizerError, KeyError):
        return False
    files = assets.get("files") if isinstance(assets, Mapping) else None
    return isinstance(files, Mapping) and {*_names(folder)} <= {*files, METADATA_FILE}
