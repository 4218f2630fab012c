"""Contents of a HuggingFace ``tokenizer.json`` and the files beside it."""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Final
from uuid import uuid4

from megatron_ext.conversation.message import DEFAULT_TEMPLATE
from megatron_ext.errors import TokenizerError
from megatron_ext.tokenizers.special_tokens import (
    CONVENTIONAL_NAMES,
    ControlToken,
    SpecialRole,
    conventional_ids,
    names_to_add,
)
from megatron_ext.tokenizers.token_bytes import DummyPrefix, byte_of_character
from megatron_ext.tokenizers.tokenizer_files import (
    TEMPLATE_FILE,
    TEMPLATE_FOLDER,
    TEMPLATE_NAME,
    names_template,
    parse_json,
    path_inside,
    read_file,
    read_json,
    read_template,
    template_files,
)

_METASPACE = "▁"
_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_HIDDEN = f" {uuid4().hex} "
"""Random prefix of pieces that no text may spell: no text can contain it but by a guess."""


MOST_IDS: Final = 1 << 24
"""Ids that a vocabulary may have, holes among them: there are tables of all of them."""

PINNED_KEY: Final = "megatron_ext_pinned_tokens"
"""Key of ``tokenizer_config.json``: added tokens that are in the model's vocabulary to keep their
ids alone. The library tokenizers numbers added tokens anew where a vocabulary has grown."""


class HuggingFaceFile:
    """The contents of a ``tokenizer.json`` and of the configuration beside it.

    Args:
        document: The ``tokenizer.json``.
        config: The ``tokenizer_config.json``; None where there is none.
        file: Where the document was read, for messages.
        special_tokens: Names that become special tokens; new ones get the next ids, in the order of
            ``names_to_add``.
        roles: Name of the special token of a role, instead of the configured one.

    Raises:
        TokenizerError: The document is incomplete.
    """

    def __init__(
        self,
        document: object,
        config: Mapping[str, Any] | None,
        file: Path,
        *,
        special_tokens: Sequence[str] = (),
        roles: Mapping[SpecialRole, str] | None = None,
    ) -> None:
        try:
            if not isinstance(document, dict):
                raise TypeError(f"{type(document).__name__} instead of an object")
            # A text has the same ids each time, and those of its byte ends.
            self._model: dict[str, Any] = {**document["model"], "dropout": None}
            self._pinned = set((config or {}).get(PINNED_KEY) or ())
            self._ids: dict[str, int] = {
                name: i for name, i in _model_ids(self._model).items() if name not in self._pinned
            }
            added = [
                row for row in document.get("added_tokens") or [] if not self._falls_back_on(row)
            ]
            self._has_special_tokens = any(row["special"] for row in added)
            self._added = with_special(added, self._ids, names_to_add(roles or {}, special_tokens))
            self._document: dict[str, Any] = {
                **document,
                "added_tokens": self._added,
                "model": self._model,
            }
            self.special_names = {row["content"] for row in self._added if row["special"]}
            self._added_ids: dict[str, int] = {row["content"]: row["id"] for row in self._added}
        except (KeyError, TypeError, ValueError) as error:
            raise TokenizerError(
                "the tokenizer.json is incomplete",
                got=repr(error),
                expected="a model with a vocabulary, and added_tokens",
                where=file,
            ) from error
        _check_ids(self._ids | self._added_ids, file)
        self._config = config
        self._roles = dict(roles or {})
        self._given = [name for name in special_tokens if name not in self._roles.values()]

    def pieces(self) -> list[str]:
        """Display string of each id [V]; the empty string where the file has a hole."""
        ids = self._ids | self._added_ids
        pieces = [""] * (max(ids.values(), default=-1) + 1)
        for piece, token_id in ids.items():
            pieces[token_id] = piece
        return pieces

    def token_bytes(self) -> list[bytes | None]:
        """Bytes of each id [V]; None for a special token, the unknown token and a hole.

        An added token that is not flagged special stands for its own text.
        """
        rows: list[bytes | None] = [None] * len(self.pieces())
        to_bytes = self._byte_level if self._has("ByteLevel") else self._displayed
        for piece, token_id in self._ids.items():
            rows[token_id] = to_bytes(piece)
        for name, token_id in self._added_ids.items():
            if name not in self._ids:
                rows[token_id] = name.encode()
        without_bytes = {*self.special_names, self._unknown()}
        ids = self._added_ids | self._ids
        for name in without_bytes & ids.keys():
            rows[ids[name]] = None
        return rows

    def dummy_prefix(self) -> DummyPrefix:
        """Segments of text that start with a space that the tokenizer adds."""
        if self._model.get("type") == "WordPiece":
            return "each"
        for part in self._parts():
            kind = part.get("type")
            if kind == "Metaspace":
                return _metaspace_prefix(part)
            if kind == "Prepend" and part.get("prepend") == _METASPACE:
                return "each"
            if kind == "ByteLevel" and part.get("add_prefix_space"):
                return "each"
        return "none"

    def special_ids(self) -> dict[SpecialRole, int | None]:
        """Id of each role: named by the configuration, or conventional without one.

        A configuration may leave BERT's [MASK], [CLS] and [SEP] to the tokenizer's class. BOS and
        [CLS] replace each other where one is missing, and so do EOS and [SEP].
        """
        find = {**self._ids, **self._added_ids}.get
        # A piece of a BPE that is called </s> is text, where the file has special tokens.
        ids = conventional_ids(self._added_ids.get if self._has_special_tokens else find)
        if self._config is not None:
            for role in CONVENTIONAL_NAMES:
                if role in ("bos", "eos", "pad", "unk") or f"{role}_token" in self._config:
                    ids[role] = find(name_of(self._config.get(f"{role}_token")))
        ids |= {role: find(name) for role, name in self._roles.items()}
        pairs: tuple[tuple[SpecialRole, SpecialRole], ...] = (("bos", "cls"), ("eos", "sep"))
        for one, other in pairs:
            if ids[one] is None:
                ids[one] = ids[other]
            elif ids[other] is None:
                ids[other] = ids[one]
        return ids

    def control_tokens(self) -> list[ControlToken]:
        """Tokens that text cannot spell in ``text_only``."""
        return [
            ControlToken(
                row["content"],
                row["id"],
                lstrip=bool(row.get("lstrip")),
                rstrip=bool(row.get("rstrip")),
                single_word=bool(row.get("single_word")),
            )
            for row in self._added
            if row["special"] or row["content"] not in self._ids
        ]

    def user_defined_tokens(self) -> list[ControlToken]:
        """Added tokens that ``text_only`` spells: ordinary vocabulary, read before the model."""
        return [ControlToken(row["content"], row["id"]) for row in self._ordinary_added()]

    def additional_special_tokens(self) -> list[str] | None:
        """Special tokens that a caller named or that the configuration lists; None without any."""
        ids = {**self._ids, **self._added_ids}
        names = dict.fromkeys([*self._listed(), *self._given])
        return [name for name in names if name in ids] or None

    def _listed(self) -> list[str]:
        """Names of the special tokens of no role that the configuration lists."""
        config = self._config or {}
        listed = config.get("additional_special_tokens") or config.get("extra_special_tokens")
        return [name_of(token) for token in listed] if isinstance(listed, list) else []

    def names_without_id(self) -> list[str]:
        """Names of special and of added tokens in the configuration that the document lacks."""
        config = self._config or {}
        decoder = config.get("added_tokens_decoder")
        roles = CONVENTIONAL_NAMES.keys() - self._roles.keys()
        listed = [config.get(f"{role}_token") for role in sorted(roles)] + self._listed()
        listed += decoder.values() if isinstance(decoder, dict) else ()
        names = dict.fromkeys(map(name_of, listed))
        return [n for n in names if n and n not in self._ids and n not in self._added_ids]

    def ids_of_the_library(self) -> range | None:
        """Ids that the library gives the added tokens; None where they are those of the file."""
        parts = self._ids, self._pinned
        own = [i for name, i in self._added_ids.items() if not any(name in part for part in parts)]
        count = sum(map(len, parts))
        theirs = range(count, count + len(own))
        return None if own == [*theirs] else theirs

    def whole(self) -> dict[str, Any]:
        """The document without dropout, truncation, padding and trimmed offsets.

        Its vocabulary has the added tokens where the library would give them other ids.
        """
        model = self._model
        if self.ids_of_the_library() is not None:
            vocab = model["vocab"]
            if isinstance(vocab, dict):
                vocab = {**self._added_ids, **vocab}
            else:
                vocab = [*vocab, *([piece, 0.0] for piece in self.pieces()[len(vocab) :])]
            model = {**model, "vocab": vocab}
        return {
            **self._document,
            "model": model,
            "truncation": None,
            "padding": None,
            "post_processor": _untrimmed(self._document.get("post_processor")),
        }

    def text_only(self, *, continued: bool = False) -> dict[str, Any]:
        """``whole``, changed so that text spells neither special nor newly added tokens.

        A ``continued`` one encodes text after a control token: without the space that a Metaspace
        adds to the first segment only.

        Added tokens that the model's own vocabulary holds and that are not special (white space,
        HTML tags in Gemma) are ordinary vocabulary and stay.
        """
        hidden = (self.special_names & self._ids.keys()) | self._pinned
        document = _without_first_prefix(self.whole()) if continued else self.whole()
        return {
            **document,
            "added_tokens": self._ordinary_added(),
            "model": _without_names(self._model, hidden) if hidden else self._model,
        }

    def _falls_back_on(self, row: Mapping[str, Any]) -> bool:
        """Whether an added token is a byte of the model's fallback, which a text needs.

        A trainer of the library tokenizers flags the bytes that it is given as special tokens.
        """
        name = row["content"]
        return bool(
            self._model.get("byte_fallback") and name in self._ids and _BYTE_PIECE.fullmatch(name)
        )

    def _ordinary_added(self) -> list[dict[str, Any]]:
        return [row for row in self._added if not row["special"] and row["content"] in self._ids]

    def _parts(self) -> Iterator[Mapping[str, Any]]:
        """Normalisers and pre-tokenizers, sequences flattened."""
        waiting = [self._document.get("pre_tokenizer"), self._document.get("normalizer")]
        while waiting:
            part = waiting.pop()
            if part is None:
                continue
            inner = part.get("normalizers") or part.get("pretokenizers")
            if inner is None:
                yield part
            else:
                waiting += reversed(inner)

    def _has(self, part_type: str) -> bool:
        return any(part.get("type") == part_type for part in self._parts())

    def _unknown(self) -> str | None:
        unk_id = self._model.get("unk_id")
        if unk_id is None:
            return self._model.get("unk_token")
        return next((piece for piece, i in self._ids.items() if i == unk_id), None)

    def _byte_level(self, piece: str) -> bytes:
        alphabet = byte_of_character()
        try:
            return bytes(map(alphabet.__getitem__, piece))
        except KeyError:
            return piece.encode()

    def _displayed(self, piece: str) -> bytes:
        """Bytes of a displayed piece: Metaspace, byte fallback, WordPiece or plain."""
        if self._model.get("byte_fallback") and (byte := _BYTE_PIECE.fullmatch(piece)):
            return bytes([int(byte[1], 16)])
        if self._model.get("type") == "WordPiece":
            prefix = self._model.get("continuing_subword_prefix") or ""
            inside = prefix and piece.startswith(prefix)
            return (piece.removeprefix(prefix) if inside else f" {piece}").encode()
        suffix = self._model.get("end_of_word_suffix")
        if suffix and piece.endswith(suffix):
            piece = piece.removesuffix(suffix) + " "
        return piece.replace(_METASPACE, " ").encode()


def _metaspace_prefix(part: Mapping[str, Any]) -> DummyPrefix:
    """Prefix of a Metaspace; files that predate ``prepend_scheme`` have a flag."""
    scheme = part.get("prepend_scheme", "always" if part.get("add_prefix_space", True) else "never")
    prefixes: Mapping[Any, DummyPrefix] = {"always": "each", "first": "first"}
    return prefixes.get(scheme, "none")


def _model_ids(model: Mapping[str, Any]) -> dict[str, int]:
    """Id of each piece of the model: Unigram lists pieces with scores, the others map to ids."""
    vocab = model["vocab"]
    if isinstance(vocab, dict):
        return vocab
    return {row[0]: token_id for token_id, row in enumerate(vocab)}


def _without_names(model: Mapping[str, Any], names: set[str]) -> dict[str, Any]:
    """A copy of ``model`` with the same ids in which no text can spell ``names``.

    They are renamed with a prefix: of spaces, at which most pre-tokenizers cut or which they
    replace, and of a number that is random in each process, for those that do neither.
    """

    def hide(piece: str) -> str:
        return _HIDDEN + piece if piece in names else piece

    vocab = model["vocab"]
    hidden: dict[str, Any] = dict(model)
    if isinstance(vocab, dict):
        hidden["vocab"] = {hide(piece): token_id for piece, token_id in vocab.items()}
    else:
        hidden["vocab"] = [[hide(piece), score] for piece, score in vocab]
    if model.get("unk_token") is not None:
        hidden["unk_token"] = hide(model["unk_token"])
    if "merges" in model:
        pairs = (tuple(row.split(" ")) if isinstance(row, str) else row for row in model["merges"])
        hidden["merges"] = [
            [left, right]
            for left, right in pairs
            if left + right not in names and left not in names and right not in names
        ]
    return hidden


def _check_ids(ids: Mapping[str, int], file: Path) -> None:
    for name, token_id in ids.items():
        if not isinstance(token_id, int) or not 0 <= token_id < MOST_IDS:
            raise TokenizerError(
                "a token has an id that no vocabulary has",
                got=f"{token_id!r} for {name!r}",
                expected=f"0 to {MOST_IDS - 1:,}",
                where=file,
            )


def with_special(
    added: Sequence[dict[str, Any]], ids: Mapping[str, int], names: Sequence[str]
) -> list[dict[str, Any]]:
    """``added`` with ``names`` as special tokens; new names get the next ids."""
    rows = {row["content"]: row for row in added}
    taken = {**ids, **{name: row["id"] for name, row in rows.items()}}
    following = max(taken.values(), default=-1) + 1
    for name in dict.fromkeys(names):
        token_id = taken.get(name, following)
        following += token_id == following
        rows[name] = {
            **{"lstrip": False, "rstrip": False, "single_word": False, "normalized": False},
            **rows.get(name, {}),
            **{"id": token_id, "content": name, "special": True},
        }
    # The library requires id order.
    return sorted(rows.values(), key=lambda row: int(row["id"]))


def _without_first_prefix(part: Any) -> Any:
    """A document, or a part of it, whose Metaspace adds no space to the first segment."""
    if isinstance(part, list):
        return [_without_first_prefix(item) for item in part]
    if isinstance(part, dict) and part.get("type") == "Metaspace":
        first = part.get("prepend_scheme") == "first"
        return {**part, "prepend_scheme": "never"} if first else part
    if isinstance(part, dict):
        steps = ("pre_tokenizer", "pretokenizers", "normalizer", "normalizers")
        return {
            key: _without_first_prefix(item) if key in steps else item for key, item in part.items()
        }
    return part


def _untrimmed(part: Any) -> Any:
    """A post-processor whose spans keep their white space."""
    if isinstance(part, list):
        return [_untrimmed(item) for item in part]
    if isinstance(part, dict):
        return {
            key: False if key == "trim_offsets" else _untrimmed(item) for key, item in part.items()
        }
    return part


def name_of(token: Any) -> str:
    """Name of a special token, which a configuration gives as a string or as an object."""
    name = token.get("content") if isinstance(token, dict) else token
    return name if isinstance(name, str) else ""


_CONFIG = "tokenizer_config.json"
_SPECIAL_MAP = "special_tokens_map.json"


class HuggingFaceSource:
    """Files of a HuggingFace tokenizer.

    They are read once, so that a long run does not depend on them later.

    Args:
        file: The ``tokenizer.json``.
        folder: Folder of its configuration and template; None for a tokenizer without them.
    """

    def __init__(self, file: Path, folder: Path | None) -> None:
        self.file = file
        self._folder = folder
        self._compressed: bytes | None = None

    @property
    def files(self) -> dict[str, Path]:
        """Every file that is read, by the name that it has to have."""
        beside = (self._beside(name) for name in (_CONFIG, _SPECIAL_MAP, TEMPLATE_FILE))
        files = {file.name: file for file in beside if file is not None}
        named = {f"{TEMPLATE_FOLDER}/{file.name}": file for file in self._named_templates()}
        return self._vocabulary_files() | files | named

    def _vocabulary_files(self) -> dict[str, Path]:
        """The files that hold the vocabulary."""
        return {"tokenizer.json": self.file}

    def document(self) -> object:
        """The ``tokenizer.json``, a new object.

        Raises:
            TokenizerError: It cannot be read, or is broken.
        """
        if self._compressed is None:
            contents = self._read()
            # Parsed, it would take a hundred times the memory.
            self._compressed = zlib.compress(contents, level=1)
        else:
            contents = zlib.decompress(self._compressed)
        return parse_json(contents, self.file)

    def _read(self) -> bytes:
        """The bytes of the ``tokenizer.json``."""
        return read_file(self.file)

    @cached_property
    def config(self) -> Mapping[str, Any] | None:
        """The ``tokenizer_config.json`` and ``special_tokens_map.json``; None without both.

        Raises:
            TokenizerError: It is broken.
        """
        return self._read_config()

    def _read_config(self) -> Mapping[str, Any] | None:
        config, names = self._object_in(_CONFIG), self._object_in(_SPECIAL_MAP)
        if names is None or "added_tokens_decoder" in (config or {}):
            return config
        # Folders of before that key name special tokens in the map, as transformers reads them.
        return {**(config or {}), **names}

    def _object_in(self, name: str) -> Mapping[str, Any] | None:
        """The JSON object in a file beside the tokenizer; None where there is none."""
        file = self._beside(name)
        if file is None:
            return None
        value = read_json(file)
        if not isinstance(value, dict):
            raise TokenizerError("the configuration is no JSON object", where=file)
        return value

    def chat_templates(self) -> dict[str, str]:
        """Chat templates by name, as transformers reads them.

        Those in files, ``chat_template.jinja`` as ``default``, take the place of the configuration.

        Raises:
            TokenizerError: One cannot be read, or the configuration holds something else.
        """
        file = self._beside(TEMPLATE_FILE)
        read = {} if file is None else {DEFAULT_TEMPLATE: read_template(file)}
        read |= {file.stem: read_template(file) for file in self._named_templates()}
        return read or self._configured_templates()

    def _named_templates(self) -> list[Path]:
        """The files of the templates that have another name than ``default``."""
        return [] if self._folder is None else template_files(self._folder)

    def _configured_templates(self) -> dict[str, str]:
        given = (self.config or {}).get("chat_template")
        rows: Any = given
        if given is None or isinstance(given, str):
            rows = {} if given is None else {DEFAULT_TEMPLATE: given}
        elif isinstance(given, list):
            is_named = all(isinstance(row, dict) and "name" in row for row in given)
            rows = {str(row["name"]): row.get("template") for row in given} if is_named else None
        if not isinstance(rows, dict) or not all(
            isinstance(source, str) and TEMPLATE_NAME.fullmatch(name)
            for name, source in rows.items()
        ):
            raise TokenizerError(
                "the chat template is malformed",
                got=repr(given)[:60],
                expected='Jinja source, or [{"name": "default", "template": ...}, ...]',
                where=self._beside(_CONFIG),
            )
        return {name: self._text(source) for name, source in rows.items()}

    def _text(self, template: str) -> str:
        """``template``, or the contents of the file in the folder that it names."""
        if self._folder is None or not names_template(template):
            return template
        return read_template(path_inside(self._folder, template, self._folder / _CONFIG))

    def _beside(self, name: str) -> Path | None:
        file = None if self._folder is None else self._folder / name
        return file if file is not None and file.is_file() else None
