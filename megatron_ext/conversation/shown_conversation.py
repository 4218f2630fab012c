"""Messages as a prompt format passes them to a template.

Contents that are lists of parts become one text for templates that do not take parts.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final

from megatron_ext.conversation.images import IMAGE_PARTS, IMAGE_TOKEN, with_images
from megatron_ext.conversation.message import TOOL_ROLES, Conversation, Message, content_text, place
from megatron_ext.conversation.prompt_format import PromptConfig
from megatron_ext.conversation.rendering.provenance import Provenance, Rendered
from megatron_ext.conversation.rendering.template import render
from megatron_ext.conversation.rendering.tracked_text import track
from megatron_ext.errors import ConversationError

_PROBE: Final = "probe"
_TEXT_PART: Final = {"type": "text", "text": _PROBE}


def in_one_text(message: Message, index: int, image_token: str | None) -> Message:
    """The message with its content parts concatenated to one text.

    Args:
        message: The message; not changed.
        index: Index of the message in the conversation, for errors.
        image_token: Placeholder of an image in a text; None where images are not supported.

    Raises:
        ConversationError: A part is neither a text nor a supported image.
    """
    content = message.get("content")
    if isinstance(content, str) or content is None:
        return message
    texts = []
    for number, part in enumerate(content):
        kind = part["type"]
        if kind == "text":
            texts.append(part["text"])
        elif kind in IMAGE_PARTS and image_token is not None:
            texts.append(image_token)
        else:
            raise ConversationError(
                "neither the template nor the prompt format has a place for this part",
                got=f"type {kind!r}",
                expected="text" if image_token is None else "text or image",
                fix="read the conversation in the mode multimodal" if kind in IMAGE_PARTS else None,
                where=f"{place(index)}.content[{number}]",
            )
    return {**message, "content": "".join(texts)}


def takes_parts(
    source: str, role: str, kinds: Collection[str], special_tokens: Mapping[str, str]
) -> bool:
    """Whether a template shows contents of parts: texts as they are, and other parts somehow.

    Args:
        source: Jinja source.
        role: Role of the message.
        kinds: Types of the parts.
        special_tokens: ``bos_token`` and so on.
    """
    names = tuple(sorted(special_tokens.items()))
    others = sorted(set(kinds) - {"text"})
    return _takes_text(source, role, names) and all(
        _takes_other(source, role, kind, names) for kind in others
    )


@lru_cache(maxsize=256)
def _takes_text(source: str, role: str, special_tokens: tuple[tuple[str, str], ...]) -> bool:
    in_parts = _rendered_parts(source, role, [_TEXT_PART], special_tokens)
    as_text = _rendered_parts(source, role, _PROBE, special_tokens)
    return in_parts is not None and as_text in (None, in_parts)


@lru_cache(maxsize=256)
def _takes_other(
    source: str, role: str, kind: str, special_tokens: tuple[tuple[str, str], ...]
) -> bool:
    part = {"type": kind, kind: {"url": "x"} if kind.endswith("_url") else "x"}
    without = _rendered_parts(source, role, [_TEXT_PART], special_tokens)
    return _rendered_parts(source, role, [_TEXT_PART, part], special_tokens) not in (None, without)


def _rendered_parts(
    source: str, role: str, content: Any, special_tokens: tuple[tuple[str, str], ...]
) -> str | None:
    """A conversation with ``content``, rendered; None where the template leaves it out."""
    try:
        rendered = render(
            source,
            _around(role, content),
            special_tokens=dict(special_tokens),
            variables={"add_generation_prompt": False},
        )
    except ConversationError:
        return None
    return rendered.text if _PROBE in rendered.text else None


def _around(role: str, content: Any) -> list[Message]:
    """A conversation with a message of the role and ``content``."""
    question: Message = {"role": "user", "content": "?"}
    message: Message = {"role": role, "content": content}
    if role == "user":
        return [message]
    if role == "assistant":
        return [question, message]
    if role in ("system", "developer"):
        return [message, question]
    call = {"id": "000000000", "type": "function", "function": {"name": "f", "arguments": {}}}
    answer: Message = {"role": "assistant", "content": "", "tool_calls": [call]}
    return [question, answer, {**message, "name": "f", "tool_call_id": "000000000"}]


@dataclass(frozen=True)
class ShownConversation:
    """The messages that a template gets."""

    messages: list[Message]
    """New mappings where the format changes something."""
    first_index: int
    """Index of the first of them in the caller's conversation: -1 where the format inserts a
    message, 1 where it drops one."""

    @classmethod
    def of(
        cls,
        conversation: Conversation,
        config: PromptConfig,
        takes_parts: Callable[[str, Collection[str]], bool],
        apply_image_tag_fn: Callable[[str], str] | None,
    ) -> ShownConversation:
        """The messages that ``config`` shows of a conversation, which is not changed.

        Args:
            conversation: The caller's messages.
            config: The prompt format.
            takes_parts: Whether the template shows parts of some types in messages of a role.
            apply_image_tag_fn: Puts tags around every image of a text.

        Raises:
            ConversationError: A tool speaks and the format has no place for it, or a content has a
                part that neither the template nor the format has a place for.
        """
        messages = list(enumerate(conversation))
        if not config.allow_tool_role:
            _refuse_tools(conversation, config)
        if conversation[0]["role"] == "system" and (
            config.force_system_message or not config.has_system_role
        ):
            del messages[0]
        shown = [
            _shown(message, i, config, takes_parts, apply_image_tag_fn) for i, message in messages
        ]
        first_index = messages[0][0] if messages else len(conversation)
        if config.force_system_message:
            assert config.system_default is not None
            first_index -= 1
            shown.insert(0, _forced(config.system_default, first_index))
        return cls(shown, first_index)


def check_shown(
    rendered: Rendered, conversation: Conversation, config: PromptConfig, *, has_tools: bool
) -> None:
    """Refuse a render that leaves out a message, the tool calls of one, or the tools themselves.

    Args:
        rendered: The rendered conversation.
        conversation: The caller's messages.
        config: The prompt format.
        has_tools: The template was given tools.

    Raises:
        ConversationError: The template has no place for them.
    """
    written = rendered.written_messages | {turn for _, _, (_, _, _, turn, _) in rendered.spans}
    fields = {field for _, _, (_, _, field, _, _) in rendered.spans}
    call_fields = {field for field in fields if field.startswith("tool_calls")}
    calls = {index for _, _, (_, index, field, _, _) in rendered.spans if field in call_fields}
    for index, message in enumerate(conversation):
        is_dropped = index == 0 and message["role"] == "system" and 0 not in written
        if is_dropped and (config.force_system_message or not config.has_system_role):
            continue
        # Templates trim: a message of white space may leave nothing.
        if index not in written and content_text(message).strip():
            raise ConversationError(
                f"the prompt format {config.name} has no place for the message",
                got=f"the role {message['role']!r}",
                where=place(index),
            )
        if message.get("tool_calls") and index not in calls:
            raise ConversationError(
                f"the prompt format {config.name} has no place for tool calls", where=place(index)
            )
    if has_tools and not any(field.startswith("tools") for field in fields):
        raise ConversationError(
            f"the prompt format {config.name} has no place for tools",
            fix="take another format, such as auto, or leave the tools out",
            where="tools",
        )


def _shown(
    message: Message,
    index: int,
    config: PromptConfig,
    takes_parts: Callable[[str, Collection[str]], bool],
    apply_image_tag_fn: Callable[[str], str] | None,
) -> Message:
    if "train" in message:
        message = {key: value for key, value in message.items() if key != "train"}
    content = message.get("content")
    if isinstance(content, list | tuple) and not takes_parts(
        message["role"], {part["type"] for part in content}
    ):
        message = in_one_text(message, index, IMAGE_TOKEN if apply_image_tag_fn else None)
    if config.capitalize_roles:
        role = str(message["role"])
        message = {**message, "role": role[:1].upper() + role[1:]}
    if apply_image_tag_fn is not None:
        message = with_images(message, index, apply_image_tag_fn)
    return message


def _forced(message: Message, index: int) -> Message:
    """The format's system message, with the provenance of a variable."""
    content = track(str(message["content"]), Provenance("variable", field="system_default"))
    return {**message, "content": content}


def _refuse_tools(conversation: Conversation, config: PromptConfig) -> None:
    for index, message in enumerate(conversation):
        if message["role"] in TOOL_ROLES:
            raise ConversationError(
                f"the prompt format {config.name} has no place for what a tool says",
                got=f"the role {message['role']!r}",
                where=place(index),
            )
