"""Trained characters and tokens of a rendered conversation, and why other messages are excluded.

Shape letters: T tokens, R ranges, N bytes of the text.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megatron_ext.conversation.masking.answer_parts import TrainingPolicy, trained_parts
from megatron_ext.conversation.masking.answers import (
    Answer,
    AnswerContext,
    AnswerFinder,
    Range,
    answered_messages,
    generated_answers,
    joined,
)
from megatron_ext.conversation.message import ByteEnds, Conversation, Message, content_text
from megatron_ext.conversation.rendering.provenance import Rendered
from megatron_ext.conversation.rendering.template import unknown_messages

UNKNOWN_SOURCE = "the template changes text so that it cannot be told what is the message's"
NOT_SHOWN = "the template leaves out what it says"
ONLY_SHARED = "each of its tokens holds other text too"
ONLY_CUT = "the policy trains nothing of what it says"


@dataclass(frozen=True)
class TrainedPart:
    """Trained characters of a conversation, and the messages without any."""

    ranges: list[Range]
    """Ascending and disjoint."""
    excluded: Mapping[int, str]
    """Reason of each message that is not trained, by its index."""
    said: Mapping[int, Range]
    """Range from the first to the last trained character of each other message, by its index."""


def trained_part(
    rendered: Rendered, conversation: Conversation, policy: TrainingPolicy, context: AnswerContext
) -> TrainedPart:
    """The characters of a conversation that ``policy`` trains.

    Args:
        rendered: The conversation as text.
        conversation: The caller's messages.
        policy: The messages and parts that are trained.
        context: Marks and control tokens of the text.
    """
    messages = dict(enumerate(conversation))
    excluded = _with_left_out(policy.untrained(conversation), rendered, messages)
    for index in unknown_messages(rendered, messages):
        # Text that cannot be attributed to a message may come from any of them.
        for message in messages if index is None else [index]:
            excluded.setdefault(message, UNKNOWN_SOURCE)
    answers = _answers(rendered, messages, policy, context)
    shown = answered_messages(answers, rendered.spans)
    for index in messages:
        if index not in shown:
            excluded.setdefault(index, NOT_SHOWN)
    ranges: list[Range] = []
    said: dict[int, Range] = {}
    for answer in answers:
        if answer.message in excluded:
            continue
        parts = answer.ranges
        if not (policy.thinking and policy.tool_calls):
            inside = _control_tokens(answer, context)
            parts = trained_parts(answer, rendered, policy, context.marks, inside)
        ranges += parts
        if parts:
            begin, _ = said.get(answer.message, parts[0])
            said[answer.message] = begin, parts[-1][1]
    for index in messages:
        if index not in said:
            excluded.setdefault(index, ONLY_CUT)
    return TrainedPart(joined(ranges), dict(sorted(excluded.items())), said)


def _with_left_out(
    untrained: Mapping[int, str], rendered: Rendered, messages: Mapping[int, Message]
) -> dict[int, str]:
    """The reasons, extended for messages that the template leaves out."""
    hidden = {span.provenance.turn for span in rendered.unknown_spans}
    written = rendered.written_messages | hidden
    is_sure = None not in hidden
    return {
        index: f"{reason}, and {NOT_SHOWN}"
        if is_sure and index not in written and content_text(messages[index]).strip()
        else reason
        for index, reason in untrained.items()
    }


def _answers(
    rendered: Rendered,
    messages: Mapping[int, Message],
    policy: TrainingPolicy,
    context: AnswerContext,
) -> list[Answer]:
    """Answers of all messages that may be trained, in order."""
    roles = policy.roles | {m["role"] for m in messages.values() if m.get("train")}
    speakers = {i: m["role"] for i, m in messages.items() if m["role"] in roles}
    generated: list[Answer] = []
    if rendered.has_generation_blocks:
        assistants = {i: role for i, role in speakers.items() if role == "assistant"}
        generated = generated_answers(rendered, assistants)
        speakers = {i: role for i, role in speakers.items() if role != "assistant"}
    if not speakers:
        return generated
    unmarked = AnswerFinder(rendered, speakers, context).answers()
    return sorted([*generated, *unmarked], key=lambda answer: answer.start)


def _control_tokens(answer: Answer, context: AnswerContext) -> Sequence[Range]:
    first = bisect_left(context.control_tokens, (answer.start, answer.start))
    last = bisect_left(context.control_tokens, (answer.end, answer.end))
    return context.control_tokens[first:last]


def trained_tokens(
    rendered: Rendered, ranges: Sequence[Range], byte_ends: ByteEnds
) -> NDArray[np.bool_]:
    """Mask of the tokens that lie in the trained characters [T].

    A token is trained when all of its bytes are: one that an answer shares with other text is not,
    because the prompt would end within it. Exceptions are tokens that only the model can write:
    white space of the template with an answer's first word (``" Hello"``), and the end of an answer
    with white space of the template. A token without bytes goes with the character after it.

    Args:
        rendered: The rendered conversation, of N bytes.
        ranges: Trained ranges of characters, ascending and disjoint [R].
        byte_ends: Byte at which each token ends [T].
    """
    trained = np.zeros(len(byte_ends), np.bool_)
    if not ranges or not len(byte_ends):
        return trained
    offsets = rendered.byte_offsets
    bounds = offsets[np.array(ranges, np.int64)]
    starts, stops = bounds[:, 0], bounds[:, 1]
    begins = np.concatenate(([0], byte_ends[:-1]))
    # The last range that begins before the token ends; an empty token counts as one byte. Both are
    # in order, and ranges are few: look up the ranges, and count them along the tokens.
    first_behind = np.searchsorted(np.maximum(byte_ends, begins + 1), starts, side="right")
    nearest = np.bincount(first_behind, minlength=len(begins))[: len(begins)].cumsum() - 1
    is_near = nearest >= 0
    nearest = np.maximum(nearest, 0)
    trained[:] = is_near & (begins >= starts[nearest]) & (byte_ends <= stops[nearest])
    trained &= (byte_ends > begins) | (begins < stops[nearest])
    overhangs = (
        (begins >= starts[nearest]) & (begins < stops[nearest]) & (byte_ends > stops[nearest])
    )
    for token in np.flatnonzero(is_near & overhangs).tolist():
        stop, end = np.searchsorted(offsets, (stops[nearest[token]], byte_ends[token]))
        trained[token] = _is_own_space(rendered, int(stop), int(end))
    straddles = is_near & (begins < starts[nearest]) & (byte_ends <= stops[nearest])
    for token in np.flatnonzero(straddles).tolist():
        begin, start, end = np.searchsorted(
            offsets, (begins[token], starts[nearest[token]], byte_ends[token]), side="right"
        )
        trained[token] = _is_first_word(rendered, int(begin) - 1, int(start) - 1, int(end) - 1)
    return trained


def _is_own_space(rendered: Rendered, begin: int, end: int) -> bool:
    """Whether there is nothing in ``[begin, end)`` but white space of the template."""
    first = bisect_left(rendered.spans, (begin + 1,)) - 1
    last = bisect_left(rendered.spans, (end,))
    spans = rendered.spans[first:last]
    return rendered.text[begin:end].isspace() and all(span.is_template for span in spans)


def _is_first_word(rendered: Rendered, begin: int, start: int, end: int) -> bool:
    """Whether template white space in ``[begin, start)`` is followed by something visible."""
    text = rendered.text
    if not text[begin:start].isspace() or not text[start:end].strip():
        return False
    before = rendered.spans[bisect_left(rendered.spans, start, key=lambda span: span.end)]
    return before.is_template and before.start <= begin
