"""Alignment of a conversation that each side renders with its own template.

T tokens, R ranges, P places, N bytes.

Text that one template writes has no counterpart in the other. Message contents do: the same field
of the same message. So contents are matched by their provenance, whatever the templates are, and so
are the stop tokens behind the same answer; everything else is in no chunk.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from megatron_ext.alignment.alignment import Alignment
from megatron_ext.alignment.spelling import SpelledSide, Spelling, Tokens, as_spelled
from megatron_ext.alignment.symbol_match import Run, heaviest_chain
from megatron_ext.alignment.text_alignment import Segments, align_segments, bridge_texts
from megatron_ext.conversation import Conversation, EncodedConversation
from megatron_ext.conversation.message import byte_offsets
from megatron_ext.tokenizers.base import ByteTokenizer

Pair = tuple[int, int, int, int]
"""Byte range in the student's text and in the teacher's."""


class ConversationEncoder(ByteTokenizer, Protocol):
    """Protocol of a tokenizer that renders conversations, such as a ``MegatronTokenizerText`` with
    a prompt format."""

    def encode_conversation(
        self,
        conversation: Conversation,
        *,
        add_generation_prompt: bool = False,
        template_variables: Mapping[str, Any] | None = None,
    ) -> EncodedConversation: ...
    def is_control(self, token_id: int) -> bool: ...


@dataclass(frozen=True, slots=True)
class ConversationAlignment:
    """A conversation as tokenized by both sides, and their alignment."""

    student: EncodedConversation
    """Its ``trained`` [Ts] is the student's mask."""

    teacher: EncodedConversation

    alignment: Alignment

    student_residual_bytes: int
    """Bytes of messages in the student's text that the teacher's lacks or changes."""

    teacher_residual_bytes: int

    @property
    def student_mask(self) -> NDArray[np.bool_]:
        """[Ts - 1] trained label positions, as ``pad_alignments`` and ``pack_alignments`` take."""
        return self.student.trained[1:]


def align_conversation(
    student_tokenizer: ConversationEncoder,
    teacher_tokenizer: ConversationEncoder,
    conversation: Conversation,
    *,
    add_generation_prompt: bool = False,
    template_variables: Mapping[str, Any] | None = None,
) -> ConversationAlignment:
    """Render a conversation with both sides' templates and align the message contents.

    Bytes correspond where they come from the same field of the same message and are equal: of a
    content that one template strips or shortens, the part it shows. Stop tokens behind the same
    message are a chunk of their own, where both sides train theirs.

    Args:
        student_tokenizer: With a prompt format.
        teacher_tokenizer: With its own.
        conversation: Not changed.
        add_generation_prompt: End with the header of an answer, on both sides.
        template_variables: Variables of both templates besides the messages, such as ``tools``.

    Raises:
        ConfigError: A tokenizer has no prompt format.
        ConversationError: The conversation is malformed, or does not fit a format.
    """
    student, teacher = (
        tokenizer.encode_conversation(
            conversation,
            add_generation_prompt=add_generation_prompt,
            template_variables=template_variables,
        )
        for tokenizer in (student_tokenizer, teacher_tokenizer)
    )
    return align_encoded_conversations(
        student, teacher, student_tokenizer=student_tokenizer, teacher_tokenizer=teacher_tokenizer
    )


def align_encoded_conversations(
    student: EncodedConversation,
    teacher: EncodedConversation,
    *,
    student_tokenizer: ConversationEncoder,
    teacher_tokenizer: ConversationEncoder,
) -> ConversationAlignment:
    """``align_conversation`` of a conversation that both sides have encoded already."""
    student_contents, teacher_contents = shown_contents(student), shown_contents(teacher)
    contents = [
        pair
        for key in student_contents
        if key in teacher_contents
        for pair in _equal_ranges(student_contents[key], teacher_contents[key])
    ]
    stops = list(
        _stop_ranges(
            student,
            teacher,
            stop_tokens(student, student_contents, student_tokenizer.is_control),
            stop_tokens(teacher, teacher_contents, teacher_tokenizer.is_control),
        )
    )
    pairs = _ascending([*contents, *stops])
    ranges = np.array(pairs, dtype=np.int64).reshape(-1, 2, 2)
    aligned = sum(pair[1] - pair[0] for pair in set(pairs) - set(stops))
    alignment = align_segments(
        student.byte_ends, teacher.byte_ends, Segments(ranges[:, 0], ranges[:, 1])
    )
    return ConversationAlignment(
        student=student,
        teacher=teacher,
        alignment=as_spelled(
            alignment, _side(student, student_tokenizer), _side(teacher, teacher_tokenizer)
        ),
        student_residual_bytes=_byte_count(student_contents) - aligned,
        teacher_residual_bytes=_byte_count(teacher_contents) - aligned,
    )


def _side(encoded: EncodedConversation, tokenizer: ByteTokenizer) -> SpelledSide:
    return SpelledSide(Tokens(encoded.ids.astype(np.int32), encoded.byte_ends), Spelling(tokenizer))


def _equal_ranges(student: ShownContent, teacher: ShownContent) -> Iterator[Pair]:
    """Ranges in which both sides show the same bytes of one content, contiguous on both."""
    for start, teacher_start, size in _equal_bytes(student.text, teacher.text):
        stop, shift = start + size, teacher_start - start
        cuts = np.concatenate([student.starts, teacher.starts - shift])
        fence = np.unique(np.clip(cuts, start, stop)).tolist()
        for first, last in pairwise(fence):
            at, teacher_at = _shown_at(student, first), _shown_at(teacher, first + shift)
            yield at, at + last - first, teacher_at, teacher_at + last - first


def _equal_bytes(student: str, teacher: str) -> list[Run]:
    """Equal runs of two versions of one content; where one contains the other, all of it.

    The last occurrence is taken: a shortened content is usually the end of the whole one, such as
    an answer without its thinking.
    """
    student_raw, teacher_raw = student.encode(), teacher.encode()
    if (at := student_raw.rfind(teacher_raw)) >= 0:
        return [(at, 0, len(teacher_raw))]
    if (at := teacher_raw.rfind(student_raw)) >= 0:
        return [(0, at, len(student_raw))]
    return bridge_texts(student_raw, teacher_raw).equal.runs


def _shown_at(content: ShownContent, byte: int) -> int:
    """Byte of the rendered text at which a byte of a content is shown."""
    place = int(content.starts.searchsorted(byte, side="right")) - 1
    return int(content.places[place, 0] + byte - content.starts[place])


def _stop_ranges(
    student: EncodedConversation,
    teacher: EncodedConversation,
    student_stops: Mapping[int, int],
    teacher_stops: Mapping[int, int],
) -> Iterator[Pair]:
    for message, token in student_stops.items():
        if message in teacher_stops:
            yield (*_bytes_of(student, token), *_bytes_of(teacher, teacher_stops[message]))


def _bytes_of(encoded: EncodedConversation, token: int) -> tuple[int, int]:
    start = int(encoded.byte_ends[token - 1]) if token else 0
    return start, int(encoded.byte_ends[token])


def _ascending(pairs: list[Pair]) -> list[Pair]:
    """The pairs that ascend on both sides: those of most bytes, where a template reorders."""
    by_start = {(pair[0], pair[2]): pair for pair in pairs}
    runs: list[Run] = [(pair[0], pair[2], pair[1] - pair[0]) for pair in sorted(pairs)]
    return [by_start[i, j] for i, j, _ in heaviest_chain(runs)]


def _byte_count(contents: Mapping[Any, ShownContent]) -> int:
    return sum(int(content.starts[-1]) for content in contents.values())


ContentKey = tuple[int, str]
"""Index of a message and the path of a field in it."""


@dataclass(frozen=True, slots=True)
class ShownContent:
    """The text of one field of one message, and the places where it is shown."""

    text: str
    places: NDArray[np.int64]
    """[P, 2] half-open byte ranges of the rendered text, ascending."""

    @property
    def starts(self) -> NDArray[np.int64]:
        """[P + 1] where each place starts in the bytes of ``text``, and their number."""
        sizes = self.places[:, 1] - self.places[:, 0]
        return np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes)])


def shown_contents(encoded: EncodedConversation) -> dict[ContentKey, ShownContent]:
    """The message contents that the rendered text shows; roles are not contents."""
    offsets = byte_offsets(encoded.text)
    places: dict[ContentKey, list[tuple[int, int]]] = {}
    for start, end, provenance in encoded.spans:
        message, field = provenance.message, provenance.field
        if provenance.source != "message" or message is None or field == "role":
            continue
        # A negative index is a message that the prompt format inserts.
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

    It is the last control token of the trained text behind the message's content. A message without
    one has no entry, and so has a conversation in which everything is trained.
    """
    if encoded.trained.all():
        return {}
    ends: dict[int, int] = {}
    for (message, _), content in contents.items():
        ends[message] = max(ends.get(message, 0), int(content.places[-1, 1]))
    begins = np.concatenate([np.zeros(1, np.int64), encoded.byte_ends[:-1]])
    content_starts = sorted(int(content.places[0, 0]) for content in contents.values())
    stops: dict[int, int] = {}
    for message, end in ends.items():
        following = next((start for start in content_starts if start >= end), None)
        token = int(begins.searchsorted(end, side="left"))
        while token < len(begins) and encoded.trained[token]:
            if following is not None and encoded.byte_ends[token] > following:
                break
            if is_control(int(encoded.ids[token])) and encoded.byte_ends[token] > begins[token]:
                stops[message] = token
            token += 1
    return stops
