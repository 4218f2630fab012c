"""The rows of ``vocab.json``, ``merges.txt`` and ``vocab.txt``, checked one by one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from megatron_ext.errors import TokenizerError
from megatron_ext.tokenizers.file_kind import read_json


def read_vocab_json(file: Path) -> dict[str, int]:
    """Id of each piece of a ``vocab.json``.

    Raises:
        TokenizerError: It cannot be read, or is no object of pieces and ids that differ.
    """
    document = read_json(file)
    if not isinstance(document, dict) or not document:
        raise TokenizerError(
            "this is no vocabulary", expected="a JSON object of pieces and their ids", where=file
        )
    owner: dict[int, str] = {}
    for piece, token_id in document.items():
        if not isinstance(token_id, int) or isinstance(token_id, bool) or token_id < 0:
            raise TokenizerError(
                f"the piece {piece!r} has no id", got=repr(token_id), expected=">= 0", where=file
            )
        if token_id in owner:
            raise TokenizerError(
                f"two pieces have the id {token_id}",
                got=f"{owner[token_id]!r} and {piece!r}",
                where=file,
            )
        owner[token_id] = piece
    return document


def read_merges(file: Path, ids: Mapping[str, int]) -> list[list[str]]:
    """The pairs of a ``merges.txt``, the first to merge first.

    Raises:
        TokenizerError: It cannot be read, a line is no pair, or the vocabulary lacks a piece.
    """
    merges: list[list[str]] = []
    for number, line in enumerate(_lines(file), start=1):
        if line.startswith("#version"):
            continue
        pair = line.split(" ")
        if len(pair) != 2 or not all(pair):
            raise TokenizerError(
                "the line is no merge",
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
    """Lines without their ends, and without empty ones at the end of the file."""
    try:
        raw = file.read_bytes()
        text = raw.decode("utf-8")
    except OSError as error:
        raise TokenizerError("cannot read the file", got=error.strerror, where=file) from error
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise TokenizerError("the file is not UTF-8", where=f"{file}:{line}") from error
    # str.splitlines would cut at characters that are pieces of their own.
    lines = [line.removesuffix("\r") for line in text.split("\n")]
    while lines and not lines[-1]:
        lines.pop()
    return lines
