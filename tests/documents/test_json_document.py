"""Records of a JSON document."""

import gzip
import json

import pytest

from megatron_ext.documents import lines
from megatron_ext.documents.record_fields import RecordFields
from megatron_ext.documents.records import cut_into_shards, read_records
from megatron_ext.documents.source_file import find_sources
from megatron_ext.tokenizers import TokenizerConfig
from tests.conversation.shared_files import SHARED, needs_shared
from tests.preprocessing.runs import contents, run, write_json_lines

RECORDS = [{"text": "a\nb"}, {"text": "]é,日["}, {"text": "", "more": [1, {"x": "[\n"}]}]


def read(file):
    """Texts, their lines, and what is bad."""
    (source,) = find_sources([str(file)]).files
    assert source.kind == "json-document" + "-gzip" * (file.suffix == ".gz")
    ((piece,),) = cut_into_shards([source], 1)
    blocks = list(read_records(piece, RecordFields(("text",))))
    assert sum(block.size for block in blocks) == source.size
    return (
        [text for block in blocks for text in block.columns[0]],
        [line for block in blocks for line in block.lines],
        [(bad.line, bad.problem) for block in blocks for bad in block.bad],
    )


@pytest.mark.parametrize("block_bytes", [1, 1 << 20])
@pytest.mark.parametrize("begin", ["", "\ufeff", "\n "])
@pytest.mark.parametrize("name", ["a.json", "a.json.gz"])
def test_a_list_gives_its_records_at_their_lines(tmp_path, monkeypatch, block_bytes, begin, name):
    monkeypatch.setattr(lines, "BLOCK_BYTES", block_bytes)
    file = tmp_path / name
    content = (begin + json.dumps(RECORDS, indent=1, ensure_ascii=False)).encode()
    file.write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    texts, numbers, bad = read(file)
    first = 2 + begin.count("\n")
    assert texts == [record["text"] for record in RECORDS]
    assert numbers == [first, first + 3, first + 6]
    assert bad == []


def test_a_document_gives_what_its_records_give_as_lines(tmp_path):
    document = tmp_path / "a.json"
    document.write_text(json.dumps(RECORDS * 3, indent=2), encoding="utf-8")
    report = run(document, output=tmp_path / "a" / "x", shard_count=2)
    lines = write_json_lines(tmp_path / "b.jsonl", RECORDS * 3)
    run(lines, output=tmp_path / "b" / "x")
    assert report.documents == 9
    assert contents(tmp_path / "a") == contents(tmp_path / "b")


@pytest.mark.parametrize(
    ("text", "texts", "bad"),
    [
        ("[\n]\n", [], []),
        ('[\n{"text": "a"},\n{"text": \n', ["a"], [(4, "Expecting value")]),
        ('[\n{"text": "a"}\n{"text": "b"}]', ["a"], [(3, "Expecting ',' delimiter")]),
        ('[\n{"text": "a"},\n]', ["a"], []),
        ('[\n{"text": "a"}\n]\n{"text": "b"}', ["a"], [(4, "Extra data")]),
        ('[\n{"text": "a"},\n3,\n{"t": 1}, {"text": "b"}]', ["a", "b"], [(3, "int"), (4, "'t'")]),
        ('[\n{"text": "\\ud83d"}, {"text": "b"}]', ["b"], [(2, "half of a surrogate pair")]),
        ("[\n" + "[" * 200_000, [], [(2, "not JSON from this line on")]),
    ],
    ids=["empty", "cut off", "comma", "last comma", "rest", "records", "surrogate", "deep"],
)
def test_what_is_broken_is_bad_with_its_line(tmp_path, text, texts, bad):
    (tmp_path / "a.json").write_text(text, encoding="utf-8")
    found, _, problems = read(tmp_path / "a.json")
    assert found == texts
    assert [line for line, _ in problems] == [line for line, _ in bad]
    assert all(words in problem for (_, problem), (_, words) in zip(problems, bad, strict=True))


def test_a_document_that_is_not_utf_8_is_one_bad_record(tmp_path):
    (tmp_path / "a.json").write_bytes(b'[\n{"text": "caf\xe9"}]')
    assert read(tmp_path / "a.json")[2][0][0] is None


@pytest.mark.parametrize("end", ["", "\n", "\n \n"])
@pytest.mark.parametrize("begin", ["", "\ufeff", "\n "])
def test_a_list_on_one_line_gives_its_records(tmp_path, begin, end):
    (tmp_path / "a.json").write_text(begin + json.dumps(RECORDS) + end, encoding="utf-8")
    texts, lines, bad = read(tmp_path / "a.json")
    assert texts == [record["text"] for record in RECORDS]
    assert lines == [1 + begin.count("\n")] * 3
    assert bad == []


@pytest.mark.parametrize(
    "text", ['[{"text": "a"},\n {"text": "b"}]', '[{\n"text": "a"}, {"text": "b"}]']
)
def test_a_list_may_begin_with_a_record_on_its_line(tmp_path, text):
    (tmp_path / "a.json").write_text(text, encoding="utf-8")
    assert read(tmp_path / "a.json")[0] == ["a", "b"]


@pytest.mark.parametrize(
    "text", ['{"text": "a"}\n', '[{"text": "a"}]\n[{"text": "b"}]\n', "[]\n", "\n"]
)
def test_lines_stay_lines(tmp_path, text):
    (tmp_path / "a.json").write_text(text, encoding="utf-8")
    assert find_sources([str(tmp_path / "a.json")]).files[0].kind == "json-lines"


@needs_shared
@pytest.mark.parametrize(
    ("name", "schema", "documents"),
    [
        ("fastchat/dummy_conversation.json", "sharegpt", 500),
        ("llamafactory_chat/identity.json", "alpaca", 91),
        ("llamafactory_chat/glaive_toolcall_en_demo.json", "sharegpt", 300),
        ("llamafactory_chat/reason_tool_use_demo_50.jsonl", "messages", 50),
    ],
)
def test_published_files_are_tokenized_whole(tmp_path, name, schema, documents):
    template = (SHARED / "chat_templates" / "Qwen-Qwen3-0.6B.jinja").read_text(encoding="utf-8")
    sft = TokenizerConfig(library="byte-level", mode="sft", chat_template=template)
    report = run(SHARED / "corpora" / name, output=tmp_path / "a", tokenizer=sft)
    assert report.settings["conversation_schema"] == schema
    assert (report.documents, report.bad_records) == (documents, 0), report.bad[:3]
