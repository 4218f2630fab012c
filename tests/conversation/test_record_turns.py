"""Turns of OpenAI's and ShareGPT's records as messages."""

import copy
import json
from datetime import date
from typing import Any

import pytest

from megatron_ext.conversation import check_conversation
from megatron_ext.conversation.records import conversation_record
from megatron_ext.errors import ConversationError

USER = {"role": "user", "content": "Rain?"}
CALL = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Ulm"}}}
SPELLED = '{"name": "weather", "arguments": {"city": "Ulm"}}'
FUNCTION = {"name": "weather", "description": "d", "parameters": {"type": "object"}}


def messages_of(*turns: Any, **fields: Any) -> list[Any]:
    """The messages of a record with these turns, which is left as it was."""
    record = {"messages": list(turns), **fields}
    before = copy.deepcopy(record)
    messages = conversation_record(record, "messages").messages
    assert record == before
    return messages


def shared(*turns: tuple[str, Any], **fields: Any) -> list[Any]:
    """The messages of a ShareGPT record."""
    record = {"conversations": [{"from": name, "value": value} for name, value in turns], **fields}
    return conversation_record(record, "sharegpt").messages


@pytest.mark.parametrize(
    ("name", "role"),
    [
        ("human", "user"),
        ("user", "user"),
        ("prompter", "user"),
        ("gpt", "assistant"),
        ("chatgpt", "assistant"),
        ("bing", "assistant"),
        ("bard", "assistant"),
        ("bot", "assistant"),
        ("model", "assistant"),
        ("assistant", "assistant"),
        ("system", "system"),
        ("developer", "developer"),
        ("observation", "tool"),
        ("tool", "tool"),
        ("tool_response", "tool"),
        ("function_response", "tool"),
        ("function", "tool"),
        ("ipython", "ipython"),
    ],
)
def test_each_name_of_a_speaker_is_one_role(name: str, role: str) -> None:
    assert shared((name, " x\n")) == [{"role": role, "content": " x\n"}]
    assert messages_of({"role": name, "content": "x"}) == [{"role": role, "content": "x"}]


@pytest.mark.parametrize("name", ["function_call", "tool_call"])
@pytest.mark.parametrize("value", [SPELLED, f"[{SPELLED}]", f" {SPELLED}\n", json.loads(SPELLED)])
def test_a_turn_that_calls_a_tool_is_the_assistants(name: str, value: Any) -> None:
    called = [{"role": "assistant", "content": None, "tool_calls": [CALL]}]
    assert shared((name, value)) == called
    assert messages_of({"role": name, "content": value}) == called


def test_a_turn_may_call_several_tools() -> None:
    (message,) = shared(("function_call", f"[{SPELLED}, {SPELLED}]"))
    assert message["tool_calls"] == [CALL, CALL]


@pytest.mark.parametrize(
    "given",
    [
        {"tool_calls": [CALL]},
        {"tool_calls": json.dumps([CALL])},
        {"tool_calls": [json.loads(SPELLED)]},
        {"tool_calls": [{"name": "weather", "parameters": {"city": "Ulm"}}]},
        {"tool_calls": [{"function": {"name": "weather", "arguments": '{"city": "Ulm"}'}}]},
        {"function_call": {"name": "weather", "arguments": '{"city": "Ulm"}'}},
        {"tool_calls": [CALL], "function_call": None},
    ],
    ids=["openai", "json", "bare", "llama", "arguments as json", "function_call", "null beside"],
)
@pytest.mark.parametrize("content", [{}, {"content": None}, {"content": ""}])
def test_calls_have_one_form(given: dict[str, Any], content: dict[str, Any]) -> None:
    message = {"role": "assistant", **content, **given}
    assert messages_of(USER, message)[1:] == [
        {"role": "assistant", "content": content.get("content"), "tool_calls": [CALL]}
    ]


def test_what_a_call_says_besides_is_kept() -> None:
    call = {"id": "c1", "index": 0, "function": {"name": "f", "arguments": "", "strict": True}}
    (message,) = messages_of({"role": "assistant", "content": "I look.", "tool_calls": [call]})
    assert message["content"] == "I look."
    assert message["tool_calls"] == [
        {
            "type": "function",
            "id": "c1",
            "index": 0,
            "function": {"name": "f", "arguments": {}, "strict": True},
        }
    ]


def test_arguments_keep_their_order_and_their_values() -> None:
    text = '{"name": "f", "arguments": {"z": 1.50, "a": [null, {"y": true}], "é": "\\u00e9"}}'
    (message,) = shared(("function_call", text))
    arguments = message["tool_calls"][0]["function"]["arguments"]
    assert list(arguments.items()) == [("z", 1.5), ("a", [None, {"y": True}]), ("é", "é")]


def test_fields_of_a_message_that_mean_nothing_here_reach_the_template() -> None:
    turn = {"role": "assistant", "content": "x", "reasoning_content": "r", "name": "n", "k": [1]}
    assert messages_of({**turn, "refusal": None}) == [turn]
    record = {"conversations": [{"from": "gpt", "value": "x", "k": 0}]}
    assert conversation_record(record).messages == [{"role": "assistant", "content": "x", "k": 0}]


def test_a_content_of_parts_is_left_to_the_template() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {"url": "u"}}]
    assert messages_of({"role": "user", "content": parts}) == [{"role": "user", "content": parts}]


DATE = date(2026, 5, 1)


@pytest.mark.parametrize(
    ("content", "shown"),
    [
        ({"t": 21, "é": None}, '{"t": 21, "é": null}'),
        ([{"t": 21}], '[{"t": 21}]'),
        ([1, "a"], '[1, "a"]'),
        (21, "21"),
        ("{'t': 1}", "{'t': 1}"),
        ([{"type": "text", "text": "a"}], [{"type": "text", "text": "a"}]),
        ([], []),
        ({"t": DATE}, {"t": DATE}),
    ],
    ids=str,
)
def test_a_result_that_is_neither_text_nor_parts_is_its_json(content: Any, shown: Any) -> None:
    assert messages_of({"role": "tool", "content": content}) == [{"role": "tool", "content": shown}]
    (turn,) = shared(("observation", content))
    assert turn == {"role": "tool", "content": shown}
    (question,) = messages_of({"role": "user", "content": content})
    assert question["content"] == content


def test_a_result_that_is_nested_too_deeply_is_no_content() -> None:
    deep: list[Any] = []
    for _ in range(10_000):
        deep = [deep]
    turns = [USER, {"role": "tool", "content": deep}]
    with pytest.raises(ConversationError, match="this is not a part of a content"):
        check_conversation(conversation_record({"messages": turns}).messages)


def test_parts_with_values_go_where_templates_look_for_them() -> None:
    parts = [("reasoning", "r"), ("text", "a"), ("text", "b"), ("tool_call", SPELLED)]
    content = [{"type": kind, "value": value} for kind, value in parts]
    assert messages_of({"role": "assistant", "content": content}) == [
        {"role": "assistant", "content": "ab", "reasoning_content": "r", "tool_calls": [CALL]}
    ]


@pytest.mark.parametrize(
    ("weights", "train"),
    [
        ({}, None),
        ({"weight": 1}, None),
        ({"weight": 0}, False),
        ({"loss_weight": 0.0}, False),
        ({"loss_weight": 1.0, "loss": True}, None),
        ({"loss": False}, False),
        ({"train": False}, False),
        ({"train": True}, True),
        ({"train": True, "weight": 0}, False),
        ({"weight": None}, None),
    ],
    ids=str,
)
def test_a_weight_says_whether_a_message_is_trained(
    weights: dict[str, Any], train: bool | None
) -> None:
    (message,) = messages_of({"role": "assistant", "content": "x", **weights})
    assert message == {"role": "assistant", "content": "x"} | (
        {} if train is None else {"train": train}
    )


@pytest.mark.parametrize("key", ["system", "system_prompt"])
def test_the_system_text_of_a_record_comes_first(key: str) -> None:
    first = {"role": "system", "content": "Be brief."}
    assert shared(("human", "x"), **{key: "Be brief."})[0] == first
    assert shared(("system", "Be brief."), ("human", "x"), **{key: "Be brief."})[0] == first
    assert shared(("human", "x"), **{key: ""}) == shared(("human", "x"), **{key: None})
    assert len(shared(("human", "x"), **{key: ""})) == 1


@pytest.mark.parametrize(
    "fields",
    [
        {"tools": [FUNCTION]},
        {"tools": json.dumps([FUNCTION])},
        {"tools": [{"type": "function", "function": FUNCTION}]},
        {"tools": [{"type": "function", **FUNCTION}]},
        {"functions": [FUNCTION]},
    ],
    ids=["bare", "json", "openai", "responses", "functions"],
)
def test_tools_have_one_form(fields: dict[str, Any]) -> None:
    record = conversation_record({"messages": [USER], **fields})
    assert record.tools == [{"type": "function", "function": FUNCTION}]
    assert record.template_variables == {"tools": record.tools}


@pytest.mark.parametrize("none", [None, [], "[]", ""], ids=repr)
def test_no_tools_are_no_variable(none: Any) -> None:
    record = conversation_record({"messages": [USER], "tools": none})
    assert record.tools is None
    assert record.template_variables == {}


def test_a_record_sets_variables_of_the_template() -> None:
    variables = {"chat_template_kwargs": {"enable_thinking": False}, "documents": [{"text": "d"}]}
    record = conversation_record({"messages": [USER], **variables, "id": 7})
    assert record.template_variables == {"enable_thinking": False, "documents": [{"text": "d"}]}
    without = {"chat_template_kwargs": {"eos_token": None}}
    assert conversation_record({"messages": [USER], **without}).template_variables == {}


@pytest.mark.parametrize(
    ("turn", "problem"),
    [
        ("hi", "messages[1]: a turn is a mapping; got str"),
        ({"content": "x"}, "messages[1].role: the turn has no role; got the keys content"),
        ({"role": 1, "content": "x"}, "messages[1].role: the role is not text; got 1"),
        ({"role": "asistant", "content": "x"}, "messages[1].role: unknown role; got 'asistant'"),
        ({"role": "user"}, "messages[1].content: the turn has no content; got the keys role"),
        (
            {"role": "tool_call", "content": "{weather}"},
            "messages[1].content: the text is not JSON; got Expecting property name",
        ),
        (
            {"role": "tool_call", "content": '{"arguments": {}}'},
            "messages[1].content: the tool call has no name; got the keys arguments",
        ),
        (
            {"role": "assistant", "tool_calls": [CALL, {"name": "f", "arguments": "[1]"}]},
            "messages[1].tool_calls[1].arguments: the value is not a mapping; got list",
        ),
        (
            {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]},
            "messages[1].tool_calls[0].function.arguments: the text is not JSON",
        ),
        (
            {"role": "tool_call", "content": '{"name": "f", "arguments": {"a": "\\ud83d"}}'},
            "messages[1].content: the text is not JSON; got 'utf-8' codec can't encode",
        ),
        ({"role": "assistant", "tool_calls": 3}, "messages[1].tool_calls: the field is not a list"),
        (
            {"role": "assistant", "content": "x", "weight": 0.5},
            "messages[1].weight: a message is trained or it is not; got 0.5",
        ),
        (
            {"role": "assistant", "content": "x", "train": "no"},
            "messages[1].train: a message is trained or it is not; got 'no'",
        ),
        (
            {
                "role": "assistant",
                "content": [
                    {"type": "tool_call", "value": SPELLED},
                    {"type": "text", "value": "x"},
                ],
            },
            "messages[1].content[1]: a part of type text comes after one of type tool_call",
        ),
        (
            {"role": "user", "content": [{"type": "text", "value": "x"}, {"type": "audio"}]},
            "messages[1].content[1]: this is not a part of a content; got {'type': 'audio'}",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) and ":" in value else "",
)
def test_a_turn_that_cannot_be_read_is_named(turn: Any, problem: str) -> None:
    with pytest.raises(ConversationError) as caught:
        messages_of(USER, turn)
    assert str(caught.value).startswith(problem)


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"system": 1}, "system: the field is not text; got int"),
        ({"tools": "weather"}, "tools: the text is not JSON"),
        ({"tools": [FUNCTION, 3]}, "tools[1]: the value is not a mapping; got int"),
        (
            {"chat_template_kwargs": []},
            "chat_template_kwargs: the value is not a mapping; got list",
        ),
        (
            {"chat_template_kwargs": {"enable_thinking": True, "eos_token": "</s>"}},
            "chat_template_kwargs: a record cannot replace a special token; got eos_token",
        ),
        (
            {"chat_template_kwargs": '{"image_token": ""}'},
            "chat_template_kwargs: a record cannot replace a special token; got image_token",
        ),
        (
            {"chat_template_kwargs": {"messages": []}},
            "chat_template_kwargs: a record cannot set this variable of its template; got messages",
        ),
    ],
    ids=["system", "tools", "tool", "variables", "special token", "empty special token", "turns"],
)
def test_a_field_of_the_record_that_cannot_be_read_is_named(
    fields: dict[str, Any], problem: str
) -> None:
    with pytest.raises(ConversationError) as caught:
        messages_of(USER, **fields)
    assert str(caught.value).startswith(problem)


def test_two_system_texts_are_refused() -> None:
    with pytest.raises(ConversationError, match=r"system: .*begins with another"):
        shared(("system", "Be long."), ("human", "x"), system="Be brief.")
