"""Text that a template writes before and after answers, found by rendering a few words."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import takewhile
from typing import Any, Final

from megatron_ext.conversation.message import Conversation
from megatron_ext.conversation.rendering.provenance import Rendered, Span
from megatron_ext.conversation.rendering.template import render
from megatron_ext.errors import ConversationError

_QUESTION: Final = {"role": "user", "content": "?"}
_ANSWER: Final = {"role": "assistant", "content": "answer"}
_TOOLS: Final = (
    {
        "type": "function",
        "function": {
            "name": "f",
            "description": "?",
            "parameters": {"type": "object", "properties": {}, "required": []},
        },
    },
)
"""Tools for templates that refuse a conversation without any."""
_CALL: Final = {"id": "000000000", "type": "function", "function": {"name": "f", "arguments": {}}}
_RESULT: Final = {"role": "tool", "content": "?", "name": "f", "tool_call_id": "000000000"}
_CALLED: Final = ({"role": "assistant", "content": "", "tool_calls": [_CALL]}, _RESULT)
_THINKING_SWITCHES: Final = ("enable_thinking", "thinking")
"""Variables that switch thinking in the generation prompt of templates on or off."""

_Items = tuple[tuple[str, Any], ...]


@dataclass(frozen=True, slots=True)
class AnswerMarks:
    """Text that a template writes before and after an answer."""

    generation_prompt: str
    """Text after a question that the assistant continues. Empty where the template has none, or
    refuses a conversation of one question."""
    other_prompts: tuple[str, ...]
    """Generation prompts with thinking switched on or off, longest first: templates may write
    another one in history than for the next answer."""
    headers: tuple[str, ...]
    """Text in an answer's turn before its content, after a question and after a tool message;
    longest first. Empty where that cannot be told: the template has no turns, or refuses such a
    conversation."""
    stop: str | None
    """Text in an answer's turn after its content; None where that cannot be told, as above."""


def answer_marks(
    source: str, *, special_tokens: Mapping[str, str], variables: Mapping[str, Any]
) -> AnswerMarks:
    """The marks of a template, cached for the next conversation.

    Args:
        source: Jinja source.
        special_tokens: ``bos_token`` and so on.
        variables: Other variables of the template; only texts, numbers and booleans are used.
    """
    simple = (item for item in variables.items() if isinstance(item[1], (str, int, float)))
    return _answer_marks(source, tuple(sorted(special_tokens.items())), tuple(sorted(simple)))


@lru_cache(maxsize=256)
def _answer_marks(source: str, special_tokens: _Items, variables: _Items) -> AnswerMarks:
    def shown(messages: Conversation, **more: Any) -> Rendered | None:
        for tools in ({}, {"tools": _TOOLS}):
            try:
                return render(
                    source,
                    messages,
                    special_tokens=dict(special_tokens),
                    variables={"add_generation_prompt": False, **dict(variables), **tools, **more},
                )
            except ConversationError:
                continue
        return None

    def prompt(**switches: bool) -> str:
        question = [_QUESTION]
        return _generation_prompt(
            shown(question, **switches), shown(question, add_generation_prompt=True, **switches)
        )

    unswitched = prompt()
    switched = {prompt(**dict.fromkeys(_THINKING_SWITCHES, is_on)) for is_on in (False, True)}
    answer = shown([_QUESTION, _ANSWER, _QUESTION]) or shown([_QUESTION, _ANSWER])
    header, stop = _around_answer(answer, 1)
    later = shown([_QUESTION, *_CALLED, _ANSWER, _QUESTION])
    headers = {header, _around_answer(later, 3)[0]}
    return AnswerMarks(
        generation_prompt=unswitched,
        other_prompts=_longest_first(switched - {unswitched, ""}),
        headers=_longest_first(text for text in headers if text is not None),
        stop=stop,
    )


def _generation_prompt(without: Rendered | None, with_prompt: Rendered | None) -> str:
    if without is None or with_prompt is None or not with_prompt.text.startswith(without.text):
        return ""
    if without.text != with_prompt.text:
        return with_prompt.text.removeprefix(without.text)
    # Some templates write it always, after the last turn.
    spans = with_prompt.spans
    after = list(takewhile(lambda span: span.provenance.turn is None, reversed(spans)))
    return "" if len(after) == len(spans) else _text(with_prompt, after[::-1])


def _around_answer(rendered: Rendered | None, message: int) -> tuple[str | None, str | None]:
    """Text in the turn of a message before and after its content."""
    spans = () if rendered is None else rendered.spans
    of_message = [span for span in spans if span.provenance.message == message]
    content = [span for span in of_message if span.provenance.field == "content"]
    if rendered is None or not content or content[-1].provenance.turn != message:
        return None, None
    turn = [span for span in spans if span.provenance.turn == message]
    before = [span for span in turn if span.end <= content[0].start]
    after = [span for span in turn if span.start >= content[-1].end]
    return _text(rendered, before), _text(rendered, after)


def _longest_first(texts: Iterable[str]) -> tuple[str, ...]:
    return tuple(sorted(texts, key=len, reverse=True))


def _text(rendered: Rendered, spans: list[Span]) -> str:
    return "".join(rendered.text[span.start : span.end] for span in spans)


_LAST_WORD: Final = re.compile(r"\b[^\W\d_]+[^\w<>|]*$")
"""The last word of a prompt that does not end with markup."""


def header_end(
    text: str,
    start: int,
    content: Span,
    marks: AnswerMarks,
    ends_control_token: Callable[[int], bool],
) -> int:
    """Index at which the header ends in the template text before an answer's content.

    The template writes the header, and the model what follows it up to the content: the markup of a
    tool call, a tag before thinking. The header ends after the first of these that is there: the
    generation prompt, whose end the answer may repeat; another prompt, with thinking switched; a
    prompt that ends in the same words; the longest beginning of the prompt; the header of a plain
    answer.

    Args:
        text: The rendered conversation.
        start: Index at which the template text begins; the start of the turn, if there are turns.
        content: Span of the answer's first content.
        marks: Text that the template writes before and after an answer.
        ends_control_token: Whether a control token ends at a character.
    """
    # The answer may repeat the end of the prompt, but not all of it.
    repeated = min(content.start + len(marks.generation_prompt) - 1, content.end)
    prompts = [(marks.generation_prompt, repeated)]
    prompts += [(prompt, content.start) for prompt in marks.other_prompts]
    for prompt, end in prompts:
        at = text.rfind(prompt, start, end) if prompt.strip() else -1
        if at >= 0:
            return at + len(prompt)
    if _ends_alike(text[start : content.start], marks.generation_prompt):
        return content.start
    for stop in range(content.start, start, -1):
        # A prompt does not end within a control token or a word.
        is_whole = text[stop - 1].isspace() or ends_control_token(stop)
        if is_whole and _ends_in_prompt(text, start, stop, marks.generation_prompt):
            return stop
    for header in marks.headers if content.provenance.turn is not None else ():
        if text.startswith(header, start, content.start):
            return start + len(header)
    return content.start


def _ends_in_prompt(text: str, start: int, stop: int, prompt: str) -> bool:
    """Whether a beginning of ``prompt``, not white space alone, ends at ``stop``."""
    lengths = range(min(stop - start, len(prompt)), 0, -1)
    return any(prompt[:n].strip() and text.endswith(prompt[:n], start, stop) for n in lengths)


def _ends_alike(header: str, prompt: str) -> bool:
    """Whether both end with the same word and what follows it; numbers before it may differ."""
    end = _LAST_WORD.search(prompt)
    return end is not None and header.endswith(end[0])
