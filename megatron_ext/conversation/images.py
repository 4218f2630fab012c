"""Images in a text: the image token, and the tags that formats put around it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, overload

from megatron_ext.constants import IGNORE_INDEX
from megatron_ext.conversation.message import Conversation, Message, content_text, place
from megatron_ext.conversation.rendering.provenance import Provenance
from megatron_ext.conversation.rendering.tracked_text import track
from megatron_ext.errors import ConfigError, ConversationError
from megatron_ext.registry import did_you_mean

__all__ = [
    "DEFAULT_IMAGE_TOKEN_INDEX",
    "IGNORE_INDEX",
    "IMAGE_PARTS",
    "IMAGE_TAGS",
    "IMAGE_TOKEN",
    "ImageTags",
    "image_tags",
    "refuse_images_in_answers",
    "with_images",
]

IMAGE_TOKEN: Final = "<image>"
"""Placeholder of an image in a text."""

IMAGE_PARTS: Final = frozenset({"image", "image_url"})
"""Types of content parts that are images."""

DEFAULT_IMAGE_TOKEN_INDEX: Final = -200
"""Placeholder of an image among ids of a vocabulary without an image token."""


@dataclass(frozen=True, slots=True)
class ImageTags:
    """Tags before and after each image; a call puts them into a text, or into every message."""

    before: str
    after: str

    @overload
    def __call__(self, text: str) -> str: ...

    @overload
    def __call__(self, text: Conversation) -> list[Message]: ...

    def __call__(self, text: str | Conversation) -> str | list[Message]:
        """``text`` with tags around each image; those that are there already stay as they are.

        Args:
            text: A text, or a conversation, whose messages are copied.
        """
        if not isinstance(text, str):
            return [self._in_message(message) for message in text]
        tagged = f"{self.before}{IMAGE_TOKEN}{self.after}"
        return text.replace(tagged, IMAGE_TOKEN).replace(IMAGE_TOKEN, tagged)

    def _in_message(self, message: Message) -> Message:
        content = message.get("content")
        if not isinstance(content, str):
            parts = content or ()
            tagged = [{**p, "text": self(p["text"])} if "text" in p else p for p in parts]
            return {**message, "content": tagged} if tagged else message
        return {**message, "content": self(content)}


IMAGE_TAGS: Final[Mapping[str, ImageTags]] = {
    "nvlm": ImageTags("<Image>", "</Image>"),
    "internvl": ImageTags("<img>", "</img>"),
    "none": ImageTags("", ""),
    "": ImageTags("", ""),
}
"""Image tag type -> tags."""


def image_tags(image_tag_type: str) -> ImageTags:
    """The tags of an image tag type.

    Raises:
        ConfigError: There is no such type.
    """
    if image_tag_type not in IMAGE_TAGS:
        raise ConfigError(
            "unknown image tag type",
            got=repr(image_tag_type),
            expected=f"one of {', '.join(name for name in IMAGE_TAGS if name)}",
            fix=did_you_mean(image_tag_type, dict(IMAGE_TAGS)),
            where="image_tag_type",
        )
    return IMAGE_TAGS[image_tag_type]


def with_images(
    message: Mapping[str, Any], index: int, apply_image_tag_fn: Callable[[str], str]
) -> Mapping[str, Any]:
    """The message with its images tagged and marked as images, so that they become control tokens.

    Args:
        message: The message; not changed.
        index: Index of the message in the conversation.
        apply_image_tag_fn: Puts tags around every image of a text.
    """
    content = message.get("content")
    if isinstance(content, str):
        if IMAGE_TOKEN not in content:
            return message
        return {**message, "content": _tagged(content, index, "content", apply_image_tag_fn)}
    parts = list(content or ())
    for number, part in enumerate(parts):
        if part["type"] == "text" and IMAGE_TOKEN in part["text"]:
            field = f"content[{number}].text"
            parts[number] = {
                **part,
                "text": _tagged(part["text"], index, field, apply_image_tag_fn),
            }
    return {**message, "content": parts} if parts else message


def _tagged(text: str, index: int, field: str, apply_image_tag_fn: Callable[[str], str]) -> str:
    tagged = apply_image_tag_fn(IMAGE_TOKEN)
    image = track(tagged, Provenance("image", index, field))
    provenance = Provenance("message", index, field)
    pieces = text.replace(tagged, IMAGE_TOKEN).split(IMAGE_TOKEN)
    return image.join([track(piece, provenance) for piece in pieces])


def refuse_images_in_answers(conversation: Conversation) -> None:
    """Refuse a conversation in which the assistant shows an image.

    Raises:
        ConversationError: An assistant message holds the image token.
    """
    for index, message in enumerate(conversation):
        if message["role"] == "assistant" and _holds_image(message):
            raise ConversationError(
                f"an assistant message holds {IMAGE_TOKEN}",
                expected="images only in messages of other roles",
                where=place(index),
            )


def _holds_image(message: Message) -> bool:
    if IMAGE_TOKEN in content_text(message):
        return True
    content = message.get("content")
    return not isinstance(content, str) and any(p["type"] in IMAGE_PARTS for p in content or ())
