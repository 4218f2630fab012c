"""Answers in a rendered conversation: the characters that a model is to generate."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Final

from megatron_ext.conversation.masking.answer_marks import AnswerMarks, header_end
from megatron_ext.conversation.rendering.provenance import Rendered, Span

Range = tuple[int, int]
"""Half-open."""

_HEADER_FIELDS: Final = ("role", "name", "author", "recipient")
"""Fields of a message that templates write before an answer, not into it."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What one message says in a rendered conversation."""

    message: int
    """Index of the message."""
    ranges: tuple[Range, ...]
    """Characters of it, in order and apart: its text, what the template writes between, and the
    stop marker."""

    @property
    def start(self) -> int:
        """Its first character."""
        return self.ranges[0][0]

    @property
    def end(self) -> int:
        """The character after its last."""
        return self.ranges[-1][1]


def generated_answers(rendered: Rendered, speakers: Mapping[int, str]) -> list[Answer]:
    """Answers of a template that marks them with ``{% generation %}``, in order.

    Text of a block belongs to the message that it comes from, or else in whose turn it stands; it
    is no answer if that is no speaker's. Text of the template outside of turns goes with the
    speaker before it, or after it.

    Args:
        rendered: The conversation.
        speakers: Role of each message that may be an answer, by index.
    """
    pieces: list[tuple[int | None, int, int]] = []
    for start, end, (_, message, _, turn, is_generated) in rendered.spans:
        known = turn if message is None else message
        if is_generated and (known is None or known in speakers):
            pieces.append((known, start, end))
    owner = next((message for message, _, _ in pieces if message is not None), None)
    owned: list[tuple[int, int, int]] = []
    for message, start, end in pieces:
        owner = owner if message is None else message
        if owner is not None:
            owned.append((owner, start, end))
    return _by_message(owned)


def is_answer(span: Span, speakers: Mapping[int, str]) -> bool:
    """Whether the characters come from a speaker's message, and are not in another's turn.

    Args:
        span: Characters.
        speakers: Role of each message that may be an answer, by index.
    """
    provenance = span.provenance
    return (
        provenance.message in speakers
        and provenance.field not in _HEADER_FIELDS
        and (provenance.turn is None or provenance.turn in speakers)
    )


class AnswerFinder:
    """Finds the answers where the template does not mark them with ``{% generation %}``.

    An answer begins after its header, of which ``header_end`` says where it ends; that of another
    role than the assistant's with its content. It goes on through the rest of that message's turn
    in the template's loop, the stop marker included. Where the template ends turns with no control
    token, the one that the next turn begins with is the stop marker: some templates end a turn in
    the next, or with the next. Where a template has no loop over messages there are no turns: the
    answer then ends with the first control token after its content and the white space after that.

    Args:
        rendered: The conversation.
        speakers: Role of each message that may be an answer, by index.
        marks: What the template writes before and after an answer.
        ends_turns: The template ends an answer's turn with a control token; None if unknown.
        ends_with_prompt: The conversation was rendered with the generation prompt at the end.
        control_tokens: Characters of each control token, in order.
    """

    def __init__(
        self,
        rendered: Rendered,
        speakers: Mapping[int, str],
        *,
        marks: AnswerMarks,
        ends_turns: bool | None,
        ends_with_prompt: bool,
        control_tokens: Sequence[Range],
    ) -> None:
        self._text = rendered.text
        self._spans = rendered.spans
        self._speakers = speakers
        self._marks = marks
        self._ends_turns = ends_turns
        # Some templates write the prompt within the last message's turn.
        prompt = marks.generation_prompt
        has_prompt = ends_with_prompt and rendered.text.endswith(prompt)
        self._end = len(rendered.text) - len(prompt) * has_prompt
        self._control_tokens = control_tokens
        self._control_ends = frozenset(end for _, end in control_tokens)
        self._quoted = frozenset(_quoted(rendered.spans))

    def answers(self) -> list[Answer]:
        """All answers, in order."""
        found: list[tuple[int, int, int]] = []
        answer: Span | None = None
        message = -1
        for index, span in enumerate(self._spans):
            if is_answer(span, self._speakers) and index not in self._quoted:
                if answer is None or not _goes_on(answer, span):
                    begin = self._begin(index)
                elif answer.provenance.turn is None:
                    # What stands between two fields of a message was no stop marker after all.
                    begin = found[-1][2]
                else:
                    begin = span.start
                answer = span
                assert span.provenance.message is not None
                message = span.provenance.message
                found.append((message, begin, span.end))
            elif answer is None:
                continue
            elif answer.provenance.turn is None:
                if span.is_template:
                    found.append((message, span.start, self._stop_end(span)))
                else:
                    answer = None
            elif answer.provenance.turn != span.provenance.turn:
                if span.is_template and self._borrows(answer.end, found[-1][2]):
                    found.append((message, span.start, self._borrowed_stop_end(span)))
                answer = None
            elif span.is_template or self._is_header(span, answer):
                found.append((message, span.start, span.end))
        answers = _by_message((m, start, min(end, self._end)) for m, start, end in found)
        return [self._without_next_header(answer) for answer in answers]

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
        assert content.provenance.message is not None
        if self._speakers[content.provenance.message] != "assistant":
            return content.start
        ends = self._control_ends.__contains__
        begin = header_end(self._text, start, content, self._marks, ends)
        header = self._spans[bisect_left(self._spans, (begin + 1,)) - 1 : index]
        # A role or a name is no part of an answer, nor is what stands before it.
        return content.start if any(self._is_header(span, content) for span in header) else begin

    def _without_next_header(self, answer: Answer) -> Answer:
        """An answer that ends before the header of another one, if its turn has that at its end."""
        own = [s.end for s in spans_in(answer, self._spans) if is_part(s, answer.message)]
        said = max(own, default=answer.start)
        first = bisect_left(self._control_tokens, (said, said))
        last = bisect_left(self._control_tokens, (answer.end, answer.end))
        names = [self._text[start:end] for start, end in self._control_tokens[first:last]]
        prompt = self._marks.generation_prompt.lstrip()
        # Before a header there is a stop marker, even if that is the same; behind it is none.
        for number in range(1, len(names)):
            if prompt.startswith(names[number]) and names[number - 1] not in names[number:]:
                end, _ = self._control_tokens[first + number]
                ranges = joined((begin, min(stop, end)) for begin, stop in answer.ranges)
                return Answer(answer.message, tuple(ranges))
        return answer

    def _is_header(self, span: Span, content: Span) -> bool:
        same = span.provenance.message == content.provenance.message
        return same and span.provenance.field in _HEADER_FIELDS

    def _stop_end(self, span: Span) -> int:
        """Where the stop marker ends that template text holds; its start if there is none.

        Without turns that is the first control token, unless other answers end with another.
        """
        known = (self._marks.stop or "").strip()
        at = self._text.find(known, span.start, span.end) if known else -1
        token = self._control_token(span.start, span.end)
        if at < 0 and token is None:
            return span.start
        end = at + len(known) if token is None or at >= 0 else token[1]
        while end < span.end and self._text[end].isspace():
            end += 1
        return end

    def _borrows(self, content_end: int, turn_end: int) -> bool:
        """Whether the next turn begins with the stop marker of one that ends at ``turn_end``."""
        if self._ends_turns is None:
            return self._control_token(content_end, turn_end) is None
        return not self._ends_turns

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


def is_part(span: Span, message: int) -> bool:
    """Whether the characters come from what a message says: not from its role or its name."""
    provenance = span.provenance
    return provenance.message == message and provenance.field not in _HEADER_FIELDS


def answered_messages(answers: Iterable[Answer], spans: Sequence[Span]) -> set[int]:
    """Indices of the messages of which their answers show something.

    Args:
        answers: In order.
        spans: Of the rendered conversation.
    """
    shown: set[int] = set()
    at = 0
    for answer in answers:
        # Answers may overlap: the next one is looked for from where this one begins.
        start, end = answer.start, answer.end
        while spans[at].end <= start:
            at += 1
        index = at
        while index < len(spans) and spans[index].start < end:
            if is_part(spans[index], answer.message):
                shown.add(answer.message)
                break
            index += 1
    return shown


def spans_in(answer: Answer, spans: Sequence[Span]) -> Sequence[Span]:
    """The spans of which something is in an answer, or in between its ranges."""
    # Spans have no gaps, and a tuple of its start alone comes right before a span.
    first = bisect_left(spans, (answer.start + 1,)) - 1
    return spans[first : bisect_left(spans, (answer.end,))]


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


def _by_message(pieces: Iterable[tuple[int, int, int]]) -> list[Answer]:
    """An answer of each run of pieces, (message, start, end), that belong to one message."""
    answers: list[Answer] = []
    for message, group in groupby(pieces, key=lambda piece: piece[0]):
        ranges = joined((start, end) for _, start, end in group)
        if ranges:
            answers.append(Answer(message, tuple(ranges)))
    return answers


def _quoted(spans: Sequence[Span]) -> Iterator[int]:
    """Indices of spans of turns within another turn: some templates look a tool's name up there."""
    turns = [turn for _, _, (_, _, _, turn, _) in spans]
    begins = [at for at, turn in enumerate(turns) if at == 0 or turn != turns[at - 1]]
    for before, begin, after in zip(begins, begins[1:], begins[2:], strict=False):
        if turns[before] is not None and turns[before] == turns[after]:
            yield from range(begin, after)


def _goes_on(answer: Span, span: Span) -> bool:
    """Whether ``span`` belongs to the answer that ``answer`` is a part of."""
    if answer.provenance.turn is None:
        return span.provenance.turn is None and answer.provenance.message == span.provenance.message
    return answer.provenance.turn == span.provenance.turn
