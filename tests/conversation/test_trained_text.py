"""What is trained of published conversations in published templates is what can be read there."""

import json
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from jinja2 import Template

from megatron_ext.conversation import (
    EncodedConversation,
    TrainingPolicy,
    encode_conversation,
    prompt_config_of,
    render,
)
from megatron_ext.conversation.rendering.template_limits import TemplateLimitError
from megatron_ext.errors import ConversationError
from tests.conversation.answer_shapes import ANSWER_SHAPES, RESULT_END, RESULT_START
from tests.conversation.marker_tokenizer import MarkerTokenizer
from tests.conversation.plain_jinja import plain_environment
from tests.conversation.published_conversations import Conversation, published_conversations
from tests.conversation.shared_files import SHARED, needs_shared, published_tokenizer

pytestmark = needs_shared

TEMPLATES = sorted((SHARED / "chat_templates").glob("*.jinja"))
SPECIAL_TOKENS = {
    "bos_token": "<s>",
    "eos_token": "</s>",
    "pad_token": "<pad>",
    "unk_token": "<unk>",
}
ALL_TEXT = bool(os.environ.get("MEGATRON_EXT_ALL_TEXT"))
SOME = TEMPLATES if ALL_TEXT else TEMPLATES[::2]
"""For rules that every template meets in the other tests, too."""
DATE = "20 Nov 2026"
VARIABLES = {
    "add_generation_prompt": False,
    # The date is a variable of some templates and a function to others.
    "date_string": DATE,
    "datetime": DATE,
    "strftime_now": lambda form: DATE,
    "functions": "[]",
}
OF_CONTENT = (
    *("Grüße", "Zufrieden", "Отвечай", "再见", "再会", "שלום", "مرحبا", "नमस्ते"),
    *("musing", "Łódź", "Oslo", "Balmy", "Chilly"),
)
"""Words of the conversations that no template says."""
NO_TOOLS = ("'NoneType' object is not iterable", None)
APPENDS = ("access to attribute 'append' of 'list' object is unsafe", "conversation[1]")
ONE_CALL = ("This model only supports single tool-calls at once!", "conversation[1]")
NOT_JSON = ("is not JSON serializable", None)
ALTERNATE = ("onversation roles must alternate user/assistant/user/assistant/", "conversation[2]")
WITHOUT_TOOLS = (
    "a question",
    "scripts",
    "thinking in a field",
    "thinking in the text",
    "answers in a row",
)
CALLS = ("tools", "several calls after thinking", "a call with a word", "a call at the end")
REFUSED: dict[str, dict[str, tuple[str, str | None]]] = {
    "CohereForAI-c4ai-command-r-plus-tool_use": dict.fromkeys(WITHOUT_TOOLS, NO_TOOLS),
    "Kimi-K2-Thinking": dict.fromkeys(CALLS, APPENDS),
    "Mistral-Small-3.2-24B-Instruct-2506": {"answers in a row": ALTERNATE},
    "NousResearch-Hermes-2-Pro-Llama-3-8B-tool_use": dict.fromkeys(WITHOUT_TOOLS, NO_TOOLS),
    "google-gemma-2-2b-it": {
        "scripts": ("System role not supported", None),
        **dict.fromkeys((*CALLS[:3], "answers in a row"), ALTERNATE),
    },
    "llama-cpp-deepseek-r1": dict.fromkeys((*CALLS, "tools that nobody calls"), NOT_JSON),
    "meta-llama-Llama-3.1-8B-Instruct": {"several calls after thinking": ONE_CALL},
    "meta-llama-Llama-3.3-70B-Instruct": {"several calls after thinking": ONE_CALL},
    "mistralai-Mistral-Nemo-Instruct-2407": {"answers in a row": ALTERNATE},
}
"""Template -> conversation that it takes not -> its words, and the message that they are about."""

HUNYUAN = [
    f"<｜hy_{name}:opensource｜>" for name in ("User", "Assistant", "eos", "begin_of_sentence")
] + [f"<{slash}think:opensource>" for slash in ("", "/")]
"""Markers that Hy3 puts together."""

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Tells the weather.",
            "parameters": {
                "type": "object",
                "description": "What to look at",
                "properties": {"city": {"type": "string", "description": "Where"}},
                "required": ["city"],
            },
        },
    }
]


def call(number: int, city: str) -> dict[str, Any]:
    function = {"name": "weather", "arguments": {"city": city}}
    return {"id": f"abcdefgh{number}", "type": "function", "function": function}


def said(role: str, content: Any, **fields: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **fields}


def result(number: int, content: str) -> dict[str, Any]:
    return said("tool", content, name="weather", tool_call_id=f"abcdefgh{number}")


CONVERSATIONS: dict[str, Conversation] = {
    "a question": ([said("user", "Grüße?"), said("assistant", "Zufrieden.")], {}),
    "scripts": (
        [
            said("system", "Отвечай кратко."),
            said("user", "再见 👋🏽"),
            said("assistant", "再会! 👍"),
            said("user", "שלום  \n"),
            said("assistant", "مرحبا\n\nनमस्ते"),
        ],
        {},
    ),
    "thinking in a field": (
        [
            said("user", "Why?"),
            said("assistant", "So.", reasoning_content="Old musing."),
            said("user", "Really?"),
            said("assistant", "Yes.", reasoning_content="New musing."),
        ],
        {},
    ),
    "thinking in the text": (
        [
            said("user", "Why?"),
            said("assistant", "<think>\nOld musing.\n</think>\n\nSo."),
            said("user", "Really?"),
            said("assistant", "<think>\nNew musing.\n</think>\n\nYes."),
        ],
        {},
    ),
    "tools": (
        [
            said("user", "Warm?"),
            said("assistant", "", tool_calls=[call(1, "Łódź")]),
            result(1, "21 degrees"),
            said("assistant", "Balmy."),
            said("user", "And there?"),
            said("assistant", "", tool_calls=[call(2, "Oslo")]),
            result(2, "3 degrees"),
            said("assistant", "Chilly."),
        ],
        {"tools": TOOLS},
    ),
    "several calls after thinking": (
        [
            said("user", "Where is it warm?"),
            said(
                "assistant",
                "",
                reasoning_content="Ask both.",
                tool_calls=[call(1, "Łódź"), call(2, "Oslo")],
            ),
            result(1, "21 degrees"),
            result(2, "3 degrees"),
            said("assistant", "In one.", reasoning_content="Compare."),
        ],
        {"tools": TOOLS},
    ),
    "a call with a word": (
        [
            said("user", "Warm?"),
            said("assistant", "A moment.", tool_calls=[call(1, "Łódź")]),
            result(1, "21 degrees"),
            said("assistant", "Balmy."),
        ],
        {"tools": TOOLS},
    ),
    "a call at the end": (
        [said("user", "Warm?"), said("assistant", "", tool_calls=[call(1, "Łódź")])],
        {"tools": TOOLS},
    ),
    "answers in a row": (
        [
            said("user", "Well?"),
            said("assistant", "First."),
            said("assistant", "Second."),
            said("user", "And?"),
            said("assistant", "Third."),
        ],
        {},
    ),
    "tools that nobody calls": (
        [said("user", "Hi"), said("assistant", "Hello.")],
        {"tools": TOOLS},
    ),
}


@cache
def plain_template(path: Path) -> Template:
    return plain_environment().from_string(path.read_text(encoding="utf-8"))


@cache
def tokenizer_of_template(path: Path) -> MarkerTokenizer:
    return MarkerTokenizer(path.read_text(encoding="utf-8"), HUNYUAN)


@cache
def corpora() -> dict[str, list[Conversation]]:
    """Every file's conversations, or a few spread over it."""
    found = published_conversations()
    if ALL_TEXT:
        return found
    return {name: chats[3 :: max(1, len(chats) // 2)][:2] for name, chats in found.items()}


def plain_text(path: Path, conversation: Conversation, **more: Any) -> str | Exception:
    messages, variables = conversation
    shown = [{k: v for k, v in message.items() if k != "train"} for message in messages]
    source = path.read_text(encoding="utf-8")
    # A null content is none for templates that ask for it, and empty for others.
    absent = None if re.search(r"\['content'\] is (not )?none", source) else ""
    shown = [{**m, "content": absent} if m["content"] is None else m for m in shown]
    if "['arguments'] +" in source:
        # Added to a text, arguments are their JSON.
        shown = [
            m | {"tool_calls": [*map(_in_text, m["tool_calls"])]} if m.get("tool_calls") else m
            for m in shown
        ]
    # transformers gives thinking to templates by both names.
    shown = [
        {"thinking": m["reasoning_content"], **m} if "reasoning_content" in m else m for m in shown
    ]
    known = {"tools": None, "documents": None, **SPECIAL_TOKENS, **VARIABLES, **variables, **more}
    try:
        return plain_template(path).render(messages=shown, **known)
    except Exception as error:
        return error


def _in_text(call: dict[str, Any]) -> dict[str, Any]:
    arguments = json.dumps(call["function"]["arguments"], ensure_ascii=False)
    return {**call, "function": {**call["function"], "arguments": arguments}}


def encoded(path: Path, conversation: Conversation, **policy: Any) -> EncodedConversation:
    tokenizer = tokenizer_of_template(path)
    config = replace(prompt_config_of("auto", tokenizer), policy=TrainingPolicy(**policy))
    messages, variables = conversation
    return encode_conversation(
        tokenizer, messages, config, template_variables={**VARIABLES, **variables}
    )


def check(path: Path, conversation: Conversation, **policy: bool) -> bool:
    """Compare what is trained with what the plain text shows; False if the template refuses."""
    plain = plain_text(path, conversation)
    if isinstance(plain, Exception):
        with pytest.raises(ConversationError) as caught:
            encoded(path, conversation)
        assert _known_error(caught.value.__cause__) == _known_error(plain)
        return False
    found = encoded(path, conversation, **policy)
    assert found.text == plain
    expected = ANSWER_SHAPES[path.stem].trained_text(plain, **policy)
    assert "".join(plain[start:end] for start, end in found.trained_ranges) == expected
    assert tokenizer_of_template(path).decode(found.ids[found.trained].tolist()) == expected
    return True


def readable(path: Path, conversation: Conversation) -> Conversation:
    """The conversation, so that it can be told in the plain text where a tool's words end."""
    messages, variables = conversation
    if path.stem.startswith("Apertus"):
        messages = [
            {**m, "content": f"{RESULT_START}{m['content']}{RESULT_END}"}
            if m["role"] == "tool"
            else m
            for m in messages
        ]
    return messages, variables


def test_every_published_template_is_known() -> None:
    assert sorted(ANSWER_SHAPES) == [path.stem for path in TEMPLATES]


@pytest.mark.parametrize("case", CONVERSATIONS)
@pytest.mark.parametrize("path", SOME, ids=lambda path: path.stem)
def test_answers_with_their_stop_markers_are_trained(path: Path, case: str) -> None:
    conversation = readable(path, CONVERSATIONS[case])
    if case in REFUSED.get(path.stem, {}):
        message, place = REFUSED[path.stem][case]
        with pytest.raises(ConversationError, match=re.escape(message)) as caught:
            encoded(path, conversation)
        assert str(caught.value).startswith(f"{place}: " if place else "the template")
    assert check(path, conversation) is (case not in REFUSED.get(path.stem, {}))
    plain = plain_text(path, conversation)
    if isinstance(plain, str):
        read = ANSWER_SHAPES[path.stem].trained_text(plain)
        assert_answers_are_read(read, plain, CONVERSATIONS[case][0])
        assert_content_keeps_its_source(encoded(path, conversation), conversation[0])


@pytest.mark.parametrize("path", TEMPLATES, ids=lambda path: path.stem)
def test_the_generation_prompt_is_that_of_plain_jinja(path: Path) -> None:
    prompt = {"add_generation_prompt": True}
    for case in ("scripts", "tools"):
        messages, variables = CONVERSATIONS[case]
        plain = plain_text(path, (messages, variables), **prompt)
        if isinstance(plain, str):
            shown = render(
                path.read_text(encoding="utf-8"),
                messages,
                special_tokens=SPECIAL_TOKENS,
                variables={**VARIABLES, **variables, **prompt},
            )
            assert shown.text == plain


def assert_answers_are_read(read: str, plain: str, messages: list[dict[str, Any]]) -> None:
    """What is read in the plain text is what assistants say."""
    for message in messages:
        content = message["content"].split("</think>")[-1].strip()
        if content and content in plain and message["role"] == "assistant":
            assert content in read
        elif content:
            assert content not in read


def assert_content_keeps_its_source(
    found: EncodedConversation, messages: list[dict[str, Any]]
) -> None:
    """No content passes for the template's text, and a message's text is in the message."""
    own = "".join(found.text[span.start : span.end] for span in found.spans if span.is_template)
    assert not [word for word in OF_CONTENT if word in own]
    for span in found.spans:
        index = span.provenance.message
        if index is None or span.provenance.field == "role":
            continue
        known = "".join(texts(messages[index].values())) + json.dumps(messages[index])
        text = found.text[span.start : span.end].replace('"', " ")
        assert all(word in known for word in text.split() if word.isalpha())


def texts(values: Iterable[Any]) -> Iterator[str]:
    for value in values:
        if isinstance(value, str):
            yield value
        elif isinstance(value, dict | list):
            yield from texts(value.values() if isinstance(value, dict) else value)


NEED_TOOLS = tuple(name for name, cases in REFUSED.items() if "a question" in cases)

POLICIES = {
    "neither": {"thinking": False, "tool_calls": False},
    "no thinking": {"thinking": False},
    "no calls": {"tool_calls": False},
}


@pytest.mark.parametrize("policy", POLICIES if ALL_TEXT else ["neither"])
@pytest.mark.parametrize("path", SOME, ids=lambda path: path.stem)
def test_thinking_and_tool_calls_are_left_out_where_asked(path: Path, policy: str) -> None:
    for case in (*CALLS, "thinking in a field", "thinking in the text"):
        check(path, readable(path, CONVERSATIONS[case]), **POLICIES[policy])


@pytest.mark.parametrize("path", SOME, ids=lambda path: path.stem)
def test_only_the_chosen_answers_are_trained(path: Path) -> None:
    messages, variables = CONVERSATIONS["thinking in a field"]
    variables = {**variables, "tools": TOOLS} if path.stem in NEED_TOOLS else variables
    if isinstance(plain_text(path, (messages, variables)), Exception):
        variables = {}
    plain = plain_text(path, (messages, variables))
    assert isinstance(plain, str)
    first, last = ("".join(answer) for answer in ANSWER_SHAPES[path.stem].answers(plain))

    def trained(train: dict[int, bool], **policy: Any) -> str:
        stated = [
            {**message, "train": train[index]} if index in train else message
            for index, message in enumerate(messages)
        ]
        found = encoded(path, (stated, variables), **policy)
        assert found.text == plain
        return "".join(plain[start:end] for start, end in found.trained_ranges)

    assert trained({}, last_only=True) == last
    assert trained({1: False}) == last
    assert trained({3: False}) == first
    assert trained({1: True}, last_only=True) == first + last
    questions = trained({}, roles=frozenset({"user"}))
    assert questions.startswith("Why?")
    assert "Really?" in questions
    assert "So." not in questions + trained({1: False, 3: False})


@pytest.mark.parametrize("path", SOME, ids=lambda path: path.stem)
def test_a_content_of_parts_is_trained_as_the_text_is(path: Path) -> None:
    messages, variables = CONVERSATIONS["tools that nobody calls"]
    if isinstance(plain_text(path, (messages, variables)), Exception):
        variables = {}
    in_parts = [
        {**message, "content": [{"type": "text", "text": message["content"]}]}
        for message in messages
    ]
    as_text, found = encoded(path, (messages, variables)), encoded(path, (in_parts, variables))
    assert found.ids.tolist() == as_text.ids.tolist()
    assert found.trained.tolist() == as_text.trained.tolist()
    assert found.trained.any()


PUBLISHED = {
    "qwen3": ("Qwen-Qwen3-0.6B", "Qwen-QwQ-32B"),
    "llama3_2": ("meta-llama-Llama-3.1-8B-Instruct", "meta-llama-Llama-3.3-70B-Instruct"),
    "gemma3": ("google-gemma-2-2b-it",),
    "mistral_nemo": ("mistralai-Mistral-Nemo-Instruct-2407",),
    "phi4_mini": ("microsoft-Phi-3.5-mini-instruct",),
}
"""Vocabulary -> templates whose markers are tokens of it."""


@pytest.mark.parametrize("vocabulary", PUBLISHED if ALL_TEXT else ["qwen3"])
def test_tokens_of_published_vocabularies_are_trained(vocabulary: str) -> None:
    tokenizer = published_tokenizer(vocabulary)
    for path in (SHARED / "chat_templates" / f"{name}.jinja" for name in PUBLISHED[vocabulary]):
        source = path.read_text(encoding="utf-8")
        config = replace(prompt_config_of("auto", tokenizer), custom_chat_template=source)
        for case in ("a question", "scripts", "thinking in a field", "tools"):
            messages, variables = CONVERSATIONS[case]
            if case in REFUSED.get(path.stem, {}) or (case == "tools" and "Phi" in path.stem):
                continue
            # Not every template has a place for instructions.
            messages = [message for message in messages if message["role"] != "system"]
            found = encode_conversation(
                tokenizer, messages, config, template_variables={**VARIABLES, **variables}
            )
            raw = found.text.encode()
            begins = [0, *found.byte_ends.tolist()[:-1]]
            tokens = zip(begins, found.byte_ends.tolist(), found.trained.tolist(), strict=True)
            trained = b"".join(raw[begin:end] for begin, end, is_trained in tokens if is_trained)
            assert trained.decode() == ANSWER_SHAPES[path.stem].trained_text(found.text)


@pytest.mark.parametrize("path", SOME, ids=lambda path: path.stem)
def test_answers_of_published_conversations_are_trained(path: Path) -> None:
    for name, conversations in corpora().items():
        shown = [check(path, readable(path, conversation)) for conversation in conversations]
        if name == "gsm8k/train.jsonl":
            assert any(shown) == ("a question" not in REFUSED.get(path.stem, {}))


def _known_error(error: BaseException | None) -> tuple[str, str]:
    if isinstance(error, RecursionError | TemplateLimitError):
        # Ours stops before Python does.
        return "", "endless"
    # Messages name classes, and ours are others.
    message = re.sub(r"'[\w.]+ object'|Object of type \w+", "an object", str(error))
    return type(error).__name__, message
