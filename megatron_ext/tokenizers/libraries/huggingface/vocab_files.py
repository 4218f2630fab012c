"""Vocabularies from before ``tokenizer.json``: GPT-2's two files and BERT's one.

Each is read into the ``tokenizer.json`` that means the same.
"""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_ext.errors import TokenizerError
from megatron_ext.tokenizers.libraries.huggingface.file import name_of
from megatron_ext.tokenizers.libraries.huggingface.source import HuggingFaceSource
from megatron_ext.tokenizers.libraries.huggingface.vocab_lines import (
    read_merges,
    read_vocab_json,
    read_vocab_txt,
)

# Names that are missing get their ids in this order.
_ROLES = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")


class VocabFiles(HuggingFaceSource):
    """Files that are read into a document of ours."""

    def _read(self) -> bytes:
        return json.dumps(self._document()).encode()

    @abstractmethod
    def _document(self) -> dict[str, Any]:
        """The ``tokenizer.json`` that means the same."""


class Gpt2Files(VocabFiles):
    """``vocab.json`` and ``merges.txt``: byte-level BPE that cuts text as GPT-2 does.

    Args:
        vocab_file: The pieces and their ids.
        merges_file: The pairs of pieces that merge, the first one first.
        folder: As for ``HuggingFaceSource``.
    """

    def __init__(self, vocab_file: Path, merges_file: Path, folder: Path | None) -> None:
        super().__init__(vocab_file, folder)
        self._merges_file = merges_file

    def _own_files(self) -> dict[str, Path]:
        return {"vocab.json": self.file, "merges.txt": self._merges_file}

    def _read_config(self) -> dict[str, Any]:
        end = "<|endoftext|>"
        default = {"bos_token": end, "eos_token": end, "unk_token": end}
        given = super()._read_config() or {}
        _check_class(given, ("GPT2Tokenizer",), self.file)
        return {**default, **given}

    def _document(self) -> dict[str, Any]:
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
        parts = {"pre_tokenizer": byte_level, "decoder": byte_level, "model": model}
        return {**parts, "normalizer": None, "added_tokens": _special_tokens(config, ids)}


class WordPieceFile(VocabFiles):
    """``vocab.txt``: BERT's pieces, one in each line.

    Args:
        vocab_file: The file.
        folder: As for ``HuggingFaceSource``.
        lowercase: Whether text becomes lower case; by default as the configuration says, and
            without one unless the vocabulary has capitals.
    """

    def __init__(self, vocab_file: Path, folder: Path | None, *, lowercase: bool | None) -> None:
        super().__init__(vocab_file, folder)
        self._lowercase = lowercase

    def _own_files(self) -> dict[str, Path]:
        return {"vocab.txt": self.file}

    def _read_config(self) -> dict[str, Any]:
        default = {f"{role}_token": f"[{role.upper()}]" for role in _ROLES[2:]}
        given = super()._read_config() or {}
        names = ("BertTokenizer", "DistilBertTokenizer", "ElectraTokenizer", "MobileBertTokenizer")
        _check_class(given, names, self.file)
        return {**default, **given}

    def _document(self) -> dict[str, Any]:
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
        return {
            "normalizer": normalizer,
            "pre_tokenizer": {"type": "BertPreTokenizer"},
            "post_processor": _around(cls, sep, ids),
            "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": True},
            "added_tokens": _special_tokens(config, ids),
            "model": {
                "type": "WordPiece",
                "unk_token": unk,
                "continuing_subword_prefix": "##",
                "max_input_chars_per_word": 100,
                "vocab": ids,
            },
        }


def _special_tokens(config: Mapping[str, Any], ids: Mapping[str, int]) -> list[dict[str, Any]]:
    """Rows of ``added_tokens``; a name that the vocabulary lacks gets the next id."""
    rows: dict[str, dict[str, Any]] = {}
    following = max(ids.values(), default=-1) + 1
    for role in _ROLES:
        name = name_of(config.get(f"{role}_token"))
        if not name or name in rows:
            continue
        token_id = ids.get(name, following)
        following += token_id == following
        rows[name] = {
            **{"id": token_id, "content": name, "special": True, "normalized": False},
            **{"single_word": False, "lstrip": False, "rstrip": False},
        }
    return list(rows.values())


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
    special = {name_of(config.get(f"{role}_token")) for role in _ROLES}
    ordinary = (piece for piece in ids if piece not in special)
    return not any("A" <= letter <= "Z" for piece in ordinary for letter in piece)


def _check_class(config: Mapping[str, Any], known: Sequence[str], file: Path) -> None:
    """Refuse the vocabulary of a tokenizer that cuts text in another way."""
    name = config.get("tokenizer_class")
    if isinstance(name, str) and name.removesuffix("Fast") not in known:
        raise TokenizerError(
            "the vocabulary files of this tokenizer do not say all about it",
            got=f"tokenizer_class {name}",
            expected=f"one of {', '.join(known)}",
            fix="use its tokenizer.json",
            where=file,
        )
