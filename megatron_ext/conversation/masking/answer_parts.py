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
    """What of a conversation is trained.

    A message's own ``"train"``, true or false, wins over ``roles`` and ``last_only``.
    """

    roles: frozenset[str] = frozenset({"assistant"})
    """Whose messages are trained."""
    last_only: bool = False
    """Of these messages only the last is."""
    thinking: bool = True
    """A trained message's thinking is trained: its field for that, or what stands between the tags
    at its start."""
    tool_calls: bool = True
    """A trained message's tool calls are trained."""

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
        """Why each message is not trained that is not, by index."""
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
    """Indices of the messages for whose not being trained there is no reason."""
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
"""What models write before and after thinking at the start of an answer."""

_PROMPT_END: Final = 64
"""Characters before an answer in which a tag may stand."""
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
        answer: What a message says.
        rendered: The conversation.
        policy: What is trained of it.
        marks: What the template writes before and after an answer.
        control_tokens: Characters of each control token of the answer, in order.
    """
    if policy.thinking and policy.tool_calls:
        return answer.ranges
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
    is_said = any(_overlap(span, r) for span in parts.own for r in ranges)
    return ranges if is_said else ()


class _AnswerParts:
    """Where thinking and tool calls are in an answer, with what the template writes around them."""

    def __init__(
        self,
        answer: Answer,
        text: str,
        spans: Sequence[Span],
        marks: AnswerMarks,
        control_tokens: Sequence[Range],
    ) -> None:
        self.own = [span for span in spans if is_part(span, answer.message)]
        self._answer = answer
        self._text = text
        self._marks = marks
        self._control_tokens = control_tokens

    def thinking(self) -> Iterator[Range]:
        """What the field for thinking says with its tags, or what tags enclose at the start."""
        fields = list(self._runs(THINKING_FIELDS))
        for _, first, last, end in fields:
            close = self._after_closing_tag(last, end)
            if close is None:
                # The model asks itself for another message, with the answer.
                prompt = self._marks.generation_prompt
                at = self._text.rfind(prompt, last, end) if prompt.strip() else -1
                close = end if at < 0 else at + len(prompt)
            yield self._opening_tag(first), self._line_ends(close)
        if not fields:
            yield from self._tagged_thinking()

    def _tagged_thinking(self) -> Iterator[Range]:
        start, end = self._answer.start, self._answer.end
        # A generation prompt may hold the first tag already.
        prompt = self._text[max(0, start - _PROMPT_END) : start].rstrip()
        said = self._after_space(self.own[0].start, end) if self.own else start
        for before, after in THINKING_TAGS:
            is_asked = prompt.endswith(before)
            at = start if is_asked else self._text.find(before, start, said + len(before))
            close = self._text.find(after, at, end) if at >= 0 else -1
            if close >= 0:
                yield self._without_space(at), self._line_ends(close + len(after))
                return

    def calls(self) -> Iterator[Range]:
        """From the end of what is said before tool calls to the start of what is said after."""
        for before, first, _, end in self._runs(CALL_FIELDS):
            if before is None:
                yield self._answer.start, end
                continue
            close = self._after_closing_tag(before, first)
            yield self._after_stop(before, first) if close is None else close, end

    def _runs(self, fields: Sequence[str]) -> Iterator[tuple[int | None, int, int, int]]:
        """Where the text before some fields ends, theirs begins and ends, what follows begins."""
        wanted = [index for index, span in enumerate(self.own) if _field(span) in fields]
        if wanted:
            first, last = wanted[0], wanted[-1]
            rest = self.own[last + 1 :]
            before = self.own[first - 1].end if first else None
            end = rest[0].start if rest else self._stop()
            yield before, self.own[first].start, self.own[last].end, end

    def _opening_tag(self, start: int) -> int:
        """Where the tag begins that opens the thinking at ``start``, or else the answer."""
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
        """Where the tag ends that closes thinking, if nothing but white space is before it."""
        start = self._after_space(start, end)
        tags = [after for _, after in THINKING_TAGS if self._text.startswith(after, start, end)]
        return start + len(tags[0]) if tags else None

    def _after_stop(self, start: int, end: int) -> int:
        """Where as much ends of the stop marker as stands at ``start``, in whole control tokens."""
        pairs = zip(self._marks.stop or "", self._text[start:end], strict=False)
        common = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        ends = (stop for _, stop in self._control_tokens if start < stop <= start + common)
        return max(ends, default=start)

    def _stop(self) -> int:
        """Where the stop marker begins: after all that the message says."""
        said, end = self.own[-1].end, self._answer.end
        stop = self._marks.stop
        if stop and self._text.endswith(stop, said, end):
            return end - len(stop)
        return max((start for start, _ in self._control_tokens if start >= said), default=end)

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
