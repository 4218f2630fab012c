"""Tokens that a tokenizer gains, as files: ``tokenizer.json`` of a BPE.

An added token is found in a text before anything else, the longest first. It is ordinary text with
bytes of its own, not a control token. It is in the model's vocabulary, too: an added token that is
not is read only where control tokens are.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from megatron_ext.errors import DataError, TokenizerError
from megatron_ext.files import copy_files, write_text
from megatron_ext.huggingface.checkpoint_files import read_json, tokenizer_files
from megatron_ext.registry import with_near_path
from megatron_ext.tokenizers import TokenizerConfig, build_tokenizer
from megatron_ext.tokenizers.libraries.huggingface_file import PINNED_KEY
from megatron_ext.tokenizers.token_bytes import TokenBytes

TOKENIZER_FILE: Final = "tokenizer.json"
CONFIG_FILE: Final = "tokenizer_config.json"
_SHOWN: Final = 5


def read_tokens(file: Path) -> list[str]:
    """The tokens of a file, one a line, or one JSON string a line where it ends in ``.jsonl``.

    Spaces at the ends of a line belong to its token.

    Raises:
        DataError: The file cannot be read, a line is not a token, or one is there twice.
    """
    try:
        # Not splitlines, which cuts at characters of a text too.
        lines = file.read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(
            "the tokens cannot be read",
            where=file,
            got=getattr(error, "strerror", None) or error,
            expected="a file with one token a line, in UTF-8",
            fix=with_near_path("check --tokens", file),
        ) from error
    tokens: dict[str, int] = {}
    if not lines[-1]:
        lines.pop()
    for number, line in enumerate(lines, 1):
        token: Any = line
        if file.suffix == ".jsonl":
            try:
                token = json.loads(line)
            except ValueError:
                token = None
        where = f"{file}:{number}"
        if not isinstance(token, str) or not token:
            raise DataError("a line is not a token", where=where, got=line, expected="some text")
        if token in tokens:
            raise DataError("a token is there twice", where=where, got=repr(token))
        tokens[token] = number
    if not tokens:
        raise DataError("there are no tokens", where=file)
    return list(tokens)


def extend_tokenizer(folder: Path, target: Path, tokens: Sequence[str]) -> list[str]:
    """Write a tokenizer with more tokens to an existing folder.

    Args:
        folder: Folder of the tokenizer.
        target: Existing folder for its files.
        tokens: Texts that become tokens, with the next ids in this order.

    Returns:
        Tokens that have new ids; the others are tokens already, which stay as they are.

    Raises:
        TokenizerError: There is no ``tokenizer.json`` of a BPE, or a text is a control token of it,
            or spelled as the file writes another token.
    """
    values = bpe_file(folder)
    special = {entry["content"] for entry in values["added_tokens"] if entry["special"]}
    taken = [token for token in tokens if token in special]
    if taken:
        raise TokenizerError(
            "a text is a control token of the tokenizer",
            where=folder / TOKENIZER_FILE,
            got=", ".join(taken[:_SHOWN]),
            fix="leave it out: text never becomes a control token",
        )
    # By bytes: `` the`` is ``Ġthe`` in the file, and another would end the use of its row.
    tokenizer = build_tokenizer(TokenizerConfig(model=str(folder)))
    known = set(TokenBytes.of(tokenizer).tokens())
    new = [token for token in tokens if token.encode() not in known]
    other = [token for token in new if token in values["model"]["vocab"]]
    if other:
        raise TokenizerError(
            "a text is the spelling of another token in the file",
            where=folder / TOKENIZER_FILE,
            got=", ".join(other[:_SHOWN]),
            fix="write tokens as the text that they stand for, with a space for Ġ or ▁",
        )
    add_to_bpe(values, new)
    copy_tokenizer(folder, target, values)
    return new


def bpe_file(folder: Path) -> dict[str, Any]:
    """The contents of a folder's ``tokenizer.json``.

    Raises:
        TokenizerError: There is none, or its model is no BPE.
    """
    file = folder / TOKENIZER_FILE
    values = read_json(file) if file.is_file() else {}
    if values.get("model", {}).get("type") != "BPE":
        raise TokenizerError(
            "tokens are added to a BPE's tokenizer.json alone",
            where=folder,
            got=values["model"].get("type") if "model" in values else f"no {TOKENIZER_FILE}",
            fix="convert the tokenizer with transformers and save it",
        )
    values.setdefault("added_tokens", [])
    return values


def add_to_bpe(values: dict[str, Any], tokens: Sequence[str]) -> None:
    """Have tokens read first by a ``tokenizer.json``, with the next ids where it lacks them."""
    vocabulary, added = values["model"]["vocab"], values["added_tokens"]
    following = next_id(values)
    known = {entry["content"] for entry in added}
    plain = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)
    for token in tokens:
        if token in known:
            continue
        if token not in vocabulary:
            vocabulary[token] = following
            following += 1
        added.append({"id": vocabulary[token], "content": token, **plain})


def next_id(values: dict[str, Any]) -> int:
    """The id behind all of a ``tokenizer.json``, whose added tokens keep theirs from here on."""
    vocabulary = values["model"]["vocab"]
    for entry in values["added_tokens"]:
        # The library tokenizers numbers those anew that a grown vocabulary lacks.
        vocabulary.setdefault(entry["content"], entry["id"])
    return max(vocabulary.values(), default=-1) + 1


def copy_tokenizer(folder: Path, target: Path, values: dict[str, Any]) -> None:
    """Copy a tokenizer's files, with other contents of ``tokenizer.json``.

    Added tokens that text did not spell do not become text by being in the vocabulary now.
    """
    copy_files(tokenizer_files(folder), target)
    config = folder / CONFIG_FILE
    given = read_json(config) if config.is_file() else {}
    changed = _config_of(given, bpe_file(folder), values)
    if changed != given:
        write_text(target / CONFIG_FILE, json.dumps(changed, indent=2, ensure_ascii=False) + "\n")
    write_text(target / TOKENIZER_FILE, json.dumps(values, ensure_ascii=False))


def _config_of(
    given: dict[str, Any], before: dict[str, Any], values: dict[str, Any]
) -> dict[str, Any]:
    """The ``tokenizer_config.json`` of a grown ``tokenizer.json``.

    transformers takes added tokens from there where they are listed.
    """
    known = {entry["content"] for entry in before["added_tokens"]}
    pinned = {
        entry["content"]
        for entry in before["added_tokens"]
        if not entry["special"] and entry["content"] not in before["model"]["vocab"]
    }
    pinned = {*pinned, *given.get(PINNED_KEY, ())} & values["model"]["vocab"].keys()
    changed = {**given, PINNED_KEY: sorted(pinned)} if pinned else dict(given)
    if "added_tokens_decoder" in given:
        new = {
            str(entry["id"]): {key: value for key, value in entry.items() if key != "id"}
            for entry in values["added_tokens"]
            if entry["content"] not in known
        }
        changed["added_tokens_decoder"] = {**given["added_tokens_decoder"], **new}
    return changed
