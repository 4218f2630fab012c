"""Null tokenizer: ``"11 325 97"`` is three ids. For benchmarks, and for data made of ids."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import ClassVar

import numpy as np

from megatron_ext.errors import TokenizerError
from megatron_ext.tokenizers.base import MegatronTokenizerTextAbstract, ParseSpecial
from megatron_ext.tokenizers.libraries.tokenizer_libraries import engine_choice
from megatron_ext.tokenizers.special_tokens import (
    ControlMatch,
    ControlToken,
    ControlTokens,
    SpecialRole,
    conventional_ids,
)
from megatron_ext.tokenizers.token_bytes import TokenBytes, character_starts, utf8
from megatron_ext.tokenizers.token_ids import (
    ByteEnds,
    IdArray,
    checked_id,
    checked_text,
    checked_texts,
    integer,
    integers,
)

_WORD = re.compile(r"\S+")
_ONLY_NUMBERS = re.compile(r"[0-9 \t\r\n]*")
# Python refuses to parse numbers of thousands of digits; no vocabulary needs more than these.
_MOST_DIGITS = 18


class NumberText:
    """Parser of texts of numbers below ``size``."""

    def __init__(self, size: int) -> None:
        self.size = size

    def value(self, word: str) -> int | None:
        """The number that ``word`` spells; None for other words and numbers that are too large."""
        if not (word.isascii() and word.isdecimal()):
            return None
        digits = word.lstrip("0") or "0"
        number = int(digits) if len(digits) <= _MOST_DIGITS else self.size
        return number if number < self.size else None

    def values(self, text: str) -> list[int]:
        """The numbers in ``text``.

        Raises:
            TokenizerError: ``text`` holds something else, or a number that is too large.
        """
        if _ONLY_NUMBERS.fullmatch(text) is not None:
            words = text.split()
            if max(map(len, words), default=0) <= _MOST_DIGITS:
                numbers = list(map(int, words))
                if max(numbers, default=0) < self.size:
                    return numbers
        # The slow path names the error and its place.
        return self.read(text, ())[0]

    def read(self, text: str, matches: Iterable[ControlMatch]) -> tuple[list[int], list[int]]:
        """Numbers and control ids of ``text`` [T], and the character at which each ends [T].

        White space belongs to the id before it; at the start of the text, to the first one.

        Raises:
            TokenizerError: Text between ``matches`` holds something else, or a number too large.
        """
        ids: list[int] = []
        begins: list[int] = []
        done = 0
        for match in [*matches, None]:
            for word in _WORD.finditer(text, done, len(text) if match is None else match.begin):
                ids.append(self._number(word))
                begins.append(word.start())
            if match is not None:
                ids.append(match.token_id)
                begins.append(match.begin)
                done = match.end
        return ids, [*begins[1:], len(text)][: len(ids)]

    def _number(self, word: re.Match[str]) -> int:
        number = self.value(word[0])
        if number is not None:
            return number
        shown = word[0] if len(word[0]) <= 40 else f"{word[0][:40]}..."
        raise TokenizerError(
            "the number is outside the vocabulary"
            if word[0].isascii() and word[0].isdecimal()
            else "the text is not all numbers",
            got=f"{shown!r} at character {word.start()}",
            expected=f"0 to {self.size - 1}",
        )


class NullTokenizer(MegatronTokenizerTextAbstract):
    """Tokenizer of ids written in decimal with white space between, without a file.

    In a stream each id but the last stands for its digits and a space.

    Args:
        vocab_size: Number of ids that a text can spell, from 0 on.
        eod_id: End of document, which is the EOS too; by default the last of these ids.
        pad_id: Padding; none when negative or unset.
        add_eod: Have one id more than ``vocab_size``, as in Megatron 0.16.
        additional_special_tokens: Names that follow all of these.
        placeholders: Names of ids outside the vocabulary, which a model replaces.
        engine: ``auto`` or ``reference``.

    Raises:
        TokenizerError: ``vocab_size`` is missing or not positive, an id is outside the vocabulary,
            a name is a number, or the engine is another.
    """

    library: ClassVar[str] = "null"

    def __init__(
        self,
        *,
        vocab_size: int | None = None,
        eod_id: int | None = None,
        pad_id: int | None = None,
        add_eod: bool = False,
        additional_special_tokens: Sequence[str] = (),
        placeholders: Mapping[str, int] | None = None,
        engine: str = "auto",
    ) -> None:
        self.engine = engine_choice(engine, reference_only=self.library)
        if vocab_size is None or vocab_size < 1:
            raise TokenizerError(
                "a null tokenizer needs the size of its vocabulary",
                got=vocab_size,
                expected=">= 1",
                where="vocab_size",
            )
        self._text = NumberText(vocab_size + int(add_eod))
        names = dict.fromkeys(additional_special_tokens)
        self._id_of_name = {name: self._text.size + i for i, name in enumerate(names)}
        self._control = _control_tokens(self._id_of_name, placeholders or {})
        self._name_of_id = {token.token_id: name for name, token in self._control.by_name.items()}
        self._roles = conventional_ids(self._id_of_name.get)
        self._roles["eos"] = self._inside(self._text.size - 1 if eod_id is None else eod_id)
        if pad_id is not None:
            self._roles["pad"] = None if pad_id < 0 else self._inside(pad_id)

    def _inside(self, token_id: object) -> int:
        return checked_id(token_id, self.vocab_size)

    @property
    def vocab_size(self) -> int:
        return self._text.size + len(self._id_of_name)

    # Text and ids.

    def text_to_ids(self, text: str, *, parse_special: ParseSpecial = False) -> list[int]:
        text = checked_text(text)
        if not parse_special:
            return self._text.values(text)
        return self._text.read(text, self._matches(text, parse_special))[0]

    def text_to_flat_ids(
        self, texts: Sequence[str], *, parse_special: ParseSpecial = False
    ) -> tuple[IdArray, ByteEnds]:
        ids: list[int] = []
        offsets = [0]
        for text in checked_texts(texts):
            ids += self.text_to_ids(text, parse_special=parse_special)
            offsets.append(len(ids))
        return np.array(ids, np.int32), np.array(offsets, np.int64)

    def _decode(self, ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        skipped = {*self._roles.values(), *self._name_of_id} if skip_special_tokens else set()
        return " ".join([self.id_to_token(i) for i in integers(ids).tolist() if i not in skipped])

    def encode_with_byte_ends(
        self, text: str, *, parse_special: ParseSpecial = False
    ) -> tuple[IdArray, ByteEnds]:
        return self._with_byte_ends(text, self._matches(text, parse_special))

    def encode_with_control_spans(
        self, text: str, spans: Sequence[tuple[int, int]]
    ) -> tuple[IdArray, ByteEnds]:
        return self._with_byte_ends(text, self._control.find(text, spans))

    def _matches(self, text: str, parse_special: ParseSpecial) -> Iterable[ControlMatch]:
        if isinstance(parse_special, bool):
            return self._control.find(text) if parse_special else ()
        return self._control.named(parse_special).find(text)

    def _with_byte_ends(
        self, text: str, matches: Iterable[ControlMatch]
    ) -> tuple[IdArray, ByteEnds]:
        starts = character_starts(utf8(text))
        ids, ends = self._text.read(text, matches)
        return np.array(ids, np.int32), starts[np.array(ends, np.int64)]

    # Ids and bytes.

    def token_bytes(self, token_id: int) -> bytes | None:
        return None if self.is_control(token_id) else b"%d " % integer(token_id)

    def byte_ends(self, ids: Sequence[int] | IdArray) -> ByteEnds:
        lengths = [len(self.token_bytes(i) or b"") for i in integers(ids).tolist()]
        ends = np.cumsum(lengths, dtype=np.int64)
        # The last number has no space behind it.
        return np.minimum(ends, max(ends[-1] - 1, 0)) if len(ends) else ends

    # Ids and display strings.

    def token_to_id(self, token: str) -> int:
        if token in self._control.by_name:
            return self._control.by_name[token].token_id
        number = self._text.value(token) if isinstance(token, str) else None
        if number is None or str(number) != token:
            raise KeyError(token)
        return number

    def id_to_token(self, token_id: int) -> str:
        token_id = integer(token_id)
        return self._name_of_id[token_id] if self.is_control(token_id) else str(token_id)

    def is_control(self, token_id: int) -> bool:
        token_id = integer(token_id)
        return token_id in self._name_of_id or self._inside(token_id) >= self._text.size

    # Special ids and identity.

    def special_id(self, role: SpecialRole) -> int | None:
        return self._roles[role]

    @property
    def additional_special_tokens_ids(self) -> list[int]:
        with_role = set(self._roles.values())
        return [i for i in self._id_of_name.values() if i not in with_role]

    def files(self) -> Mapping[str, Path]:
        return {}

    def fingerprint(self) -> str:
        return self._fingerprint

    @cached_property
    def _fingerprint(self) -> str:
        table = TokenBytes.from_tokens(map(self.token_bytes, range(self.vocab_size)))
        return table.fingerprint(self.id_to_token)


def _control_tokens(names: Mapping[str, int], placeholders: Mapping[str, int]) -> ControlTokens:
    """Control tokens that a text can spell besides numbers."""
    for name in (*names, *placeholders):
        if not name or name.isdecimal() or any(map(str.isspace, name)):
            raise TokenizerError(
                "a special token cannot have this name",
                got=repr(name),
                expected="a name without white space that is not a number",
                where="additional_special_tokens",
            )
    return ControlTokens([ControlToken(name, i) for name, i in {**names, **placeholders}.items()])
