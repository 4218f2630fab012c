"""Which schema records have, and records of one question."""

import json
from collections import Counter
from typing import Any

import pytest

from megatron_ext.conversation.records import (
    RECORD_SCHEMA_REGISTRY,
    conversation_record,
    sniff_record_schema,
)
from megatron_ext.errors import ConversationError, UnknownNameError
from tests.conversation.shared_files import SHARED, needs_shared

MESSAGES: dict[str, Any] = {
    "messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
}
SHAREGPT: dict[str, Any] = {
    "conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]
}
ALPACA = {"instruction": "q", "input": "", "output": "a"}
TOOL_CALLS = {"query": "q", "tools": "[]", "answers": '[{"name": "f", "arguments": {"x": 1}}]'}
ASKED_AND_ANSWERED = MESSAGES["messages"]
PAIR: dict[str, Any] = {
    "prompt": [*ASKED_AND_ANSWERED, {"role": "user", "content": "r", "train": True}],
    "completion": [{"role": "assistant", "content": "b"}],
}
BY_SCHEMA: dict[str, dict[str, Any]] = {
    "messages": MESSAGES,
    "sharegpt": SHAREGPT,
    "alpaca": ALPACA,
    "tool-calls": TOOL_CALLS,
    "prompt-completion": PAIR,
}


@pytest.mark.parametrize("name", BY_SCHEMA)
def test_each_schema_is_told_by_its_fields(name: str) -> None:
    assert list(RECORD_SCHEMA_REGISTRY) == list(BY_SCHEMA)
    record = {"id": 1, "source": "x", **BY_SCHEMA[name]}
    assert sniff_record_schema([{"id": 0}, record, "junk", record]) == name
    assert conversation_record(record) == conversation_record(record, name)
    assert set(BY_SCHEMA[name]) <= set(RECORD_SCHEMA_REGISTRY[name].keys)


@pytest.mark.parametrize(
    ("record", "name"),
    [
        ({"conversations": MESSAGES["messages"]}, "messages"),
        ({"conversation": MESSAGES["messages"]}, "messages"),
        ({"messages": SHAREGPT["conversations"]}, "sharegpt"),
        (MESSAGES["messages"], "messages"),
        (SHAREGPT["conversations"], "sharegpt"),
        ({"messages": json.dumps(MESSAGES["messages"])}, "messages"),
        ({**MESSAGES, "prompt": "q"}, "messages"),
        ({"instruction": "q", "response": "a", "context": "", "category": "qa"}, "alpaca"),
        ({"question": "q", "answer": "a"}, "alpaca"),
        ({"prompt": "q", "completion": "a"}, "alpaca"),
        ({"query": "q", "response": "a"}, "alpaca"),
        ({"system_prompt": "", "question": "q", "response": "a"}, "alpaca"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, dict) else "",
)
def test_other_names_of_the_fields_are_known(record: Any, name: str) -> None:
    assert sniff_record_schema([record]) == name
    assert conversation_record(record).messages == ASKED_AND_ANSWERED


def test_turns_may_lie_in_any_field() -> None:
    record = {"chosen": SHAREGPT["conversations"], "rejected": [], **MESSAGES, **ALPACA}
    assert sniff_record_schema([record], key="chosen") == "sharegpt"
    assert conversation_record(record, key="chosen").messages == ASKED_AND_ANSWERED
    with pytest.raises(ConversationError, match="the record has no other; got the keys chosen"):
        conversation_record(record, "messages", key="other")
    with pytest.raises(ConversationError, match="no schema that is known; got the keys chosen"):
        sniff_record_schema([record], key="rejected")


@pytest.mark.parametrize(
    ("records", "problem"),
    [
        ([{"text": "x", "id": 1}], "no schema that is known; got the keys text, id; expected mess"),
        ([{"messages": []}], "no schema that is known; got the keys messages"),
        ([{"messages": "x"}], "no schema that is known; got the keys messages"),
        (["x"], "no schema that is known; got str"),
        ([], "there are no records"),
        ([MESSAGES, ALPACA], "differ in schema; got the keys messages; expected messages: mess"),
        ([{**MESSAGES, **SHAREGPT}], "may be of several schemas; got the keys messages, conv"),
        ([{**MESSAGES, **ALPACA}], "may be of several schemas; got the keys messages, instr"),
    ],
    ids=["unknown", "empty", "text", "no mapping", "none", "mixed", "both turns", "turns and pair"],
)
def test_a_doubtful_schema_is_no_schema(records: list[Any], problem: str) -> None:
    with pytest.raises(ConversationError) as caught:
        sniff_record_schema(records)
    assert problem in str(caught.value)


def test_one_clear_record_decides_for_a_doubtful_one() -> None:
    assert sniff_record_schema([{**MESSAGES, **SHAREGPT}, SHAREGPT]) == "sharegpt"


def test_a_named_schema_settles_the_doubt() -> None:
    record = {
        "messages": [{"role": "user", "content": "m"}],
        "conversations": [{"from": "human", "value": "s"}],
        "instruction": "i",
        "output": "a",
    }
    assert conversation_record(record, "messages").messages[0]["content"] == "m"
    assert conversation_record(record, "sharegpt").messages[0]["content"] == "s"
    assert conversation_record(record, "alpaca").messages[0]["content"] == "i"


def test_a_record_of_another_schema_is_told_so() -> None:
    with pytest.raises(ConversationError) as caught:
        conversation_record(SHAREGPT, "alpaca")
    assert str(caught.value) == (
        "the record is not of the schema alpaca: the record has none of instruction, question, "
        "query, prompt; got the keys conversations; expected a text; it has conversations, each "
        "with from and value: set --conversation-schema sharegpt"
    )


def test_an_unknown_schema_is_refused() -> None:
    with pytest.raises(UnknownNameError, match="did you mean 'sharegpt'"):
        conversation_record(SHAREGPT, "sharegtp")
    with pytest.raises(ConversationError, match="a record is a mapping, or a list of turns"):
        conversation_record("x", "alpaca")


def test_alpaca_is_the_history_the_question_and_the_answer() -> None:
    record = {
        "instruction": "Translate.",
        "input": "Hund",
        "output": "dog",
        "system": "Be brief.",
        "history": [["Hi", "Hello"], ["How?", "Well"]],
        "tools": "[]",
    }
    assert [(m["role"], m["content"]) for m in conversation_record(record).messages] == [
        ("system", "Be brief."),
        ("user", "Hi"),
        ("assistant", "Hello"),
        ("user", "How?"),
        ("assistant", "Well"),
        ("user", "Translate.\nHund"),
        ("assistant", "dog"),
    ]


def test_a_context_stands_under_the_question() -> None:
    record = {"instruction": "Who?", "context": "Ann came.", "response": "Ann"}
    assert conversation_record(record).messages[0]["content"] == "Who?\nAnn came."


def test_tool_calls_answer_a_query() -> None:
    call = {"name": "f", "arguments": {"x": 1}}
    tool = {"name": "f", "description": "d", "parameters": {"x": {"type": "int"}}}
    record = {"query": "q", "tools": json.dumps([tool]), "answers": json.dumps([call, call])}
    found = conversation_record(record)
    assert found.tools == [{"type": "function", "function": tool}]
    assert found.messages == [
        {"role": "user", "content": "q"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"type": "function", "function": call}] * 2,
        },
    ]


def test_of_a_prompt_and_its_completion_the_completion_is_trained() -> None:
    record = conversation_record({**PAIR, "system": "s", "tools": [{"name": "f"}]})
    assert [(m["role"], m["content"], m.get("train")) for m in record.messages] == [
        ("system", "s", False),
        ("user", "q", False),
        ("assistant", "a", False),
        ("user", "r", True),
        ("assistant", "b", None),
    ]
    assert [tool["function"]["name"] for tool in record.template_variables["tools"]] == ["f"]
    texts = {"prompt": "q", "completion": "a"}
    assert sniff_record_schema([texts]) == "alpaca"
    assert sniff_record_schema([{**PAIR, **MESSAGES}]) == "messages"


@pytest.mark.parametrize(
    ("record", "schema", "problem"),
    [
        ({**PAIR, "completion": "b"}, "prompt-completion", "completion: the text is not JSON; got"),
        (
            {**PAIR, "completion": []},
            "prompt-completion",
            "completion: the completion holds no mess",
        ),
        ({"completion": []}, "prompt-completion", "the record has no prompt; got the keys comple"),
        ({**ALPACA, "output": None}, "alpaca", "the record has none of output, response, answer"),
        ({**ALPACA, "input": 1}, "alpaca", "input: the field is not text; got int"),
        ({**ALPACA, "history": [["q"]]}, "alpaca", "history[0]: a turn of the history is a quest"),
        ({**TOOL_CALLS, "answers": "[]"}, "tool-calls", "answers: no tool is called"),
        ({**TOOL_CALLS, "answers": "no"}, "tool-calls", "answers: the text is not JSON"),
        ({"query": "q", "tools": "[]"}, "tool-calls", "the record has no answers; got the keys"),
    ],
    ids=[
        *("completion", "no completion", "no prompt"),
        *("answer", "input", "history", "no call", "no json", "no answers"),
    ],
)
def test_a_pair_that_cannot_be_read_is_named(record: Any, schema: str, problem: str) -> None:
    with pytest.raises(ConversationError) as caught:
        conversation_record(record, schema)
    assert str(caught.value).startswith(problem)


@needs_shared
@pytest.mark.parametrize(
    ("name", "schema", "roles", "with_tools"),
    [
        ("fastchat/dummy_conversation.json", "sharegpt", "user 1000, assistant 1000", 0),
        (
            "llamafactory_chat/glaive_toolcall_en_demo.json",
            "sharegpt",
            "user 746, assistant 957, tool 211",
            191,
        ),
        (
            "llamafactory_chat/glaive_toolcall_zh_demo.json",
            "sharegpt",
            "user 722, assistant 940, tool 218",
            200,
        ),
        ("llamafactory_chat/identity.json", "alpaca", "user 91, assistant 91", 0),
        (
            "llamafactory_chat/reason_tool_use_demo_50.jsonl",
            "messages",
            "system 50, user 70, assistant 112, tool 42",
            48,
        ),
        ("llamafactory_chat/v1_sft_demo.jsonl", "messages", "user 500, assistant 500", 0),
        ("gsm8k/train.jsonl", "alpaca", "user 7473, assistant 7473", 0),
    ],
)
def test_published_files_are_read_whole(
    name: str, schema: str, roles: str, with_tools: int
) -> None:
    text = (SHARED / "corpora" / name).read_text(encoding="utf-8")
    is_lines = name.endswith(".jsonl")
    rows = [json.loads(line) for line in text.splitlines()] if is_lines else json.loads(text)
    assert sniff_record_schema(rows[:100]) == schema
    records = [conversation_record(row, schema) for row in rows]
    counts = Counter(message["role"] for record in records for message in record.messages)
    assert counts == {r.split()[0]: int(r.split()[1]) for r in roles.split(", ")}
    assert sum(record.tools is not None for record in records) == with_tools
    said = "".join(json.dumps(r.messages, ensure_ascii=False) for r in records)
    last = rows[-1].get("output") or rows[-1].get("answer") or ""
    assert json.dumps(last, ensure_ascii=False)[1:-1] in said
