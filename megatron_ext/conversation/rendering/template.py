"""Rendering of a chat template: the text, and the provenance of each character."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from megatron_ext.conversation.message import Conversation, Message, content_text, place
from megatron_ext.conversation.rendering.provenance import TEMPLATE, Provenance, Rendered, Span
from megatron_ext.conversation.rendering.template_limits import TemplateLimitError, bounded
from megatron_ext.conversation.rendering.tracked_data import tracked_copy, tracked_messages
from megatron_ext.conversation.rendering.tracked_text import TrackedText
from megatron_ext.conversation.rendering.turn_joiner import PROGRESS, OpenLoops
from megatron_ext.errors import ConfigError, ConversationError

if TYPE_CHECKING:
    from jinja2 import Template

    from megatron_ext.conversation.rendering.jinja_environment import ProvenanceEnvironment


_ERROR_LENGTH = 200
"""Characters of an error of a template that are shown, each in at most ten."""


def render(
    source: str,
    messages: Conversation,
    *,
    special_tokens: Mapping[str, str],
    variables: Mapping[str, Any],
    first_index: int = 0,
    name: str = "chat template",
    keep_unknown: bool = False,
) -> Rendered:
    """A conversation rendered by a chat template.

    Args:
        source: Jinja source.
        messages: The conversation; copied, never changed.
        special_tokens: ``bos_token`` and so on, which count as text of the template.
        variables: Other variables of the template, such as ``add_generation_prompt``; ``tools`` and
            ``documents`` are None unless given. Their text does not count as the template's and
            makes no control tokens, not even where it replaces a special token.
        first_index: Index of the first message in the caller's conversation.
        name: Name of the template in errors.
        keep_unknown: Accept text of unknown source, as text of no message.

    Raises:
        ConfigError: The source is not a Jinja template.
        ConversationError: The template refuses the conversation, fails, exceeds a limit
            (``template_limits``), or writes text of unknown source; the error names the message.
            ``tools`` are no list of mappings.
    """
    template, has_generation_blocks = compiled(source, name)
    _check_tools(variables.get("tools"))
    progress = OpenLoops()
    scope: dict[str, Any] = {"tools": None, "documents": None}
    for key, value in {**special_tokens, **variables}.items():
        # A record may have a variable of the same name, and must not forge a token with it.
        is_special = key in special_tokens and value == special_tokens[key]
        scope[key] = tracked_copy(
            value, TEMPLATE if is_special else Provenance("variable", field=key)
        )
    scope["messages"] = tracked_messages(messages, first_index)
    scope[PROGRESS] = progress
    try:
        with bounded(scope):
            text = template.render(scope)
    except TemplateLimitError as error:
        raise ConversationError(
            f"the {name} does more than a template needs to for such a conversation",
            got=f"one that {error}",
            fix="use another template",
            where=place(progress.turn),
        ) from error
    except Exception as error:
        # A template is a program: besides Jinja's errors it can raise any that Python has.
        raise ConversationError(
            f"the {name} refuses the conversation",
            got=_start(f"{type(error).__name__}: {error}"),
            where=place(progress.turn),
        ) from error
    assert isinstance(text, TrackedText)
    rendered = Rendered(str.__str__(text), _spans(text), has_generation_blocks)
    _refuse_surrogates(rendered, name)
    if not keep_unknown:
        _refuse_unknown_source(rendered, dict(enumerate(messages, first_index)), name)
    return rendered


def _check_tools(tools: object) -> None:
    """Refuse tools that transformers would refuse, and functions, which it describes itself."""
    if not tools:
        return
    if not isinstance(tools, list | tuple):
        raise ConversationError(
            "the tools are no list", got=type(tools).__name__, expected="a list", where="tools"
        )
    for index, tool in enumerate(tools):
        if not isinstance(tool, Mapping):
            raise ConversationError(
                "a tool is no JSON schema",
                got=type(tool).__name__,
                expected="a mapping",
                fix="describe it by transformers.utils.get_json_schema" if callable(tool) else None,
                where=f"tools[{index}]",
            )


@lru_cache(maxsize=128)
def compiled(source: str, name: str) -> tuple[Template, bool]:
    """The template of a Jinja source, and whether it has ``{% generation %}`` blocks."""
    environment = _environment()
    from jinja2.exceptions import TemplateSyntaxError

    try:
        return environment.from_string(source), _has_generation_blocks(environment, source)
    except TemplateSyntaxError as error:
        raise ConfigError(
            f"the {name} is not a Jinja template",
            got=_start(error.message or ""),
            where=f"line {error.lineno}",
        ) from error


@lru_cache(maxsize=1)
def _environment() -> ProvenanceEnvironment:
    # Jinja is slow to import, and not needed before the first render.
    from megatron_ext.conversation.rendering.jinja_environment import ProvenanceEnvironment

    return ProvenanceEnvironment()


def _has_generation_blocks(environment: ProvenanceEnvironment, source: str) -> bool:
    tokens = [(kind, value) for _, kind, value in environment.lex(source) if kind != "whitespace"]
    return any(
        kind == "block_begin" and name == "generation" for (kind, _), (_, name) in pairwise(tokens)
    )


def _spans(text: TrackedText) -> tuple[Span, ...]:
    spans = []
    end = 0
    for length, provenance in text.runs:
        start, end = end, end + length
        spans.append(tuple.__new__(Span, (start, end, provenance)))
    return tuple(spans)


def _start(text: str) -> str:
    """The first words that a template says itself, for the end of an error."""
    return text if len(text) <= _ERROR_LENGTH else f"{text[:_ERROR_LENGTH]} ..."


def _refuse_surrogates(rendered: Rendered, name: str) -> None:
    """Refuse lone surrogates outside of contents, which are checked before."""
    try:
        rendered.text.encode()
    except UnicodeEncodeError as error:
        at = next(span for span in rendered.spans if span.end > error.start)
        message, field = at.provenance.message, at.provenance.field
        raise ConversationError(
            f"{field or f'the text of the {name}'} holds a lone surrogate",
            got=f"U+{ord(rendered.text[error.start]):04X}",
            expected="text that UTF-8 can hold",
            where=place(at.provenance.turn if message is None else message),
        ) from None


def unknown_messages(rendered: Rendered, messages: Mapping[int, Message]) -> dict[int | None, str]:
    """Text of unknown source, by the message that it probably comes from.

    That is the message in whose turn it was written, else the first with a word of it.
    """
    texts: dict[int | None, str] = {}
    for span in rendered.unknown_spans:
        text = rendered.text[span.start : span.end]
        turn = span.provenance.turn
        texts.setdefault(_likeliest_message(text, messages) if turn is None else turn, text)
    return texts


def _refuse_unknown_source(rendered: Rendered, messages: Mapping[int, Message], name: str) -> None:
    """Refuse text that the template made in a way that hides which message it comes from."""
    for message, text in unknown_messages(rendered, messages).items():
        raise ConversationError(
            f"the {name} changes text so that it cannot be told what is the message's",
            got=repr(text if len(text) <= 60 else f"{text[:57]}..."),
            fix="write the template without the filter or method that does it",
            where=place(message),
        )


def _likeliest_message(text: str, messages: Mapping[int, Message]) -> int | None:
    words = set(text.split())
    for index, message in messages.items():
        if words & set(content_text(message).split()):
            return index
    return None
