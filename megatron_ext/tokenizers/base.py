"""Interfaces of a tokenizer: a library's adapter, Megatron's base class, and ``ByteTokenizer``.

One adapter per library implements ``MegatronTokenizerTextAbstract``. Tokenizers are related by
bytes, because display strings differ between libraries (``Ġthe``, ``▁the``, ``<0x0A>``). Two views
of a token's bytes matter:

* ``token_bytes(id)``: what the id contributes to a decoded stream, whatever stands before it;
* ``encode_with_byte_ends(text)``: where each token of ``text`` ends in ``text.encode()``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, SupportsIndex, overload

from megatron_ext.conversation import Conversation, apply_chat_template
from megatron_ext.conversation.message import DEFAULT_TEMPLATE, ChatTemplates, chosen_template
from megatron_ext.errors import TokenizerError
from megatron_ext.tokenizers.special_tokens import CONVENTIONAL_NAMES, RoleIds
from megatron_ext.tokenizers.text_offsets import text_offsets
from megatron_ext.tokenizers.token_ids import ByteEnds, IdArray
from megatron_ext.tokenizers.tokenizer_files import given_template


class Vocabulary(list[str]):
    """The display string of each id in id order; empty where an id is unused.

    Megatron's code uses it as a list with some libraries and as a mapping with others, so
    ``vocabulary["<s>"]`` is an id and ``"<s>" in vocabulary`` is quick. Of two ids with the same
    display string the first counts. It is immutable by convention.
    """

    def __init__(self, tokens: Iterable[str]) -> None:
        super().__init__(tokens)

    @overload
    def __getitem__(self, key: SupportsIndex) -> str: ...
    @overload
    def __getitem__(self, key: slice) -> list[str]: ...
    @overload
    def __getitem__(self, key: str) -> int: ...
    def __getitem__(self, key: Any) -> Any:
        return self.ids[key] if isinstance(key, str) else super().__getitem__(key)

    def __contains__(self, token: object) -> bool:
        return token in self.ids

    @cached_property
    def ids(self) -> dict[str, int]:
        """Id of each display string."""
        ids: dict[str, int] = {}
        for token_id, token in enumerate(self):
            if token:
                ids.setdefault(token, token_id)
        return ids


ParseSpecial = bool | frozenset[str]
"""Special tokens that are parsed in a text: all of them, none, or those with these names."""


def required_template(templates: Mapping[str, str], tools: object) -> str:
    """``chosen_template``, or an error with the names that there are.

    Raises:
        TokenizerError: None of ``templates`` is for the conversation.
    """
    source = chosen_template(templates, tools)
    if source is not None:
        return source
    names = ", ".join(sorted(templates))
    raise TokenizerError(
        f"the tokenizer has no chat template{f' named {DEFAULT_TEMPLATE}' if names else ''}",
        got=names or None,
        fix=f"pass {'one of these names as ' if names else ''}chat_template",
    )


class MegatronTokenizerTextAbstract(ChatTemplates, RoleIds):
    """One tokenizer, through one library.

    Every id satisfies ``0 <= id < vocab_size``. A special id that the tokenizer does not have is
    None; an id of 0 is an id.
    """

    library: ClassVar[str]
    """Name in ``TOKENIZER_LIBRARIES``."""

    absent_pad: ClassVar[int | None] = -1
    """Value that Megatron's code gets for a missing padding id."""

    served_by: Any = None
    """The ``MegatronTokenizerText`` around it, which renders conversations for serving code."""
    _chosen_pad_id: int | None = None

    @property
    @abstractmethod
    def vocab_size(self) -> int:
        """Number of ids, special tokens included, before any padding."""

    # Text and ids.

    @abstractmethod
    def text_to_ids(self, text: str, *, parse_special: ParseSpecial = False) -> list[int]:
        """Ids of ``text`` alone: no BOS or EOS is added.

        Special tokens in it are ordinary text unless ``parse_special`` says otherwise.
        """

    @abstractmethod
    def text_to_flat_ids(
        self, texts: Sequence[str], *, parse_special: ParseSpecial = False
    ) -> tuple[IdArray, ByteEnds]:
        """``text_to_ids`` of many texts, in parallel inside the library where it can.

        Returns:
            ids [N] int32 of all texts and offsets [D + 1] int64: text ``i`` has
            ``ids[offsets[i] : offsets[i + 1]]``.
        """

    def text_to_ids_batch(
        self, texts: Sequence[str], *, parse_special: ParseSpecial = False
    ) -> list[IdArray]:
        """``text_to_flat_ids`` with one array for each text; they share one buffer."""
        ids, offsets = self.text_to_flat_ids(texts, parse_special=parse_special)
        bounds = offsets.tolist()
        return [ids[begin:end] for begin, end in pairwise(bounds)]

    def ids_to_text(
        self,
        ids: Sequence[int],
        *,
        skip_special_tokens: bool = False,
        remove_special_tokens: bool | None = None,
    ) -> str:
        """Text of ``ids``; bytes that are not UTF-8 become U+FFFD.

        Args:
            ids: Each inside the vocabulary.
            skip_special_tokens: Leave special tokens out; they are written by name otherwise.
            remove_special_tokens: Megatron's name of the same option, which overrides it.
        """
        skip = skip_special_tokens if remove_special_tokens is None else remove_special_tokens
        return self._decode(ids, skip_special_tokens=skip)

    @abstractmethod
    def _decode(self, ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """Implementation of ``ids_to_text``."""

    @abstractmethod
    def encode_with_byte_ends(
        self, text: str, *, parse_special: ParseSpecial = False
    ) -> tuple[IdArray, ByteEnds]:
        """Ids of ``text`` and where each ends in ``text.encode()``.

        Args:
            text: Any string without lone surrogates.
            parse_special: Turn special tokens written in ``text`` into their control ids.

        Returns:
            ids [T] int32 and ends [T] int64, non-decreasing, the last one ``len(text.encode())``.
            Token ``i`` covers bytes ``[ends[i - 1], ends[i])``. A token that covers nothing (a
            dummy prefix of its own, an inserted control token) repeats the end before it; so do
            all but the last of the tokens that one character is taken apart into.
        """

    @abstractmethod
    def encode_with_control_spans(
        self, text: str, spans: Sequence[tuple[int, int]]
    ) -> tuple[IdArray, ByteEnds]:
        """``encode_with_byte_ends`` that parses control tokens inside some spans only.

        Args:
            text: Any string without lone surrogates.
            spans: Half-open ranges of characters, ascending and disjoint. A control token whose
                name lies whole inside one of them becomes its id; elsewhere it is ordinary text.
        """

    def apply_chat_template(
        self, conversation: Conversation, chat_template: str | None = None, **options: Any
    ) -> Any:
        """A conversation rendered by a template; see the method of ``MegatronTokenizerText``.

        It is delegated to ``served_by`` where that is set, for the template that its user chose.

        Raises:
            TokenizerError: There is no template, or an option of transformers is not supported.
            ConversationError: The conversation does not fit the template.
        """
        if self.served_by is not None:
            return self.served_by.apply_chat_template(conversation, chat_template, **options)
        own = self.chat_templates
        template = (
            required_template(own, options.get("tools"))
            if chat_template is None
            else given_template(chat_template, own)
        )
        return apply_chat_template(self, conversation, template, **options)

    # Ids and bytes.

    @abstractmethod
    def token_bytes(self, token_id: int) -> bytes | None:
        """Bytes of one id in the middle of a stream; None for a control token or unused id."""

    @abstractmethod
    def byte_ends(self, ids: Sequence[int] | IdArray) -> ByteEnds:
        """Byte ends [T] of the tokens of a given stream in the bytes that it decodes to."""

    def offsets(self, ids: Sequence[int], text: str) -> list[int]:
        """Index of the character of ``text`` in which each token begins [T].

        Args:
            ids: A tokenization of ``text``, or a generated stream that decodes to it, with special
                tokens written or left out.
            text: The text.

        Raises:
            TokenizerError: ``ids`` do not decode to ``text``.
        """
        return text_offsets(self, ids, text)

    # Ids and display strings.

    @cached_property
    def vocab(self) -> Vocabulary:
        """Display string of each id, in id order [V]; empty where an id is unused."""
        return Vocabulary(map(self.id_to_token, range(self.vocab_size)))

    @cached_property
    def inv_vocab(self) -> dict[int, str]:
        """Display string by id."""
        return dict(enumerate(self.vocab))

    @abstractmethod
    def token_to_id(self, token: str) -> int:
        """Id of a display string.

        Raises:
            KeyError: The vocabulary lacks it; it does not become the unknown id.
        """

    @abstractmethod
    def id_to_token(self, token_id: int) -> str:
        """Display string of an id."""

    @abstractmethod
    def is_control(self, token_id: int) -> bool:
        """Whether no ordinary text gives this id: a special token, or one that was added."""

    def text_to_tokens(self, text: str) -> list[str]:
        """Display strings of the ids of ``text``."""
        return self.ids_to_tokens(self.text_to_ids(text))

    def tokens_to_text(self, tokens: Sequence[str]) -> str:
        """Text of display strings."""
        return self.ids_to_text([self.token_to_id(token) for token in tokens])

    def tokens_to_ids(self, tokens: str | Sequence[str]) -> int | list[int]:
        """Id of a display string, or the ids of several.

        Raises:
            KeyError: The vocabulary does not hold one.
        """
        if isinstance(tokens, str):
            return self.token_to_id(tokens)
        return [self.token_to_id(token) for token in tokens]

    def ids_to_tokens(self, ids: Sequence[int]) -> list[str]:
        """Display strings of ids."""
        return [self.id_to_token(token_id) for token_id in ids]

    # Special ids.

    @property
    @abstractmethod
    def additional_special_tokens_ids(self) -> list[int]:
        """Ids of the special tokens that have no role, such as T5's sentinels."""

    @property
    def special_token_names(self) -> dict[str, str]:
        """Name of each existing special token by ``bos_token``, ``eos_token`` ..."""
        ids = {role: self.special_id(role) for role in CONVENTIONAL_NAMES} | {"pad": self.pad_id}
        return {
            f"{role}_token": self.id_to_token(token_id)
            for role, token_id in ids.items()
            if token_id is not None
        }

    @property
    def pad_id(self) -> int | None:
        """Id of the padding."""
        return self.special_id("pad") if self._chosen_pad_id is None else self._chosen_pad_id

    @property
    def pad_token(self) -> str | None:
        """Name of the padding token; Megatron's reinforcement learning sets it where it is missing.

        Raises:
            KeyError: The vocabulary does not hold the name.
        """
        return self.special_token_names.get("pad_token")

    @pad_token.setter
    def pad_token(self, token: str) -> None:
        self._chosen_pad_id = self.token_to_id(token)

    @property
    def eod(self) -> int | None:
        """Megatron's end of document: the end of sequence unless the library has its own."""
        return self.eos_id

    # Identity.

    @abstractmethod
    def files(self) -> Mapping[str, Path]:
        """Files that the tokenizer was read from, by the name they keep in a checkpoint."""

    @abstractmethod
    def fingerprint(self) -> str:
        """SHA-256 (hex) of every id's bytes or control name in id order.

        Two files that hold the same vocabulary have the same fingerprint, whatever their library,
        path or format, provided that they name their control tokens alike.
        """


class MegatronTokenizerBase(ABC):
    """Base class of tokenizers for Megatron: a path, a configuration and the basic methods."""

    def __init__(self, path: str | None, config: dict[str, Any]) -> None:
        self.path = path
        self.config = config

    if not TYPE_CHECKING:  # A type checker is to report unknown attributes.

        def __getattr__(self, name: str) -> Any:
            """A key of the metadata, which Megatron reads as attributes."""
            config = self.__dict__.get("config", {})
            if name not in config:
                raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
            return config[name]

    @property
    @abstractmethod
    def vocab_size(self) -> int:
        """Number of ids before padding."""

    @abstractmethod
    def tokenize(self, text: str) -> list[int]:
        """Ids of ``text``."""

    @abstractmethod
    def detokenize(self, ids: Sequence[int]) -> str:
        """Text of ``ids``."""


class ByteTokenizer(Protocol):
    """Protocol of a tokenizer for alignment and projection.

    Both a library's adapter and a ``MegatronTokenizerText`` are one; see the adapter for the terms.
    """

    @property
    def vocab_size(self) -> int: ...
    @property
    def bos_id(self) -> int | None: ...
    @property
    def eos_id(self) -> int | None: ...
    @property
    def pad_id(self) -> int | None: ...
    @property
    def unk_id(self) -> int | None: ...
    def text_to_ids(self, text: str) -> list[int]: ...
    def text_to_ids_batch(self, texts: Sequence[str]) -> list[IdArray]: ...
    def text_to_flat_ids(self, texts: Sequence[str]) -> tuple[IdArray, ByteEnds]: ...
    def encode_with_byte_ends(
        self, text: str, *, parse_special: bool = False
    ) -> tuple[IdArray, ByteEnds]: ...
    def token_bytes(self, token_id: int) -> bytes | None: ...
    def byte_ends(self, ids: Sequence[int] | IdArray) -> ByteEnds: ...
    def token_to_id(self, token: str) -> int: ...
    def id_to_token(self, token_id: int) -> str: ...
    def fingerprint(self) -> str: ...
