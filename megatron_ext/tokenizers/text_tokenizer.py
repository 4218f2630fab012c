"""The tokenizer object that Megatron's data, training and serving code holds."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_ext.errors import TokenizerError
from megatron_ext.tokenizers.base import (
    ByteEnds,
    IdArray,
    MegatronTokenizerBase,
    MegatronTokenizerTextAbstract,
)
from megatron_ext.tokenizers.chat_tokenizer import ChatTokenizer
from megatron_ext.tokenizers.libraries import TOKENIZER_LIBRARIES, library_of
from megatron_ext.tokenizers.token_bytes import character_starts, utf8


class MegatronTokenizerText(ChatTokenizer, MegatronTokenizerBase):
    """A tokenizer of one library behind Megatron's interface.

    Args:
        path: The tokenizer file or its directory; None for a library that reads none.
        config: Metadata; ``library`` names the library, ``chat_template`` and ``prompt_format``
            may stand here too. It is copied.
        prompt_format: Name of the prompt format that renders and masks conversations.
        chat_template: Jinja source, used unless the metadata have one.
        parse_special_tokens: Special tokens written in a text become their ids. Never in the
            messages of a conversation.
        identify_by_content: Let ``unique_identifiers`` follow the vocabulary and the template
            instead of the path alone.
        options: What the library's adapter takes besides the path.

    Raises:
        ConfigError: ``config`` names no library or an unknown one, or the prompt format does not
            fit the vocabulary.
        TokenizerError: The file or an option is unusable.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | None,
        config: Mapping[str, Any],
        *,
        prompt_format: str | None = None,
        chat_template: str | None = None,
        parse_special_tokens: bool = False,
        identify_by_content: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(None if path is None else os.fspath(path), dict(config))
        self.library = library_of(config.get("library")).library
        self.parse_special_tokens = parse_special_tokens
        self.identify_by_content = identify_by_content
        self.options = options
        self._tokenizer: MegatronTokenizerTextAbstract = TOKENIZER_LIBRARIES[self.library].build(
            path, options
        )
        self._set_chat_template(chat_template)
        self._set_prompt_format(prompt_format)

    # Text and ids.

    def text_to_ids(self, text: str) -> list[int]:
        """Ids of ``text``; special tokens in it are text unless ``parse_special_tokens``."""
        return self._tokenizer.text_to_ids(text, parse_special=self.parse_special_tokens)

    def text_to_ids_batch(self, texts: Sequence[str]) -> list[IdArray]:
        """``text_to_ids`` of many texts, in parallel inside the library where it can."""
        return self._tokenizer.text_to_ids_batch(texts, parse_special=self.parse_special_tokens)

    def text_to_flat_ids(self, texts: Sequence[str]) -> tuple[IdArray, ByteEnds]:
        """Ids [N] of all texts and offsets [D + 1]: where those of each begin and end."""
        return self._tokenizer.text_to_flat_ids(texts, parse_special=self.parse_special_tokens)

    def detokenize(self, ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        """Text of ``ids``."""
        return self._tokenizer.ids_to_text(ids, skip_special_tokens=skip_special_tokens)

    def encode_with_byte_ends(
        self, text: str, *, parse_special: bool | None = None
    ) -> tuple[IdArray, ByteEnds]:
        """Ids [T] of ``text`` and where each ends in ``text.encode()`` [T]."""
        parse = self.parse_special_tokens if parse_special is None else parse_special
        return self._tokenizer.encode_with_byte_ends(text, parse_special=parse)

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
        """Padding: the prompt format's, else the tokenizer's."""
        of_format = None if self.prompt_config is None else self.prompt_config.pad_token_id
        return self._tokenizer.pad_id if of_format is None else of_format

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
    def mask_id(self) -> int | None:
        """Masked position."""
        return self._tokenizer.mask_id

    @property
    def cls_id(self) -> int | None:
        """Classification."""
        return self._tokenizer.cls_id

    @property
    def sep_id(self) -> int | None:
        """Separator."""
        return self._tokenizer.sep_id

    @property
    def eod(self) -> int | None:
        """End of document."""
        return self._tokenizer.eod

    pad = pad_id
    bos = bos_id
    eos = eos_id
    unk = unk_id
    mask = mask_id
    cls = cls_id
    sep = sep_id

    @property
    def additional_special_tokens_ids(self) -> list[int]:
        """Ids of the special tokens that have no role, such as T5's sentinels."""
        return self._tokenizer.additional_special_tokens_ids

    @property
    def special_tokens_dict(self) -> dict[str, int]:
        """Id by ``bos_token``, ``eos_token``, ``pad_token`` ...: those that there are."""
        names = self._tokenizer.special_token_names
        ids = {name: self._tokenizer.token_to_id(token) for name, token in names.items()}
        return ids if self.pad_id is None else ids | {"pad_token": self.pad_id}

    # Identity.

    def fingerprint(self) -> str:
        """SHA-256 (hex) of every id's bytes or control name in id order."""
        return self._tokenizer.fingerprint()

    @property
    def unique_identifiers(self) -> OrderedDict[str, str]:
        """What Megatron's dataset cache is keyed on."""
        kind = type(self)
        # Our own classes may move between modules without emptying every cache.
        package = "megatron_ext" if kind.__module__.startswith("megatron_ext.") else kind.__module__
        identifiers = OrderedDict(
            {
                "class": f"{package}.{kind.__qualname__}",
                "library": self.library,
                "tokenizer_path": str(self.path),
            }
        )
        identifiers.update((name, str(self.options[name])) for name in sorted(self.options))
        if self.parse_special_tokens:
            identifiers["parse_special_tokens"] = "True"
        if self.prompt_format is not None:
            identifiers["prompt_format"] = self.prompt_format
        if self.identify_by_content:
            identifiers["vocabulary"] = self.fingerprint()
            identifiers["chat_template"] = str(self.chat_template)
        return identifiers
