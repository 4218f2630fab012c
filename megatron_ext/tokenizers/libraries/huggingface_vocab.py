"""Vocabulary files that predate ``tokenizer.json``: GPT-2's two files and BERT's one.

Each is checked row by row and converted into the equivalent ``tokenizer.json``.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_ext.errors import TokenizerError
from megatron_ext.tokenizers.libraries.huggingface_file import (
    HuggingFaceSource,
    name_of,
    with_special,
)
from megatron_ext.tokenizers.tokenizer_files import read_file, read_json


def read_vocab_json(file: Path) -> dict[str, int]:
    """Id of each piece of a ``vocab.json``.

    Raises:
        TokenizerError: It cannot be read, or is not an object of pieces and distinct ids.
    """
    document = read_json(file)
    if not isinstance(document, dict) or not document:
        raise TokenizerError(
            "this is not a vocabulary", expected="a JSON object of pieces and their ids", where=file
        )
    piece_of: dict[int, str] = {}
    for piece, token_id in document.items():
        if not isinstance(token_id, int) or isinstance(token_id, bool) or token_id < 0:
            raise TokenizerError(
                f"the piece {piece!r} has no id", got=repr(token_id), expected=">= 0", where=file
            )
        if token_id in piece_of:
            raise TokenizerError(
                f"two pieces have the id {token_id}",
                got=f"{piece_of[token_id]!r} and {piece!r}",
                where=file,
            )
        piece_of[token_id] = piece
    return document


def read_merges(file: Path, ids: Mapping[str, int]) -> list[list[str]]:
    """The pairs of a ``merges.txt``, in the order in which they merge.

    Raises:
        TokenizerError: It cannot be read, a line is not a pair, or the vocabulary lacks a piece.
    """
    merges: list[list[str]] = []
    for number, line in enumerate(_lines(file), start=1):
        if line.startswith("#version"):
            continue
        pair = line.split(" ")
        if len(pair) != 2 or not all(pair):
            raise TokenizerError(
                "the line is not a merge",
                got=repr(line[:60]),
                expected="two pieces with a space between",
                where=f"{file}:{number}",
            )
        for piece in (*pair, "".join(pair)):
            if piece not in ids:
                raise TokenizerError(
                    "the vocabulary lacks a piece of this merge",
                    got=repr(piece),
                    fix="check that the two files belong together",
                    where=f"{file}:{number}",
                )
        merges.append(pair)
    return merges


def read_vocab_txt(file: Path, needed: Sequence[str]) -> dict[str, int]:
    """Id of each piece of a ``vocab.txt``: the number of its line, from 0.

    Raises:
        TokenizerError: It cannot be read, a line is empty or repeats another, or one of the
            ``needed`` pieces is missing.
    """
    line_of: dict[str, int] = {}
    for number, piece in enumerate(_lines(file), start=1):
        if not piece or piece in line_of:
            raise TokenizerError(
                f"the piece is in line {line_of[piece]} already" if piece else "the line is empty",
                got=repr(piece) if piece else None,
                expected="one piece in each line",
                where=f"{file}:{number}",
            )
        line_of[piece] = number
    for piece in needed:
        if piece not in line_of:
            raise TokenizerError(
                f"the vocabulary has no {piece}",
                expected="a BERT vocabulary, with one piece in each line",
                where=file,
            )
    return {piece: number - 1 for piece, number in line_of.items()}


def _lines(file: Path) -> list[str]:
    """Lines without line ends, and without empty lines at the end of the file."""
    raw = read_file(file)
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise TokenizerError("the file is not UTF-8", where=f"{file}:{line}") from error
    # str.splitlines would also cut at characters that are pieces.
    lines = [line.removesuffix("\r") for line in text.split("\n")]
    while lines and not lines[-1]:
        lines.pop()
    return lines


# Missing names get their ids in this order.
_ROLES = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")


class Gpt2Files(HuggingFaceSource):
    """GPT-2's ``vocab.json`` and ``merges.txt``: byte-level BPE with GPT-2's pre-tokenizer.

    Args:
        vocab_file: The pieces and their ids.
        merges_file: The pairs of pieces that merge, the first one first.
        folder: As for ``HuggingFaceSource``.
    """

    def __init__(self, vocab_file: Path, merges_file: Path, folder: Path | None) -> None:
        super().__init__(vocab_file, folder)
        self._merges_file = merges_file

    def _vocabulary_files(self) -> dict[str, Path]:
        return {"vocab.json": self.file, "merges.txt": self._merges_file}

    def _read_config(self) -> dict[str, Any]:
        end = "<|endoftext|>"
        default = {"bos_token": end, "eos_token": end, "unk_token": end}
        given = super()._read_config() or {}
        _check_class(given, ("GPT2Tokenizer",), self.file)
        return {**default, **given}

    def _read(self) -> bytes:
        ids = read_vocab_json(self.file)
        config = self._read_config()
        byte_level = {
            "type": "ByteLevel",
            "add_prefix_space": bool(config.get("add_prefix_space")),
            "trim_offsets": False,
            "use_regex": True,
        }
        model = {
            "type": "BPE",
            "vocab": ids,
            "merges": read_merges(self._merges_file, ids),
            "continuing_subword_prefix": "",
            "end_of_word_suffix": "",
        }
        document = {
            "normalizer": None,
            "pre_tokenizer": byte_level,
            "decoder": byte_level,
            "added_tokens": with_special((), ids, _names(config)),
            "model": model,
        }
        return json.dumps(document).encode()


class WordPieceFile(HuggingFaceSource):
    """BERT's ``vocab.txt``, with one piece in each line.

    Args:
        vocab_file: The file.
        folder: As for ``HuggingFaceSource``.
        lowercase: Whether text becomes lower case; by default as in the configuration, and without
            one if the vocabulary has no capitals.
    """

    def __init__(self, vocab_file: Path, folder: Path | None, *, lowercase: bool | None) -> None:
        super().__init__(vocab_file, folder)
        self._lowercase = lowercase

    def _vocabulary_files(self) -> dict[str, Path]:
        return {"vocab.txt": self.file}

    def _read_config(self) -> dict[str, Any]:
        default = {f"{role}_token": f"[{role.upper()}]" for role in _ROLES[2:]}
        given = super()._read_config() or {}
        names = ("BertTokenizer", "DistilBertTokenizer", "ElectraTokenizer", "MobileBertTokenizer")
        _check_class(given, names, self.file)
        return {**default, **given}

    def _read(self) -> bytes:
        config = self._read_config()
        needed = [name_of(config[f"{role}_token"]) for role in ("unk", "cls", "sep")]
        ids = read_vocab_txt(self.file, needed)
        unk, cls, sep = needed
        lowercase = self._lowercase
        if lowercase is None:
            lowercase = config.get("do_lower_case")
        normalizer = {
            "type": "BertNormalizer",
            "clean_text": True,
            "handle_chinese_chars": config.get("tokenize_chinese_chars") is not False,
            "strip_accents": config.get("strip_accents"),
            "lowercase": _has_no_capitals(ids, config) if lowercase is None else bool(lowercase),
        }
        document = {
            "normalizer": normalizer,
            "pre_tokenizer": {"type": "BertPreTokenizer"},
            "post_processor": _around(cls, sep, ids),
            "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": True},
            "added_tokens": with_special((), ids, _names(config)),
            "model": {
                "type": "WordPiece",
                "unk_token": unk,
                "continuing_subword_prefix": "##",
                "max_input_chars_per_word": 100,
                "vocab": ids,
            },
        }
        return json.dumps(document).encode()


def _names(config: Mapping[str, Any]) -> list[str]:
    """Names of the special tokens of a configuration, in the order of ``_ROLES``."""
    names = (name_of(config.get(f"{role}_token")) for role in _ROLES)
    return [name for name in names if name]


def _around(cls: str, sep: str, ids: Mapping[str, int]) -> dict[str, Any]:
    """The post-processor that puts [CLS] before a text and [SEP] behind it."""

    def special(name: str) -> dict[str, Any]:
        return {"SpecialToken": {"id": name, "type_id": 0}}

    text = {"Sequence": {"id": "A", "type_id": 0}}
    second = {"Sequence": {"id": "B", "type_id": 1}}
    tokens = {name: {"id": name, "ids": [ids[name]], "tokens": [name]} for name in (cls, sep)}
    single = [special(cls), text, special(sep)]
    return {
        "type": "TemplateProcessing",
        "single": single,
        "pair": [*single, second, {"SpecialToken": {"id": sep, "type_id": 1}}],
        "special_tokens": tokens,
    }


def _has_no_capitals(ids: Mapping[str, int], config: Mapping[str, Any]) -> bool:
    special = set(_names(config))
    ordinary = (piece for piece in ids if piece not in special)
    return not any("A" <= letter <= "Z" for piece in ordinary for letter in piece)


def _check_class(config: Mapping[str, Any], supported: Sequence[str], file: Path) -> None:
    """Refuse the vocabulary of a tokenizer class with another pre-tokenizer."""
    name = config.get("tokenizer_class")
    if isinstance(name, str) and name.removesuffix("Fast") not in supported:
        raise TokenizerError(
            "the vocabulary files do not define this tokenizer completely",
            got=f"tokenizer_class {name}",
            expected=f"one of {', '.join(supported)}",
            fix="use its tokenizer.json",
            where=file,
        )


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
        path: The tokenizer whose configuration applies; None for none.
        lowercase: As for ``WordPieceFile``.

    Raises:
        TokenizerError: A file is missing or of another format, or ``path`` holds another
            vocabulary.
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
    """The vocabulary files in a directory or at a path; None for other files.

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
    """Refuse two folders with a vocabulary each, because the choice is ambiguous."""
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
