"""Runs over conversations in each schema that is known."""

import json
import os

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from megatron.core.datasets.indexed_dataset import IndexedDataset

from megatron_ext.conversation.records import conversation_record
from megatron_ext.documents.record_fields import RecordBlock
from megatron_ext.documents.source_file import source_file
from megatron_ext.errors import ConfigError, DataError
from megatron_ext.preprocessing import preprocess as preprocess_module
from megatron_ext.preprocessing.config import with_settled_schema
from megatron_ext.preprocessing.document_encoder import ConversationEncoder
from megatron_ext.tokenizers import TokenizerConfig, build_tokenizer
from tests.preprocessing.chat_of_bytes import ChatOfBytes, conversation
from tests.preprocessing.runs import config_of, contents, run, write_json_lines

SFT = TokenizerConfig(
    library="byte-level",
    mode="sft",
    chat_template="{{ tools | map(attribute='function') | map(attribute='name') | join(' ') }}|"
    "{% for m in messages %}"
    "{% if m.content == 'refuse' %}{{ raise_exception('I refuse this') }}{% endif %}"
    # Of what is made of two messages at once nobody knows whose it is.
    "{{ m.role }}: {{ (messages[0].content ~ m.content) | pprint if m.content == 'hide' else "
    "'' if m.content == 'omit' else m.content }}"
    "{% for call in m.tool_calls or [] %}{{ call.function.name }}"
    "({{ call.function.arguments.items() | map('join', '=') | join(',') }}){% endfor %}"
    "{{ '\\n' }}{% endfor %}",
)
PAIRS = [("hi", "yo"), ("why\nso", "so"), ("é", "日本")]
TOOL = {"name": "f", "description": "d", "parameters": {}}
CALL = {"name": "f", "arguments": {"x": 1}}


def sharegpt(asked, answer):
    turns = [{"from": "human", "value": asked}, {"from": "gpt", "value": answer}]
    return {"id": asked, "conversations": turns}


def write(path, records):
    path.parent.mkdir(exist_ok=True)
    return write_json_lines(path, records)


def texts_of(prefix):
    """What the conversations of a run say."""
    tokenizer = build_tokenizer(SFT)
    return [tokenizer.detokenize(row.tolist()) for row in IndexedDataset(str(prefix))]


def trained_of(prefix):
    """What of them is trained."""
    tokenizer = build_tokenizer(SFT)
    rows = IndexedDataset(f"{prefix}_messages_document")
    masks = IndexedDataset(f"{prefix}_messages_loss_mask")
    return [
        tokenizer.detokenize(row[mask == 1].tolist()) for row, mask in zip(rows, masks, strict=True)
    ]


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    """What a run makes of ``PAIRS`` as messages."""
    folder = tmp_path_factory.mktemp("told")
    file = write(folder / "a.jsonl", ({"messages": conversation(*pair)} for pair in PAIRS))
    report = run(file, output=folder / "a" / "x", tokenizer=SFT)
    assert report.settings["conversation_schema"] == "messages"
    return contents(folder / "a")


RECORDS = {
    "sharegpt": ("sharegpt", [sharegpt(*pair) for pair in PAIRS]),
    "alpaca": ("alpaca", [{"instruction": a, "input": "", "output": b} for a, b in PAIRS]),
    "question": ("alpaca", [{"question": a, "answer": b, "type": 1} for a, b in PAIRS]),
}
WITH_WORKERS = [*RECORDS] if os.environ.get("MEGATRON_EXT_ALL_TEXT") else ["sharegpt"]


@pytest.mark.parametrize(
    ("name", "workers"), [*((name, 1) for name in RECORDS), *((name, 2) for name in WITH_WORKERS)]
)
def test_a_schema_gives_what_messages_give(tmp_path, told, name, workers):
    schema, records = RECORDS[name]
    file = write(tmp_path / "b.jsonl", records)
    found = run(
        file, output=tmp_path / "b" / "x", tokenizer=SFT, workers=workers, shard_count=workers
    )
    assert contents(tmp_path / "b") == told
    assert found.settings["conversation_schema"] == schema
    assert found.documents == 3


def test_tools_and_calls_of_a_record_reach_its_template(tmp_path):
    tools = json.dumps([TOOL])
    turns = [
        {"from": "human", "value": "go"},
        {"from": "function_call", "value": json.dumps(CALL)},
        {"from": "observation", "value": "done"},
        {"from": "gpt", "value": "well"},
    ]
    run(
        write(tmp_path / "a.jsonl", [{"conversations": turns, "tools": tools}]),
        write(tmp_path / "b.jsonl", [{"conversations": turns, "tools": "[]"}]),
        output=tmp_path / "a",
        tokenizer=SFT,
    )
    said = "|user: go\nassistant: f(x=1)\ntool: done\nassistant: well\n"
    assert texts_of(tmp_path / "a_messages_document") == [f"f{said}", said]
    assert trained_of(tmp_path / "a") == ["f(x=1)\nwell\n"] * 2
    xlam = {"id": 0, "query": "go", "tools": tools, "answers": json.dumps([CALL])}
    report = run(write(tmp_path / "c.jsonl", [xlam]), output=tmp_path / "c", tokenizer=SFT)
    assert report.settings["conversation_schema"] == "tool-calls"
    assert texts_of(tmp_path / "c_messages_document") == ["f|user: go\nassistant: f(x=1)\n"]


def test_variables_of_a_record_are_those_of_its_own_conversation_only():
    with_tools = conversation_record({**sharegpt("a", "b"), "chat_template_kwargs": {"k": 1}})
    without = conversation_record(sharegpt("a", "b"))
    tokenizer = ChatOfBytes()
    block = RecordBlock(([with_tools, without],), lines=[1, 2])
    (documents,) = ConversationEncoder(tokenizer).encode(block).documents
    first, second = documents.document_lengths.tolist()
    assert first - second == len('{"k": 1}')


def test_a_row_of_parquet_gives_what_its_line_gives(tmp_path):
    call = {"name": "f", "arguments": '{"x": 1}'}
    rows = [
        {
            "id": i,
            "tools": json.dumps([TOOL]) if i else None,
            "messages": [
                {"role": "user", "content": "go", "function_call": None, "weight": None},
                # A column of structs has every field in every message.
                {"role": "assistant", "content": None, "function_call": call, "weight": i},
                {"role": "assistant", "content": "z", "function_call": None, "weight": 1},
            ],
        }
        for i in range(3)
    ]
    del rows[2]["messages"][1]["weight"]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    run(tmp_path / "a.parquet", output=tmp_path / "a" / "x", tokenizer=SFT)
    run(write(tmp_path / "b.jsonl", rows), output=tmp_path / "b" / "x", tokenizer=SFT)
    assert contents(tmp_path / "a") == contents(tmp_path / "b")
    said = "user: go\nassistant: f(x=1)\nassistant: z\n"
    assert texts_of(tmp_path / "a" / "x_messages_document") == [f"|{said}", *[f"f|{said}"] * 2]
    assert trained_of(tmp_path / "a" / "x") == ["z\n", *["f(x=1)\nz\n"] * 2]


def test_parquet_without_a_conversation_is_told_its_columns(tmp_path):
    pq.write_table(pa.Table.from_pylist([{"a": 1, "b": 2}]), tmp_path / "a.parquet")
    with pytest.raises(DataError, match=r"a\.parquet: .* no schema .* got the keys a, b"):
        run(tmp_path / "a.parquet", output=tmp_path / "a", tokenizer=SFT)
    with pytest.raises(DataError, match=r"no conversation under 'messages'; got keys \['a', 'b'\]"):
        run(
            tmp_path / "a.parquet",
            output=tmp_path / "a",
            tokenizer=SFT,
            conversation_schema="alpaca",
        )


def test_turns_in_fields_of_other_names_go_into_files_of_their_own(tmp_path):
    rows = [
        {
            "chosen": sharegpt(a, b)["conversations"],
            "rejected": sharegpt(a, "no")["conversations"],
            "system": "Be kind.",
            "messages": "not read",
        }
        for a, b in PAIRS
    ]
    file = write(tmp_path / "a.jsonl", rows)
    report = run(file, output=tmp_path / "a", tokenizer=SFT, json_keys=("chosen", "rejected"))
    assert report.settings["conversation_schema"] == "sharegpt"
    for key, answers in {"chosen": [b for _, b in PAIRS], "rejected": ["no"] * 3}.items():
        assert texts_of(tmp_path / f"a_{key}_document") == [
            f"|system: Be kind.\nuser: {asked}\nassistant: {answer}\n"
            for (asked, _), answer in zip(PAIRS, answers, strict=True)
        ]


BAD = {
    "no answer": (conversation("hi"), "there is nothing to train on"),
    "nothing trained": (
        [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a", "weight": 0}],
        "there is nothing to train on",
    ),
    "assistant first": (conversation("hi", "yo")[::-1], "the assistant speaks first"),
    "refused": (conversation("refuse", "yo"), "I refuse this"),
    "hidden": (conversation("hi", "hide"), "conversation[1]"),
    "omitted": (conversation("hi", "omit"), "conversation[1]"),
    "weight": ([{"role": "user", "content": "x", "weight": 2}], "messages[0].weight: a message"),
    "parts": ([{"role": "user", "content": 3}], "the content is not text"),
}


def test_records_that_cannot_be_trained_are_listed_with_their_lines(tmp_path):
    good = {"messages": conversation("hi", "yo")}
    rows = [row for messages, _ in BAD.values() for row in (good, {"messages": messages})]
    file = write(tmp_path / "a.jsonl", rows)
    report = run(file, output=tmp_path / "a", tokenizer=SFT)
    assert report.documents == len(BAD)
    assert report.bad_records == len(BAD)
    places = [bad.place for bad in report.bad]
    assert places == [f"{file}:{2 * i + 2}" for i in range(len(BAD))]
    for bad, (name, (_, words)) in zip(report.bad, BAD.items(), strict=True):
        assert words in bad.problem, name


@pytest.mark.parametrize("name", BAD)
def test_a_strict_run_stops_at_a_record_that_cannot_be_trained(tmp_path, name):
    messages, words = BAD[name]
    rows = [{"messages": conversation("hi", "yo")}, {"messages": messages}]
    file = write(tmp_path / "a.jsonl", rows)
    with pytest.raises(DataError) as caught:
        run(file, output=tmp_path / "a", tokenizer=SFT, strict=True)
    assert str(caught.value).startswith(f"{file}:2: ")
    assert words in str(caught.value)


def test_a_record_of_another_schema_is_bad(tmp_path):
    rows = [sharegpt("a", "b")] * 100 + [{"instruction": "a", "output": "b"}, sharegpt("c", "d")]
    file = write(tmp_path / "a.jsonl", rows)
    report = run(file, output=tmp_path / "a", tokenizer=SFT)
    assert (report.documents, report.bad_records) == (101, 1)
    assert report.bad[0].place == f"{file}:101"
    assert "set --conversation-schema alpaca" in report.bad[0].problem


def test_files_of_several_schemas_are_refused_before_anything_is_written(tmp_path):
    a = write(tmp_path / "a.jsonl", [sharegpt("a", "b")])
    b = write(tmp_path / "b.jsonl", [{"messages": conversation("a", "b")}])
    with pytest.raises(DataError) as caught:
        run(a, b, output=tmp_path / "out" / "a", tokenizer=SFT)
    assert f"got messages in {b}, sharegpt in {a}" in str(caught.value)
    assert not (tmp_path / "out").exists()
    report = run(a, b, output=tmp_path / "out" / "a", tokenizer=SFT, conversation_schema="sharegpt")
    assert (report.documents, report.bad_records) == (1, 1)


def test_records_of_no_known_schema_are_refused_with_their_keys(tmp_path):
    file = write(tmp_path / "a.jsonl", [{"chat": conversation("a", "b"), "id": 1}])
    with pytest.raises(DataError, match=r"a\.jsonl: .*got the keys chat, id; expected messages"):
        run(file, output=tmp_path / "a", tokenizer=SFT)
    assert run(file, output=tmp_path / "a", tokenizer=SFT, json_keys=("chat",)).documents == 1


def test_a_run_is_taken_up_with_the_schema_that_it_was_begun_with(tmp_path):
    both = {**sharegpt("a", "b"), "messages": conversation("c", "d")}
    file = write(tmp_path / "a.jsonl", [both] * 4)
    options = {"output": tmp_path / "a", "tokenizer": SFT, "shard_count": 2}
    begun = config_of(file, **{**options, "shard_indices": (0,), "conversation_schema": "sharegpt"})
    preprocess_module.preprocess(begun)
    with pytest.raises(ConfigError, match=r"another conversation schema; got messages; exp.*share"):
        run(file, **options, conversation_schema="messages")
    run(file, **options, conversation_schema="sharegpt")
    assert texts_of(tmp_path / "a_messages_document") == ["|user: a\nassistant: b\n"] * 4


def test_lines_that_are_no_json_do_not_hide_the_schema(tmp_path):
    file = tmp_path / "a.jsonl"
    file.write_text("oops\n\n" + json.dumps(sharegpt("a", "b")) + "\n", encoding="utf-8")
    config = config_of(file, output=tmp_path / "a", tokenizer=SFT)
    settled = with_settled_schema(config, [source_file(file, "json-lines")])
    assert settled.conversation_schema == "sharegpt"
    assert with_settled_schema(settled, []) is settled
    file.write_text("oops\n", encoding="utf-8")
    assert with_settled_schema(config, [source_file(file, "json-lines")]) is config
    with pytest.raises(DataError, match=r"a\.jsonl:1: the line is not JSON"):
        run(file, output=tmp_path / "a", tokenizer=SFT)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"conversation_schema": "vicuna"}, "--conversation-schema: unknown conversation schema"),
        (
            {"conversation_schema": "alpaca", "json_keys": ("messages",)},
            "--text-field: records of this schema have no field that holds the conversation",
        ),
    ],
    ids=["unknown", "keys"],
)
def test_a_schema_that_cannot_be_read_is_refused(tmp_path, options, problem):
    with pytest.raises(ConfigError, match=problem):
        config_of(tmp_path, output=tmp_path / "a", tokenizer=SFT, **options)
