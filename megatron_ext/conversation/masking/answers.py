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
"""Fields of a message that templates write into the header of an answer."""


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer of one message in a rendered conversation."""

    message: int
    """Index of the message."""
    ranges: tuple[Range, ...]
    """Ranges of characters, ascending and disjoint: its content, template text in between, and the
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
    is no answer unless that is a speaker's. Template text outside of turns belongs to the speaker
    before it, or else after it.

    Args:
        rendered: The rendered conversation.
        speakers: Role of each message that may be an answer, by index.
    """
    pieces: list[tuple[int | None, int, int]] = []
    for start, end, (_, message, _, turn, is_generated) in rendered.spans:
        message_index = turn if message is None else message
        if is_generated and (message_index is None or message_index in speakers):
            pieces.append((message_index, start, end))
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
        span: The characters.
        speakers: Role of each message that may be an answer, by index.
    """
    provenance = span.provenance
    return (
        provenance.message in speakers
        and provenance.field not in _HEADER_FIELDS
        and (provenance.turn is None or provenance.turn in speakers)
    )


@dataclass(frozen=True)
class AnswerContext:
    """Facts about a rendered conversation that its answers depend on."""

    marks: AnswerMarks
    ends_turns: bool | None
    """The template ends an answer's turn with a control token; None if unknown."""
    ends_with_prompt: bool
    """The generation prompt stands at the end."""
    control_tokens: Sequence[Range]
    """Range of characters of each control token, in order."""


class AnswerFinder:
    """Finds the answers where the template does not mark them with ``{% generation %}``.

    An answer begins after its header (``header_end``), or with its content for other roles than the
    assistant. It extends to the end of the message's turn in the template's loop, with the stop
    marker. Where the template ends turns without a control token, the one at the start of the next
    turn is the stop marker. A template without a loop over messages has no turns: the answer then
    ends with the first control token after its content and the white space after that.

    Args:
        rendered: The rendered conversation.
        speakers: Role of each message that may be an answer, by index.
        context: Marks and control tokens of the text.
    """

    def __init__(
        self, rendered: Rendered, speakers: Mapping[int, str], context: AnswerContext
    ) -> None:
        self._text = rendered.text
        self._spans = rendered.spans
        self._speakers = speakers
        self._marks = context.marks
        self._ends_turns = context.ends_turns
        # Some templates write the prompt within the last message's turn.
        prompt = context.marks.generation_prompt
        has_prompt = context.ends_with_prompt and rendered.text.endswith(prompt)
        self._end = len(rendered.text) - len(prompt) * has_prompt
        self._control_tokens = context.control_tokens
        self._control_ends = frozenset(end for _, end in context.control_tokens)
        self._quoted = frozenset(_quoted(rendered.spans))

    def answers(self) -> list[Answer]:
        """All answers, in order."""
        pieces: list[tuple[int, int, int]] = []
        answer: Span | None = None
        message = -1
        for index, span in enumerate(self._spans):
            if is_answer(span, self._speakers) and index not in self._quoted:
                if answer is None or not _goes_on(answer, span):
                    begin = self._begin(index)
                elif answer.provenance.turn is None:
                    # Text between two fields of a message was not a stop marker after all.
                    begin = pieces[-1][2]
                else:
                    begin = span.start
                answer = span
                assert span.provenance.message is not None
                message = span.provenance.message
                pieces.append((message, begin, span.end))
            elif answer is None:
                continue
            elif answer.provenance.turn is None:
                if span.is_template:
                    pieces.append((message, span.start, self._stop_end(span)))
                else:
                    answer = None
            elif answer.provenance.turn != span.provenance.turn:
                if span.is_template and self._borrows(answer.end, pieces[-1][2]):
                    pieces.append((message, span.start, self._borrowed_stop_end(span)))
                answer = None
            elif span.is_template or self._is_header(span, answer):
                pieces.append((message, span.start, span.end))
        answers = _by_message((m, start, min(end, self._end)) for m, start, end in pieces)
        return [self._without_next_header(answer) for answer in answers]

    def _begin(self, index: int) -> int:
        """Begin of the answer whose first content is the span at ``index``."""
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
        # A role or a name, and what stands before it, is not part of an answer.
        return content.start if any(self._is_header(span, content) for span in header) else begin

    def _without_next_header(self, answer: Answer) -> Answer:
        """The answer without the header of another one at the end of its turn."""
        ends = [s.end for s in spans_in(answer, self._spans) if is_part(s, answer.message)]
        content_end = max(ends, default=answer.start)
        first = bisect_left(self._control_tokens, (content_end, content_end))
        last = bisect_left(self._control_tokens, (answer.end, answer.end))
        names = [self._text[start:end] for start, end in self._control_tokens[first:last]]
        prompt = self._marks.generation_prompt.lstrip()
        # A header has a stop marker before it, maybe with the same name, and none behind it.
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
        """End of the stop marker in template text; the start of the text if there is none.

        Without turns that is the first control token, unless other answers end with another.
        """
        stop = (self._marks.stop or "").strip()
        at = self._text.find(stop, span.start, span.end) if stop else -1
        token = self._control_token(span.start, span.end)
        if at < 0 and token is None:
            return span.start
        end = at + len(stop) if token is None or at >= 0 else token[1]
        while end < span.end and self._text[end].isspace():
            end += 1
        return end

    def _borrows(self, content_end: int, turn_end: int) -> bool:
        """Whether the turn that ends at ``turn_end`` has its stop marker in the next turn."""
        if self._ends_turns is None:
            return self._control_token(content_end, turn_end) is None
        return not self._ends_turns

    def _borrowed_stop_end(self, span: Span) -> int:
        """End of the control token at the start of the next turn; its start if there is none."""
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
    """Whether the characters come from a message, other than from its role or name."""
    provenance = span.provenance
    return provenance.message == message and provenance.field not in _HEADER_FIELDS


def answered_messages(answers: Iterable[Answer], spans: Sequence[Span]) -> set[int]:
    """Indices of the messages whose answers show some of their content.

    Args:
        answers: The answers, in order.
        spans: Spans of the rendered conversation.
    """
    shown: set[int] = set()
    at = 0
    for answer in answers:
        # Answers may overlap: the search for the next one starts where this one begins.
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
    """The spans that overlap an answer, from its start to its end."""
    # Spans have no gaps, and the tuple of a start alone sorts right before its span.
    first = bisect_left(spans, (answer.start + 1,)) - 1
    return spans[first : bisect_left(spans, (answer.end,))]


def joined(ranges: Iterable[Range]) -> list[Range]:
    """Ascending ``ranges`` with touching ones merged and empty ones left out."""
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
    """One answer for each run of pieces, (message, start, end), of one message."""
    answers: list[Answer] = []
    for message, group in groupby(pieces, key=lambda piece: piece[0]):
        ranges = joined((start, end) for _, start, end in group)
        if ranges:
            answers.append(Answer(message, tuple(ranges)))
    return answers


def _quoted(spans: Sequence[Span]) -> Iterator[int]:
    """Indices of spans of a turn within another: some templates look up a tool's name there."""
    turns = [turn for _, _, (_, _, _, turn, _) in spans]
    begins = [at for at, turn in enumerate(turns) if at == 0 or turn != turns[at - 1]]
    for before, begin, after in zip(begins, begins[1:], begins[2:], strict=False):
        if turns[before] is not None and turns[before] == turns[after]:
            yield from range(begin, after)


def _goes_on(answer: Span, span: Span) -> bool:
    """Whether ``span`` continues the answer that ``answer`` is a span of."""
    if answer.provenance.turn is None:
        return span.provenance.turn is None and answer.provenance.message == span.provenance.message
    return answer.provenance.turn == span.provenance.turn
