"""Which files hold a vocabulary that is not a ``tokenizer.json``."""

from __future__ import annotations

import os
from pathlib import Path

from megatron_ext.errors import TokenizerError
from megatron_ext.tokenizers.libraries.huggingface.source import HuggingFaceSource
from megatron_ext.tokenizers.libraries.huggingface.vocab_files import Gpt2Files, WordPieceFile

PathLike = str | os.PathLike[str]


def named_vocab_files(
    vocab_file: PathLike | None,
    merges_file: PathLike | None,
    path: PathLike | None,
    *,
    lowercase: bool | None = None,
) -> HuggingFaceSource | None:
    """The vocabulary in these files; None when none is named.

    Args:
        vocab_file: GPT-2's ``vocab.json`` or BERT's ``vocab.txt``, whatever their names.
        merges_file: GPT-2's ``merges.txt``.
        path: The tokenizer that they are named for: its configuration counts; None for none.
        lowercase: As for ``WordPieceFile``.

    Raises:
        TokenizerError: One is missing or is not what it must be, or ``path`` holds a tokenizer of
            its own.
    """
    if vocab_file is None:
        if merges_file is None:
            return None
        raise TokenizerError(
            "a merges file needs its vocabulary", fix="set vocab_file too", where=merges_file
        )
    file = _existing(vocab_file)
    folder = None if path is None else Path(path)
    _refuse_a_second_vocabulary(file, folder)
    if merges_file is not None:
        return Gpt2Files(file, _existing(merges_file), folder)
    if _begins_with(file, b"{"):
        raise TokenizerError(
            "a BPE vocabulary needs its merges", fix="set merges_file (--merge-file)", where=file
        )
    return WordPieceFile(file, folder, lowercase=lowercase)


def vocab_files_at(path: PathLike) -> HuggingFaceSource | None:
    """The vocabulary files in a directory, or the one that ``path`` is; None when it is another.

    Megatron's JSON rank lists, which tiktoken reads, may be called ``vocab.json`` too.

    Raises:
        TokenizerError: There is a ``vocab.json`` without the merges beside it.
    """
    place = Path(path)
    if place.is_dir():
        if any((place / name).is_file() for name in ("tokenizer.json", "tokenizer.model")):
            return None
        names = (place / "vocab.json", place / "vocab.txt")
        place = next((file for file in names if file.is_file()), place)
    if place.is_file() and place.name.endswith("vocab.json") and not _begins_with(place, b"["):
        merges = place.with_name(f"{place.name.removesuffix('vocab.json')}merges.txt")
        return named_vocab_files(place, merges if merges.is_file() else None, place.parent)
    if place.is_file() and place.name.endswith("vocab.txt"):
        return named_vocab_files(place, None, place.parent)
    return None


def _refuse_a_second_vocabulary(vocab_file: Path, path: Path | None) -> None:
    """Two folders with a vocabulary each: which one is meant cannot be told."""
    if path is None:
        return
    other = path if path.is_file() else path / "tokenizer.json"
    if other.is_file() and other.parent.resolve() != vocab_file.parent.resolve():
        raise TokenizerError(
            "two vocabularies are named",
            got=f"{other} and {vocab_file}",
            fix="leave vocab_file (--vocab-file) out, or name its folder",
        )


def _begins_with(file: Path, mark: bytes) -> bool:
    """Whether ``file`` begins with ``mark``, white space aside."""
    with file.open("rb") as stream:
        return stream.read(64).lstrip().startswith(mark)


def _existing(path: PathLike) -> Path:
    file = Path(path)
    if not file.is_file():
        raise TokenizerError("the file does not exist", where=file)
    return file
