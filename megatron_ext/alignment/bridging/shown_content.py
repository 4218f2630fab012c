"""Where a rendered conversation shows what its messages say. K contents, P places, N bytes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megatron_ext.conversation import EncodedConversation
from megatron_ext.conversation.message import byte_offsets

ContentKey = tuple[int, str]
"""Index of a message and the path of a field in it."""


@dataclass(frozen=True, slots=True)
class ShownContent:
    """The bytes of one field of one message, put together from where they are shown."""

    text: str
    places: NDArray[np.int64]
    """[P, 2] half-open byte ranges of the rendered text, ascending."""

    @property
    def starts(self) -> NDArray[np.int64]:
        """[P + 1] where each place starts in the bytes of ``text``, and their number."""
        sizes = self.places[:, 1] - self.places[:, 0]
        return np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes)])


def shown_contents(encoded: EncodedConversation) -> dict[ContentKey, ShownContent]:
    """Everything that messages say and the rendered text shows; roles are no content."""
    offsets = byte_offsets(encoded.text)
    places: dict[ContentKey, list[tuple[int, int]]] = {}
    for start, end, provenance in encoded.spans:
        message, field = provenance.message, provenance.field
        if provenance.source != "message" or message is None or field == "role":
            continue
        # A message before the first is one that the prompt format puts in front.
        if message >= 0:
            places.setdefault((message, field), []).append((start, end))
    return {
        key: ShownContent(
            "".join(encoded.text[start:end] for start, end in ranges),
            offsets[np.array(ranges, dtype=np.int64)],
        )
        for key, ranges in places.items()
    }


def stop_tokens(
    encoded: EncodedConversation,
    contents: dict[ContentKey, ShownContent],
    is_control: Callable[[int], bool],
) -> dict[int, int]:
    """The control token that ends each trained message: index of the token by that of the message.

    It is the last control token of the trained text behind what the message says; a message
    without one, and a conversation in which all is trained, prompt and answers alike, has none.
    """
    if encoded.trained.all():
        return {}
    ends: dict[int, int] = {}
    for (message, _), content in contents.items():
        ends[message] = max(ends.get(message, 0), int(content.places[-1, 1]))
    begins = np.concatenate([np.zeros(1, np.int64), encoded.byte_ends[:-1]])
    said = sorted(int(content.places[0, 0]) for content in contents.values())
    stops: dict[int, int] = {}
    for message, end in ends.items():
        following = next((start for start in said if start >= end), None)
        token = int(begins.searchsorted(end, side="left"))
        while token < len(begins) and encoded.trained[token]:
            if following is not None and encoded.byte_ends[token] > following:
                break
            if is_control(int(encoded.ids[token])) and encoded.byte_ends[token] > begins[token]:
                stops[message] = token
            token += 1
    return stops
