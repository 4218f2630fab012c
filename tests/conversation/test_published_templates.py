"""Templates of published models render as Jinja renders them, and every answer keeps its source."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from jinja2.exceptions import TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import CallBlock, Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from megatron_ext.conversation import render
from megatron_ext.errors import ConversationError
from tests.conversation.shared_files import SHARED, needs_shared

TEMPLATES = sorted((SHARED / "chat_templates").glob("*.jinja"))
SPECIAL_TOKENS = {
    "bos_token": "<s>",
    "eos_token": "</s>",
    "pad_token": "<pad>",
    "unk_token": "<unk>",
}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Tells the weather <|im_end|>.",
            "parameters": {
                "type": "object",
                "description": "What to look at",
                "properties": {"city": {"type": "string", "description": "Where"}},
                "required": ["city"],
            },
        },
    }
]
CALL = {
    "id": "abcdefghi",
    "type": "function",
    "function": {"name": "weather", "arguments": {"city": "Łódź", "days": 3}},
}
CONVERSATIONS: dict[str, tuple[list[dict[str, Any]], dict[str, Any]]] = {
    "question": (
        [
            {"role": "user", "content": "  Grüße <|im_end|>\n"},
            {"role": "assistant", "content": "Zufrieden"},
        ],
        {},
    ),
    "turns": (
        [
            {"role": "system", "content": "Obsequious"},
            {"role": "user", "content": "Quixotic?"},
            {"role": "assistant", "content": "<think>\nMusing\n</think>\n\nPerhaps\n"},
            {"role": "user", "content": "再见"},
            {"role": "assistant", "content": "再会!"},
        ],
        {"add_generation_prompt": True},
    ),
    "tools": (
        [
            {"role": "user", "content": "Warm?"},
            {"role": "assistant", "content": "", "reasoning_content": "x", "tool_calls": [CALL]},
            {
                "role": "tool",
                "content": '{"t": 21}',
                "name": "weather",
                "tool_call_id": "abcdefghi",
            },
            {"role": "assistant", "content": "Balmy.", "reasoning_content": "y"},
        ],
        {"tools": TOOLS},
    ),
}


class Generation(Extension):
    """A ``{% generation %}`` block that does nothing but print its content."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return CallBlock(self.call_method("_same"), [], [], body).set_lineno(line)

    def _same(self, caller: Any) -> str:
        return str(caller())


def as_jinja_does(source: str, messages: Any, variables: dict[str, Any]) -> str | Exception:
    """The render of an environment without provenance, set up as transformers sets it up."""

    def refuse(message: str) -> None:
        raise TemplateError(message)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, Generation]
    )
    environment.filters["tojson"] = lambda value, ensure_ascii=False, **options: json.dumps(
        value, ensure_ascii=ensure_ascii, **options
    )
    environment.globals.update(raise_exception=refuse, strftime_now=lambda form: "20 Nov 2026")
    template = environment.from_string(source)
    try:
        known = {"tools": None, "documents": None, **SPECIAL_TOKENS, **variables}
        return template.render(messages=messages, **known)
    except Exception as error:
        return error


def texts(values: Iterable[Any]) -> Iterable[str]:
    for value in values:
        if isinstance(value, str):
            yield value
        elif isinstance(value, dict):
            yield from texts(value.values())
        elif isinstance(value, list):
            yield from texts(value)


@needs_shared
@pytest.mark.parametrize("case", CONVERSATIONS)
@pytest.mark.parametrize("path", TEMPLATES, ids=lambda path: path.stem)
def test_a_published_template_renders_alike_and_content_keeps_its_source(
    path: Path, case: str
) -> None:
    source = path.read_text(encoding="utf-8")
    messages, variables = CONVERSATIONS[case]
    variables = {"add_generation_prompt": False, **variables}
    # The date is a variable of some templates and a function to others.
    variables |= {"date_string": "20 Nov 2026", "strftime_now": lambda form: "20 Nov 2026"}
    expected = as_jinja_does(source, messages, variables)
    if isinstance(expected, Exception):
        with pytest.raises(ConversationError) as caught:
            render(source, messages, special_tokens=SPECIAL_TOKENS, variables=variables)
        assert type(caught.value.__cause__) is type(expected)
        return
    rendered = render(source, messages, special_tokens=SPECIAL_TOKENS, variables=variables)
    assert rendered.text == expected
    own = "".join(
        rendered.text[span.start : span.end] for span in rendered.spans if span.is_template
    )
    for word in ("Grüße", "Zufrieden", "Obsequious", "Quixotic", "Musing", "再会", "Łódź", "Balmy"):
        assert word not in own
    for span in rendered.spans:
        index = span.provenance.message
        if index is None or span.provenance.field == "role":
            continue
        text = rendered.text[span.start : span.end]
        known = "".join(texts(messages[index].values())) + json.dumps(messages[index])
        assert all(word in known for word in text.replace('"', " ").split() if word.isalpha())
