"""Messages and conversations, their checks, and the tokenizer protocol that they need."""

from __future__ import annotations

import reprlib
from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray

from megatron_ext.errors import ConversationError, UntrainedError

Message = Mapping[str, Any]
"""``{"role": ..., "content": ...}`` and whatever else a template reads, such as ``tool_calls``.

The content is a string or a list of parts, ``{"type": "text", "text": ...}`` and other types. A
message may say ``"train": true`` or ``false``; no template sees that."""

Conversation = Sequence[Message]
"""Messages in order. The first that is not an instruction is not the assistant's."""

INSTRUCTION_ROLES: Final = frozenset({"system", "developer"})
TOOL_ROLES: Final = frozenset({"tool", "function", "ipython"})
ROLES: Final = INSTRUCTION_ROLES | TOOL_ROLES | {"user", "assistant"}
"""Roles of messages. By default only messages of ``assistant`` are trained."""

THINKING_FIELDS: Final = ("reasoning_content", "thinking", "reasoning")
"""Fields in which a message may have its thinking; the first that is there counts."""

CALL_FIELDS: Final = ("tool_calls", "function_call")
"""Fields in which templates look for tool calls."""


def check_conversation(conversation: object) -> None:
    """Refuse an object that is not a conversation.

    Raises:
        ConversationError: It is not a list, or is empty, a message is malformed, a role is unknown,
            or the assistant speaks first.
    """
    messages = checked_messages(conversation)
    for index, message in enumerate(messages):
        _check_message(message, place(index))
    speakers = (i for i, m in enumerate(messages) if m["role"] not in INSTRUCTION_ROLES)
    first = next(speakers, None)
    if first is not None and messages[first]["role"] == "assistant":
        raise ConversationError(
            "the assistant speaks first", expected="a user message before it", where=place(first)
        )


def checked_messages(conversation: object) -> Conversation:
    """The conversation, if it is a list of mappings; a template may still refuse it.

    Raises:
        ConversationError: It is not a list of mappings, or is empty.
    """
    if isinstance(conversation, (str, bytes, Mapping)) or not isinstance(conversation, Sequence):
        raise ConversationError(
            "a conversation is a list of messages",
            got=type(conversation).__name__,
            expected='[{"role": "user", "content": "..."}, ...]',
        )
    if not conversation:
        raise ConversationError("the conversation is empty", expected="at least one message")
    for index, message in enumerate(conversation):
        if not isinstance(message, Mapping):
            raise ConversationError(
                "a message is a mapping with role and content",
                got=type(message).__name__,
                where=place(index),
            )
    return conversation


def check_answers(conversation: Conversation, trained: Collection[int]) -> None:
    """Refuse a conversation without content to train on.

    Args:
        conversation: The messages.
        trained: Indices of the messages that are trained.

    Raises:
        UntrainedError: No message is trained.
        ConversationError: A trained message is empty.
    """
    if not trained:
        silenced = sum(message.get("train") is False for message in conversation)
        reason = (
            f", with train false (weight 0) in {silenced} of {len(conversation)} messages"
            if silenced
            else ""
        )
        roles = ", ".join(dict.fromkeys(str(m["role"]) for m in conversation))
        raise UntrainedError(
            "there is nothing to train on",
            got=f"the roles {roles}{reason}",
            expected="at least one message that is trained, as a rule the assistant's",
        )
    for index in sorted(trained):
        message = conversation[index]
        if content_text(message) or any(message.get(k) for k in (*THINKING_FIELDS, *CALL_FIELDS)):
            continue
        raise ConversationError(
            f"the {message['role']} says nothing",
            expected="content or tool_calls",
            fix="leave the conversation out, or the message",
            where=place(index),
        )


def content_text(message: Message) -> str:
    """The text of a message's content, be it a string or parts."""
    content = message.get("content")
    if isinstance(content, str):
        return content
    return "".join(part["text"] for part in content or () if part.get("type") == "text")


def place(index: int | None) -> str | None:
    """Name of a message in errors."""
    return None if index is None else f"conversation[{index}]"


def _check_message(message: Message, where: str | None) -> None:
    role = message.get("role")
    # A role may be any JSON value, including unhashable ones.
    if not isinstance(role, str) or role not in ROLES:
        raise ConversationError(
            "unknown role" if "role" in message else "the message has no role",
            got=repr(role) if "role" in message else f"the keys {', '.join(map(str, message))}",
            expected=f"one of {', '.join(sorted(ROLES))}",
            where=where,
        )
    _check_content(message, where)
    if not isinstance(message.get("train"), bool | None):
        raise ConversationError(
            "train says whether a message is trained",
            got=repr(message["train"]),
            expected="true or false",
            where=where,
        )


def _check_content(message: Message, where: str | None) -> None:
    content = message.get("content")
    is_call = message["role"] == "assistant" and any(message.get(key) for key in CALL_FIELDS)
    if content is None and is_call:
        return
    if isinstance(content, str):
        _check_surrogates(content, where)
        return
    if not isinstance(content, list | tuple):
        is_missing = "content" not in message
        raise ConversationError(
            "the message has no content" if is_missing else "the content is not text",
            got=None if is_missing else type(content).__name__,
            expected="a string, or a list of parts",
            where=where,
        )
    for number, part in enumerate(content):
        kind = part.get("type") if isinstance(part, Mapping) else None
        if not isinstance(kind, str) or (kind == "text" and not isinstance(part.get("text"), str)):
            raise ConversationError(
                "this is not a part of a content",
                got=reprlib.repr(part)[:60],
                expected='{"type": "text", "text": "..."} or another type',
                where=f"{where}.content[{number}]",
            )
        if kind == "text":
            _check_surrogates(part["text"], f"{where}.content[{number}]")


def _check_surrogates(content: str, where: str | None) -> None:
    if content.isascii():
        return
    try:
        content.encode()
    except UnicodeEncodeError as error:
        raise ConversationError(
            f"the content holds a lone surrogate at character {error.start}",
            got=f"U+{ord(content[error.start]):04X}",
            expected="text that UTF-8 can hold",
            where=where,
        ) from None


def byte_offsets(text: str) -> NDArray[np.int64]:
    """Byte at which each character of ``text`` begins and, last, its number of bytes.

    Returns:
        [characters + 1], ascending.
    """
    if text.isascii():
        return np.arange(len(text) + 1)
    is_start = (np.frombuffer(text.encode(), np.uint8) & 0xC0) != 0x80
    return np.append(np.flatnonzero(is_start), len(is_start))


DEFAULT_TEMPLATE: Final = "default"
"""Name of the chat template of a tokenizer that has one."""

TOOL_TEMPLATE: Final = "tool_use"
"""Name of the chat template for conversations with tools, of a tokenizer that has several."""


def chosen_template(templates: Mapping[str, str], tools: object) -> str | None:
    """The template for a conversation, as transformers chooses it; None where none is for it.

    Args:
        templates: Jinja source by name.
        tools: The template variable ``tools``; an empty list counts as tools.
    """
    if tools is not None and TOOL_TEMPLATE in templates:
        return templates[TOOL_TEMPLATE]
    return templates.get(DEFAULT_TEMPLATE)


class ChatTemplates:
    """Mixin with the chat templates of a tokenizer."""

    chat_templates: Mapping[str, str] = MappingProxyType({})
    """Jinja source by name: ``default``, and of several also ``tool_use``, ``rag`` ..."""

    @property
    def chat_template(self) -> str | None:
        """Jinja source of ``default``; one that is assigned takes the place of all."""
        return self.chat_templates.get(DEFAULT_TEMPLATE)

    @chat_template.setter
    def chat_template(self, source: str | None) -> None:
        self.chat_templates = {} if source is None else {DEFAULT_TEMPLATE: source}


IdArray = NDArray[np.int32]
ByteEnds = NDArray[np.int64]


class ConversationTokenizer(Protocol):
    """Protocol of a tokenizer that encodes conversations."""

    @property
    def chat_templates(self) -> Mapping[str, str]:
        """The tokenizer's own templates by name, as Jinja source."""

    @property
    def special_token_names(self) -> Mapping[str, str]:
        """``{"bos_token": "<s>", ...}``: those of bos, eos, pad, unk ... that there are."""

    @property
    def bos_id(self) -> int | None: ...
    @property
    def eos_id(self) -> int | None: ...
    @property
    def pad_id(self) -> int | None: ...
    @property
    def unk_id(self) -> int | None: ...

    def token_to_id(self, token: str) -> int:
        """Id of a token by its name; KeyError when the vocabulary lacks it."""

    def is_control(self, token_id: int) -> bool:
        """Whether the id is a control token: special, or added to the vocabulary."""

    def encode_with_control_spans(
        self, text: str, spans: Sequence[tuple[int, int]]
    ) -> tuple[IdArray, ByteEnds]:
        """Ids [T] and where each ends in ``text.encode()`` [T].

        Control tokens are recognised only where they lie whole inside one of ``spans``: half-open
        character ranges, in order and apart.
        """
