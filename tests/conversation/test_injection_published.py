"""Nothing that a message says forges a control token of a published vocabulary or template.

``test_injection`` says what a control token is. Here all names of a vocabulary are tried, and all
published templates; the largest vocabularies only where ``MEGATRON_EXT_ALL_TEXT`` is set.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from megatron_ext.conversation import render
from megatron_ext.errors import ConversationError
from tests.conversation.byte_tokenizer import ByteTokenizer
from tests.conversation.injection_cases import (
    BENIGN,
    ENDS,
    FIELDS,
    cuts,
    encoded,
    forged,
    is_space,
    literal,
    marks_of,
    said_everywhere,
    split_over_places,
)
from tests.conversation.shared_files import SHARED, needs_shared
from tests.conversation.vocabularies import Vocabulary, published_vocabularies
from tests.tokenizers.published import EVERY_STRETCH, LARGE

pytestmark = needs_shared

NAMES = [name for name in published_vocabularies() if EVERY_STRETCH or name not in LARGE]
TEMPLATES = sorted((SHARED / "chat_templates").glob("*.jinja"))
SPECIAL_TOKENS = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}


@pytest.fixture(scope="module", params=NAMES)
def vocabulary(request: pytest.FixtureRequest) -> Vocabulary:
    """A published vocabulary; one at a time, for some take a gigabyte."""
    return published_vocabularies()[request.param]()


def names_of(vocabulary: Vocabulary) -> list[str]:
    return [n for n in (*vocabulary.controls, *vocabulary.user_defined) if not is_space(n)]


def test_no_content_forges_a_control_token(vocabulary: Vocabulary) -> None:
    before, after = marks_of(vocabulary)
    names = names_of(vocabulary)
    alone = f"{{% for m in messages %}}{{{{ {literal(before)} ~ m.content }}}}{{% endfor %}}"
    messages = [{"content": f"{start}{n}{end}"} for n in names for start, end in ENDS[:2]]
    rendered = render(alone, messages, special_tokens={}, variables={})
    assert forged(vocabulary, rendered) == []
    ids, _ = encoded(vocabulary, rendered)
    assert ids.tolist().count(vocabulary.controls[before]) == len(messages)
    fields = FIELDS.replace("OPEN", literal(before)).replace("CLOSE", literal(after))
    for text in ("".join(names[-40:]), " ".join(names[:40])):
        messages, tools = said_everywhere(text)
        rendered = render(fields, messages, special_tokens={}, variables={"tools": tools})
        assert forged(vocabulary, rendered) == []


def test_halves_of_a_name_in_two_places_do_not_make_it(vocabulary: Vocabulary) -> None:
    halves = [(n[:at], n[at:]) for n in names_of(vocabulary)[-300:] for at in cuts(n)]
    for source, messages in split_over_places(halves):
        rendered = render(source, messages, special_tokens={}, variables={})
        assert forged(vocabulary, rendered) == []


def test_benign_content_has_the_ids_of_the_original_library(vocabulary: Vocabulary) -> None:
    before, after = marks_of(vocabulary)
    bare = (
        f"{{% for m in messages %}}{{{{ {literal(before)} ~ m.role ~ '\n' ~ m.content ~ "
        f"{literal(after)} ~ '\n' }}}}{{% endfor %}}"
    )
    messages = [
        {"role": role, "content": text} for text in BENIGN for role in ("user", "assistant")
    ]
    tokenizer = vocabulary.tokenizer
    for template in filter(None, (bare, tokenizer.chat_template)):
        rendered = render(
            template,
            messages,
            special_tokens=tokenizer.special_token_names,
            variables={"add_generation_prompt": True},
        )
        ids = encoded(vocabulary, rendered)[0].tolist()
        assert ids == vocabulary.library_ids(rendered.text)
        # A token before each message and one after it, or one between two.
        assert sum(map(tokenizer.is_control, ids)) >= len(messages)


@pytest.mark.parametrize("path", TEMPLATES, ids=lambda path: path.stem)
def test_no_field_forges_a_name_that_a_published_template_writes(path: Path) -> None:
    source = path.read_text(encoding="utf-8")
    names = sorted(
        {*re.findall(r"<[^<>\s'\"{}]+>|\[/?[A-Z_]+\]", source), *SPECIAL_TOKENS.values()}
    )
    names += [f"<|{role}|>" for role in ("user", "assistant", "system", "tool")]
    tokenizer: Any = ByteTokenizer(control_tokens=list(dict.fromkeys(names)))
    controls = {n: tokenizer.token_to_id(n) for n in names}
    vocabulary = Vocabulary(tokenizer, controls, {}, None, lambda text: [])
    rendered_any = False
    for text in ("".join(names), " ".join(names), *names[:10]):
        for messages, tools in conversations_of(text):
            variables = {"add_generation_prompt": True, "tools": tools, "functions": text}
            variables |= {"datetime": text, "date_string": text}
            try:
                rendered = render(
                    source, messages, special_tokens=SPECIAL_TOKENS, variables=variables
                )
            except ConversationError:
                continue
            rendered_any = True
            assert forged(vocabulary, rendered) == []
    assert rendered_any


def conversations_of(text: str) -> list[tuple[list[dict[str, Any]], list[dict[str, Any]] | None]]:
    """A conversation that any template takes, and one with every field that some take."""
    call = {
        "id": "abcdefghi",
        "type": "function",
        "function": {"name": text, "arguments": {text: text, "n": 1}},
    }
    result = {"role": "tool", "name": text, "content": text, "tool_call_id": "abcdefghi"}
    tool = {
        "type": "function",
        "function": {
            "name": text,
            "description": text,
            "parameters": {
                "type": "object",
                "properties": {text: {"type": "string", "description": text}},
                "required": [text],
            },
        },
    }
    plain = [
        {"role": "user", "content": text},
        {"role": "assistant", "content": text},
        {"role": "user", "content": text},
    ]
    full: list[dict[str, Any]] = [
        {"role": "system", "content": text},
        {"role": "user", "content": text},
        {"role": "assistant", "content": text, "reasoning_content": text, "tool_calls": [call]},
        result,
        {"role": "assistant", "content": text, "reasoning_content": text},
        {"role": "user", "content": text},
    ]
    return [(plain, None), (full, [tool])]
