"""Training policies, and answers without their thinking or tool calls."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Final

from megatron_ext.conversation.masking.answer_marks import AnswerMarks
from megatron_ext.conversation.masking.answers import Answer, Range, is_part, spans_in
from megatron_ext.conversation.message import CALL_FIELDS, ROLES, THINKING_FIELDS, Conversation
from megatron_ext.conversation.rendering.provenance import Rendered, Span
from megatron_ext.errors import ConfigError
from megatron_ext.registry import did_you_mean

ALL_ASSISTANT: Final = "all-assistant"
LAST_ASSISTANT: Final = "last-assistant"


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingPolicy:
    """Choice of the messages and parts of messages that are trained.

    The ``"train"`` of a message, true or false, overrides ``roles`` and ``last_only``.
    """

    roles: frozenset[str] = frozenset({"assistant"})
    """Roles whose messages are trained."""
    last_only: bool = False
    """Train only the last of these messages."""
    thinking: bool = True
    """Train the thinking of these messages: the field for it, or the text between the tags at the
    start of the content."""
    tool_calls: bool = True
    """Train the tool calls of these messages."""

    @classmethod
    def of(
        cls, train_on: str = ALL_ASSISTANT, *, thinking: bool = True, tool_calls: bool = True
    ) -> TrainingPolicy:
        """The policy that a user names.

        Args:
            train_on: ``all-assistant``, ``last-assistant``, or roles with commas between them.
            thinking: Train thinking.
            tool_calls: Train tool calls.

        Raises:
            ConfigError: ``train_on`` names no policy and no role.
        """
        if train_on in (ALL_ASSISTANT, LAST_ASSISTANT):
            last_only = train_on == LAST_ASSISTANT
            return cls(last_only=last_only, thinking=thinking, tool_calls=tool_calls)
        roles = frozenset(role.strip() for role in train_on.split(","))
        for role in sorted(roles - ROLES):
            raise ConfigError(
                "unknown role to train on",
                got=repr(role),
                expected=f"{ALL_ASSISTANT}, {LAST_ASSISTANT} or roles: {', '.join(sorted(ROLES))}",
                fix=did_you_mean(role, [ALL_ASSISTANT, LAST_ASSISTANT, *ROLES]),
                where="train_on",
            )
        return cls(roles=roles, thinking=thinking, tool_calls=tool_calls)

    def untrained(self, conversation: Conversation) -> dict[int, str]:
        """Reason of each message that is not trained, by index."""
        roles = [message["role"] for message in conversation]
        last = max((i for i, role in enumerate(roles) if role in self.roles), default=None)
        reasons: dict[int, str] = {}
        for index, (message, role) in enumerate(zip(conversation, roles, strict=True)):
            stated = message.get("train")
            if stated is False:
                reasons[index] = "the message says that it is not trained"
            elif stated is None and role not in self.roles:
                reasons[index] = f"the role {role} is not trained"
            elif stated is None and self.last_only and index != last:
                reasons[index] = f"only the last message of the role {role} is trained"
        return reasons


def trained_messages(conversation: Sequence[object], untrained: dict[int, str]) -> list[int]:
    """Indices of the messages without an entry in ``untrained``."""
    return [index for index in range(len(conversation)) if index not in untrained]


THINKING_TAGS: Final = (
    ("<think>", "</think>"),
    ("<thinking>", "</thinking>"),
    ("<thought>", "</thought>"),
    ("<reasoning>", "</reasoning>"),
    ("<seed:think>", "</seed:think>"),
    ("<mm:think>", "</mm:think>"),
    ("[THINK]", "[/THINK]"),
    ("◁think▷", "◁/think▷"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
    ("<think:opensource>", "</think:opensource>"),
    ("<|open|>think<|sep|>", "<|close|>think<|sep|>"),
    ("Here are my reasoning steps:", "[BEGIN FINAL RESPONSE]"),
)
"""Opening and closing tags of thinking at the start of an answer."""

_PROMPT_END: Final = 64
"""Number of characters before an answer in which an opening tag may stand."""
_LINE_ENDS: Final = re.compile(r"\n*")


def trained_parts(
    answer: Answer,
    rendered: Rendered,
    policy: TrainingPolicy,
    marks: AnswerMarks,
    control_tokens: Sequence[Range],
) -> tuple[Range, ...]:
    """The characters of an answer that a policy trains; none where only the stop marker is left.

    Args:
        answer: The answer.
        rendered: The rendered conversation.
        policy: The parts of messages that are trained.
        marks: Text that the template writes before and after an answer.
        control_tokens: Characters of each control token of the answer, in order.
    """
    spans = spans_in(answer, rendered.spans)
    parts = _AnswerParts(answer, rendered.text, spans, marks, control_tokens)
    cuts: list[Range] = []
    if not policy.thinking:
        cuts += parts.thinking()
    if not policy.tool_calls:
        cuts += parts.calls()
    ranges = answer.ranges
    for cut in cuts:
        ranges = tuple(_without(ranges, cut))
    has_content = any(_overlap(span, r) for span in parts.content for r in ranges)
    return ranges if has_content else ()


class _AnswerParts:
    """Ranges of thinking and tool calls in an answer, with the markup around them."""

    def __init__(
        self,
        answer: Answer,
        text: str,
        spans: Sequence[Span],
        marks: AnswerMarks,
        control_tokens: Sequence[Range],
    ) -> None:
        self.content = [span for span in spans if is_part(span, answer.message)]
        self._answer = answer
        self._text = text
        self._marks = marks
        self._control_tokens = control_tokens

    def thinking(self) -> Iterator[Range]:
        """Ranges of the field for thinking with its tags, or of tagged text at the start."""
        fields = list(self._runs(THINKING_FIELDS))
        for _, first, last, end in fields:
            close = self._after_closing_tag(last, end)
            if close is None:
                # The template writes the answer as another message, after a generation prompt.
                prompt = self._marks.generation_prompt
                at = self._text.rfind(prompt, last, end) if prompt.strip() else -1
                close = end if at < 0 else at + len(prompt)
            yield self._opening_tag(first), self._line_ends(close)
        if not fields:
            yield from self._tagged_thinking()

    def _tagged_thinking(self) -> Iterator[Range]:
        start, end = self._answer.start, self._answer.end
        # The generation prompt may hold the opening tag already.
        prompt = self._text[max(0, start - _PROMPT_END) : start].rstrip()
        content_start = self._after_space(self.content[0].start, end) if self.content else start
        for before, after in THINKING_TAGS:
            is_in_prompt = prompt.endswith(before)
            at = (
                start
                if is_in_prompt
                else self._text.find(before, start, content_start + len(before))
            )
            close = self._text.find(after, at, end) if at >= 0 else -1
            if close >= 0:
                yield self._without_space(at), self._line_ends(close + len(after))
                return

    def calls(self) -> Iterator[Range]:
        """Ranges from the end of the content before tool calls to the content after them."""
        for before, first, _, end in self._runs(CALL_FIELDS):
            if before is None:
                yield self._answer.start, end
                continue
            close = self._after_closing_tag(before, first)
            yield self._after_stop(before, first) if close is None else close, end

    def _runs(self, fields: Sequence[str]) -> Iterator[tuple[int | None, int, int, int]]:
        """End of the content before some fields, begin and end of theirs, begin of what follows."""
        wanted = [index for index, span in enumerate(self.content) if _field(span) in fields]
        if wanted:
            first, last = wanted[0], wanted[-1]
            rest = self.content[last + 1 :]
            before = self.content[first - 1].end if first else None
            end = rest[0].start if rest else self._stop()
            yield before, self.content[first].start, self.content[last].end, end

    def _opening_tag(self, start: int) -> int:
        """Begin of the tag that opens the thinking at ``start``, else of the answer."""
        for before, _ in THINKING_TAGS:
            at = self._text.rfind(before, self._answer.start, start)
            if at >= 0:
                return self._without_space(at)
        return self._answer.start

    def _without_space(self, start: int) -> int:
        """The start of the answer if nothing but white space is before ``start``."""
        is_first = not self._text[self._answer.start : start].strip()
        return self._answer.start if is_first else start

    def _after_closing_tag(self, start: int, end: int) -> int | None:
        """End of the tag that closes thinking, if only white space is before it."""
        start = self._after_space(start, end)
        tags = [after for _, after in THINKING_TAGS if self._text.startswith(after, start, end)]
        return start + len(tags[0]) if tags else None

    def _after_stop(self, start: int, end: int) -> int:
        """End of the beginning of the stop marker at ``start``, in whole control tokens."""
        pairs = zip(self._marks.stop or "", self._text[start:end], strict=False)
        common = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        ends = (stop for _, stop in self._control_tokens if start < stop <= start + common)
        return max(ends, default=start)

    def _stop(self) -> int:
        """Begin of the stop marker, after the content of the message."""
        content_end, end = self.content[-1].end, self._answer.end
        stop = self._marks.stop
        if stop and self._text.endswith(stop, content_end, end):
            return end - len(stop)
        return max(
            (start for start, _ in self._control_tokens if start >= content_end), default=end
        )

    def _after_space(self, start: int, end: int) -> int:
        while start < end and self._text[start].isspace():
            start += 1
        return start

    def _line_ends(self, start: int) -> int:
        line_ends = _LINE_ENDS.match(self._text, start, self._answer.end)
        return start if line_ends is None else line_ends.end()


def _field(span: Span) -> str:
    """``tool_calls`` of ``tool_calls[0].function.name``."""
    return re.split(r"[.\[]", span.provenance.field, maxsplit=1)[0]


def _without(ranges: Sequence[Range], cut: Range) -> Iterator[Range]:
    for start, end in ranges:
        if start < min(end, cut[0]):
            yield start, min(end, cut[0])
        if max(start, cut[1]) < end:
            yield max(start, cut[1]), end


def _overlap(span: Span, characters: Range) -> bool:
    return span.start < characters[1] and characters[0] < span.end
