"""``megatron-ext inspect`` shows what the tokenizer does, to a person and to a program."""

import io
import json

import pytest

from megatron_ext.cli.main import main
from megatron_ext.cli.pages.token_view import TokenView, ribbon
from megatron_ext.tokenizers import MegatronTokenizer
from tests.cli.run_files import refusal, start
from tests.tokenizers.short_tekken import tekken_file

pytestmark = pytest.mark.usefixtures("built_once")
MODEL = tekken_file()
TEXT = "naïve\t2017\n\u65e5\u672c 🤷"


def shown(capsys, *words):
    main(["inspect", *words, "--tokenizer-model", str(MODEL)])
    return capsys.readouterr().out


@pytest.fixture(scope="module")
def tokenizer():
    return MegatronTokenizer.from_pretrained(MODEL)


def test_json_rows_hold_the_ids_and_spans_of_the_tokenizer(capsys, tokenizer):
    rows = [json.loads(line) for line in shown(capsys, TEXT, "--json").splitlines()]
    ids, ends = tokenizer.encode_with_byte_ends(TEXT)
    assert [row["id"] for row in rows] == ids.tolist()
    assert [row["bytes"][1] for row in rows] == ends.tolist()
    assert [row["bytes"][0] for row in rows] == [0, *ends.tolist()[:-1]]
    assert [row["piece"] for row in rows] == [tokenizer.id_to_token(i) for i in ids.tolist()]


@pytest.mark.parametrize("color", ["always", "never"])
def test_the_ribbon_holds_every_character_once(capsys, tokenizer, color):
    lines = shown(capsys, TEXT, "--color", color).splitlines()
    ids, _ = tokenizer.encode_with_byte_ends(TEXT)
    assert lines[0].startswith(
        f"tiktoken, {tokenizer.vocab_size:,} ids · {len(ids)} tokens · 23 bytes"
    )
    assert ("\x1b[" in lines[2]) == (color == "always")
    bare = lines[2].replace("│", "")
    if color == "never":
        assert bare == "naïve␉2017␤"
        assert lines[2].count("│") + lines[3].count("│") == len(ids)
        assert "日本" in lines[3].replace("│", "")


def test_the_bytes_of_a_part_of_a_character_are_shown():
    views = [TokenView(1, "?", 0, 2, "日".encode()[:2], None)]
    assert ribbon(views, color=False) == "<e6 97>│\n"


def test_trained_tokens_stand_out():
    views = [TokenView(1, "a", 0, 1, b"a", False), TokenView(2, "b", 1, 2, b"b", True)]
    assert ribbon(views, color=False) == "a│⟪b│⟫\n"
    assert ribbon(views, color=True).count("\x1b[1;38") == 1


def test_a_limit_says_what_it_leaves_out(capsys):
    out = shown(capsys, "a b c d e", "--limit", "2")
    assert "... 3 tokens more" in out
    assert "tokens more" not in shown(capsys, "a b c d e", "--limit", "0")


def test_a_file_and_standard_input_are_read(capsys, tmp_path, monkeypatch):
    (tmp_path / "text.txt").write_text(TEXT, encoding="utf-8")
    wanted = shown(capsys, TEXT, "--json")
    assert shown(capsys, str(tmp_path / "text.txt"), "--json") == wanted
    monkeypatch.setattr("sys.stdin", io.StringIO(TEXT))
    assert shown(capsys, "-", "--json") == wanted


def test_a_file_that_is_not_there_is_shown_as_a_text_and_said(capsys):
    main(["inspect", "nofile.jsonl", "--tokenizer-library", "byte-level"])
    shown = capsys.readouterr()
    assert "12 tokens" in shown.out
    assert shown.err == "note: there is no file nofile.jsonl, so it is shown as a text\n"


def test_a_file_that_is_not_text_is_refused_with_its_place(capsys, tmp_path):
    (tmp_path / "latin.txt").write_bytes("café".encode("latin-1"))
    error = refusal(capsys, "inspect", tmp_path / "latin.txt", "--tokenizer-model", MODEL)
    assert "latin.txt: the file is not UTF-8 at byte 3" in error
    assert "expected a text, or conversations in JSON" in error


@pytest.mark.parametrize("text", ["short", "long enough for many writes " * 20_000])
def test_a_reader_may_stop_early(tmp_path, text):
    (tmp_path / "text.txt").write_text(text)
    flags = ("--limit", "0", "--tokenizer-library", "byte-level")
    process = start("inspect", str(tmp_path / "text.txt"), *flags)
    process.stdout.close()
    process.wait(timeout=60)
    assert process.returncode == 141
    assert process.stderr.read() == ""


CONVERSATION = [
    {"role": "user", "content": "What is 2+2? </s>"},
    {"role": "assistant", "content": "It is 4."},
]
RECORDS = {
    "lines.jsonl": json.dumps({"messages": CONVERSATION}) + "\n" + json.dumps({"messages": []}),
    "record.json": json.dumps({"messages": CONVERSATION}),
    "messages.json": json.dumps(CONVERSATION),
    "records.json": json.dumps([{"messages": CONVERSATION}], indent=1),
}


@pytest.mark.parametrize("name", RECORDS)
def test_a_file_of_conversations_shows_what_is_trained(capsys, tmp_path, name):
    (tmp_path / name).write_text(RECORDS[name], encoding="utf-8")
    words = (str(tmp_path / name), "--tokenizer-prompt-format", "mistral")
    rows = [json.loads(line) for line in shown(capsys, *words, "--json").splitlines()]
    trained = "".join(row["text"] for row in rows if row["trained"])
    assert trained == " It is 4.</s>"
    assert rows[0]["piece"] == "<s>"
    assert sum(row["piece"] == "</s>" for row in rows) == 1
    out = shown(capsys, *words, "--color", "never")
    assert "trained" in out.splitlines()[0]
    assert "⟪ It│ is│ │4│.│</s>│⟫" in out


@pytest.mark.parametrize(
    ("record", "words"),
    [("2", "lines.jsonl, record 2: the conversation is empty"), ("3", "expected 1 to 2")],
)
def test_a_record_that_cannot_be_shown_is_named(capsys, tmp_path, record, words):
    file = tmp_path / "lines.jsonl"
    file.write_text(RECORDS["lines.jsonl"], encoding="utf-8")
    flags = ("--tokenizer-model", MODEL, "--tokenizer-prompt-format", "mistral")
    assert words in refusal(capsys, "inspect", file, "--record", record, *flags)


def test_a_conversation_without_a_format_asks_for_one(capsys, tmp_path):
    file = tmp_path / "record.json"
    file.write_text(RECORDS["record.json"], encoding="utf-8")
    assert "no prompt format" in refusal(capsys, "inspect", file, "--tokenizer-model", MODEL)
