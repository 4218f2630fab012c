"""What a conversation is, and what is wrong with one that is none."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from megatron_ext.errors import ConversationError

Message = Mapping[str, Any]
"""``{"role": ..., "content": ...}`` and whatever else a template reads, such as ``tool_calls``."""

Conversation = Sequence[Message]
"""Messages in order. The first that is no instruction is not the assistant's."""

INSTRUCTION_ROLES: Final = frozenset({"system", "developer"})
TOOL_ROLES: Final = frozenset({"tool", "function", "ipython"})
ROLES: Final = INSTRUCTION_ROLES | TOOL_ROLES | {"user", "assistant"}
"""Who speaks. Only text of ``assistant`` is ever trained."""


def check_conversation(conversation: object) -> None:
    """Refuse what is no conversation.

    Raises:
        ConversationError: It is no list or empty, a message is malformed, a role is unknown, or the
            assistant speaks first.
    """
    messages = checked_messages(conversation)
    for index, message in enumerate(messages):
        _check_message(message, place(index))
    speakers = (i for i, m in enumerate(messages) if m["role"] not in INSTRUCTION_ROLES)
    first = next(speakers, None)
    if first is not None and messages[first]["role"] == "assistant":
        raise ConversationError(
            "the assistant speaks first",
            expected="a user message before it",
            where=place(first),
        )


def checked_messages(conversation: object) -> Conversation:
    """The conversation, if it is a list of mappings at all; a template may still refuse it.

    Raises:
        ConversationError: It is no list of mappings, or empty.
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


def check_answers(conversation: Conversation) -> None:
    """Refuse a conversation that nothing can be learned from.

    Raises:
        ConversationError: There is no assistant message, or one is empty.
    """
    answers = [(i, m) for i, m in enumerate(conversation) if m["role"] == "assistant"]
    if not answers:
        raise ConversationError(
            "there is nothing to train on", expected="at least one assistant message"
        )
    for index, message in answers:
        if not message.get("content") and not message.get("tool_calls"):
            raise ConversationError(
                "the assistant says nothing",
                expected="content or tool_calls",
                fix="leave the conversation out, or the message",
                where=place(index),
            )


def place(index: int | None) -> str | None:
    """How an error names a message."""
    return None if index is None else f"conversation[{index}]"


def _check_message(message: Message, where: str | None) -> None:
    role = message.get("role")
    # A role may be anything that JSON has, unhashable values among it.
    if not isinstance(role, str) or role not in ROLES:
        raise ConversationError(
            "unknown role" if "role" in message else "the message has no role",
            got=repr(role) if "role" in message else f"the keys {', '.join(map(str, message))}",
            expected=f"one of {', '.join(sorted(ROLES))}",
            where=where,
        )
    content = message.get("content")
    if content is None and role == "assistant" and message.get("tool_calls"):
        return
    if not isinstance(content, str):
        is_missing = "content" not in message
        raise ConversationError(
            "the message has no content" if is_missing else "the content is not text",
            got=None if is_missing else type(content).__name__,
            expected="a string",
            where=where,
        )
    _check_surrogates(content, where)


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
