"""The tokenizer object that Megatron's data, training and serving code holds."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_ext.errors import ConfigError, TokenizerError
from megatron_ext.tokenizers.base import (
    ByteEnds,
    IdArray,
    MegatronTokenizerBase,
    MegatronTokenizerTextAbstract,
)
from megatron_ext.tokenizers.libraries import TOKENIZER_LIBRARIES
from megatron_ext.tokenizers.token_bytes import character_starts, utf8


class MegatronTokenizerText(MegatronTokenizerBase):
    """A tokenizer of one library behind Megatron's interface.

    Args:
        path: The tokenizer file or its directory.
        config: Metadata; ``library`` names the library. It is copied.
        options: What the library's adapter takes besides the path.

    Raises:
        ConfigError: ``config`` names no library, or an unknown one.
        TokenizerError: The file or an option is unusable.
    """

    def __init__(
        self, path: str | os.PathLike[str], config: dict[str, Any], **options: Any
    ) -> None:
        super().__init__(os.fspath(path), dict(config))
        self.library = str(config.get("library"))
        self.chat_template: str | None = config.get("chat_template")
        self.prompt_format: str | None = options.pop("prompt_format", None)
        if self.prompt_format is not None:
            raise ConfigError(
                "prompt formats are not available in this version",
                got=repr(self.prompt_format),
                fix="leave prompt_format unset",
                where="prompt_format",
            )
        self.options = options
        self._tokenizer: MegatronTokenizerTextAbstract = TOKENIZER_LIBRARIES[self.library].build(
            os.fspath(path), options
        )

    # Text and ids.

    def tokenize(self, text: str) -> list[int]:
        """Ids of ``text`` alone: special tokens in it are ordinary text."""
        return self._tokenizer.text_to_ids(text)

    text_to_ids = tokenize

    def text_to_ids_batch(self, texts: Sequence[str]) -> list[IdArray]:
        """``tokenize`` of many texts, in parallel inside the library where it can."""
        return self._tokenizer.text_to_ids_batch(texts)

    def detokenize(self, ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        """Text of ``ids``."""
        return self._tokenizer.ids_to_text(ids, skip_special_tokens=skip_special_tokens)

    def encode_with_byte_ends(
        self, text: str, *, parse_special: bool = False
    ) -> tuple[IdArray, ByteEnds]:
        """Ids [T] of ``text`` and where each ends in ``text.encode()`` [T]."""
        return self._tokenizer.encode_with_byte_ends(text, parse_special=parse_special)

    def byte_ends(self, ids: Sequence[int] | IdArray) -> ByteEnds:
        """Where each of ``ids`` ends in the bytes that the stream decodes to [T]."""
        return self._tokenizer.byte_ends(ids)

    def token_bytes(self, token_id: int) -> bytes | None:
        """Bytes of one id; None for a control token or unused id."""
        return self._tokenizer.token_bytes(token_id)

    def offsets(self, ids: Sequence[int], text: str) -> list[int]:
        """Index of the character of ``text`` in which each token begins [T].

        Raises:
            TokenizerError: ``ids`` are not a tokenization of ``text``.
        """
        raw = utf8(text)
        starts = character_starts(raw)
        begins = np.concatenate(([0], self._ends_of(ids, text, raw)[:-1]))[: len(ids)]
        characters: list[int] = (np.searchsorted(starts, begins, side="right") - 1).tolist()
        return characters

    def _ends_of(self, ids: Sequence[int], text: str, raw: bytes) -> NDArray[np.int64]:
        for parse_special in (False, True):
            own_ids, ends = self.encode_with_byte_ends(text, parse_special=parse_special)
            if own_ids.tolist() == list(ids):
                return ends
        ends = self.byte_ends(ids)
        if (int(ends[-1]) if len(ends) else 0) != len(raw):
            raise TokenizerError(
                "the ids are not a tokenization of the text",
                got=f"ids of {int(ends[-1]) if len(ends) else 0} bytes",
                expected=f"{len(raw)} bytes",
            )
        return ends

    # Vocabulary.

    @property
    def vocab_size(self) -> int:
        return self._tokenizer.vocab_size

    @cached_property
    def vocab(self) -> list[str]:
        """Display string of each id, in id order [V]; empty where an id is unused."""
        return [self._tokenizer.id_to_token(i) for i in range(self.vocab_size)]

    @cached_property
    def inv_vocab(self) -> dict[int, str]:
        """Display string by id."""
        return dict(enumerate(self.vocab))

    def token_to_id(self, token: str) -> int:
        """Id of a display string; KeyError when the vocabulary does not hold it."""
        return self._tokenizer.token_to_id(token)

    def id_to_token(self, token_id: int) -> str:
        """Display string of an id."""
        return self._tokenizer.id_to_token(token_id)

    # Special ids, under both of the names that Megatron uses.

    @property
    def pad_id(self) -> int | None:
        """Padding."""
        return self._tokenizer.pad_id

    @property
    def bos_id(self) -> int | None:
        """Beginning of sequence."""
        return self._tokenizer.bos_id

    @property
    def eos_id(self) -> int | None:
        """End of sequence."""
        return self._tokenizer.eos_id

    @property
    def unk_id(self) -> int | None:
        """Unknown."""
        return self._tokenizer.unk_id

    @property
    def eod(self) -> int | None:
        """End of document."""
        return self._tokenizer.eod

    pad = pad_id
    bos = bos_id
    eos = eos_id
    unk = unk_id

    # Identity.

    def fingerprint(self) -> str:
        """SHA-256 (hex) of every id's bytes or control name in id order."""
        return self._tokenizer.fingerprint()

    @property
    def unique_identifiers(self) -> OrderedDict[str, str]:
        """What Megatron's dataset cache is keyed on."""
        kind = type(self)
        identifiers = OrderedDict(
            {
                "class": f"{kind.__module__}.{kind.__qualname__}",
                "library": self.library,
                "tokenizer_path": str(self.path),
            }
        )
        identifiers.update((name, str(self.options[name])) for name in sorted(self.options))
        return identifiers
