"""Where the answers are in a rendered conversation: the characters that are trained."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from megatron_ext.conversation.provenance import Rendered, Span

Range = tuple[int, int]
"""Half-open."""

_HEADER_FIELDS: Final = ("role", "name")
"""Fields of a message that templates write before an answer, not into it."""


def generated_ranges(rendered: Rendered) -> list[Range]:
    """Characters in the ``{% generation %}`` blocks of the template."""
    return joined((s.start, s.end) for s in rendered.spans if s.provenance.is_generated)


def answered_messages(
    spans: Sequence[Span], trained: Sequence[Range], roles: Mapping[int, str]
) -> set[int]:
    """Indices of the assistant messages from which trained characters come."""
    answered: set[int] = set()
    ranges = iter(trained)
    start, end = next(ranges, (0, 0))
    for span in spans:
        while end <= span.start and end:
            start, end = next(ranges, (0, 0))
        if start < span.end and span.start < end and is_answer(span, roles):
            assert span.provenance.message is not None
            answered.add(span.provenance.message)
    return answered


def is_answer(span: Span, roles: Mapping[int, str]) -> bool:
    """Whether the characters come from an assistant message, and are not in another's turn."""
    provenance = span.provenance
    return (
        provenance.message is not None
        and roles.get(provenance.message) == "assistant"
        and provenance.field not in _HEADER_FIELDS
        and (provenance.turn is None or roles.get(provenance.turn) == "assistant")
    )


class AnswerFinder:
    """Finds the answers where the template does not mark them with ``{% generation %}``.

    An answer begins after the generation prompt, or at the first character that comes from the
    assistant message. It goes on through the rest of that message's turn in the template's loop,
    the stop marker included. Where no control token stands there, the one that the next turn begins
    with is the stop marker: some templates end a turn in the next, or with the next. Where a
    template has no loop over messages there are no turns: the answer then ends with the first
    control token after its content and the white space after that.

    Args:
        rendered: The conversation.
        roles: Role of each message by index.
        generation_prompt: What the template writes for the assistant to go on from; may be empty.
        ends_with_prompt: The conversation was rendered with it at the end.
        control_tokens: Characters of each control token, in order.
    """

    def __init__(
        self,
        rendered: Rendered,
        roles: Mapping[int, str],
        *,
        generation_prompt: str,
        ends_with_prompt: bool,
        control_tokens: Sequence[Range],
    ) -> None:
        self._text = rendered.text
        self._spans = rendered.spans
        self._roles = roles
        self._prompt = generation_prompt
        # Some templates write the prompt within the last message's turn.
        has_prompt = ends_with_prompt and rendered.text.endswith(generation_prompt)
        self._end = len(rendered.text) - len(generation_prompt) * has_prompt
        self._control_tokens = control_tokens

    def ranges(self) -> list[Range]:
        """Characters of all answers, in order and apart."""
        found: list[Range] = []
        answer: Span | None = None
        for index, span in enumerate(self._spans):
            if is_answer(span, self._roles):
                if answer is None or not _goes_on(answer, span):
                    begin = self._begin(index)
                elif answer.provenance.turn is None:
                    # What stands between two fields of a message was no stop marker after all.
                    begin = found[-1][1]
                else:
                    begin = span.start
                found.append((begin, span.end))
                answer = span
            elif answer is None:
                continue
            elif answer.provenance.turn is None:
                if span.is_template:
                    found.append((span.start, self._stop_end(span)))
                else:
                    answer = None
            elif answer.provenance.turn != span.provenance.turn:
                if span.is_template and self._control_token(answer.end, found[-1][1]) is None:
                    found.append((span.start, self._borrowed_stop_end(span)))
                answer = None
            elif span.is_template or self._is_header(span, answer):
                found.append((span.start, span.end))
        return joined((start, min(end, self._end)) for start, end in found)

    def _begin(self, index: int) -> int:
        """Where the answer begins whose first content is the span at ``index``."""
        content = self._spans[index]
        start = content.start
        for at in range(index - 1, -1, -1):
            span = self._spans[at]
            in_turn = content.provenance.turn in (None, span.provenance.turn)
            if not in_turn or not (span.is_template or self._is_header(span, content)):
                break
            start = span.start
        at = self._text.rfind(self._prompt, start, content.start) if self._prompt.strip() else -1
        return content.start if at < 0 else at + len(self._prompt)

    def _is_header(self, span: Span, content: Span) -> bool:
        same = span.provenance.message == content.provenance.message
        return same and span.provenance.field in _HEADER_FIELDS

    def _stop_end(self, span: Span) -> int:
        """Where the stop marker ends that template text holds; its start if there is none."""
        token = self._control_token(span.start, span.end)
        if token is None:
            return span.start
        end = token[1]
        while end < span.end and self._text[end].isspace():
            end += 1
        return end

    def _borrowed_stop_end(self, span: Span) -> int:
        """Where the control token ends that the next turn begins with; the start if with none."""
        token = self._control_token(span.start, span.end)
        if token is None or self._text[span.start : token[0]].strip():
            return span.start
        return token[1]

    def _control_token(self, start: int, end: int) -> Range | None:
        """The first control token in ``[start, end)``."""
        index = bisect_left(self._control_tokens, (start, start))
        token = next(iter(self._control_tokens[index : index + 1]), None)
        return token if token is not None and token[1] <= end else None


def joined(ranges: Iterable[Range]) -> list[Range]:
    """``ranges``, which are in order, with neighbours as one and empty ones left out."""
    apart: list[Range] = []
    for start, end in ranges:
        if start >= end:
            continue
        if apart and start <= apart[-1][1]:
            apart[-1] = (apart[-1][0], max(end, apart[-1][1]))
        else:
            apart.append((start, end))
    return apart


def _goes_on(answer: Span, span: Span) -> bool:
    """Whether ``span`` belongs to the answer that ``answer`` is a part of."""
    if answer.provenance.turn is None:
        return span.provenance.turn is None and answer.provenance.message == span.provenance.message
    return answer.provenance.turn == span.provenance.turn
