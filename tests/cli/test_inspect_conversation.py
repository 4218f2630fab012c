"""``megatron-ext inspect --conversation`` says what is trained and where each character is from."""

import io
import json
import re
from pathlib import Path

import numpy as np
import pytest

from megatron_ext.cli.main import main
from megatron_ext.cli.pages.conversation_cells import cells_of
from megatron_ext.conversation import EncodedConversation, Provenance, Span
from megatron_ext.tokenizers import MegatronTokenizer
from tests.cli.html_page import HtmlPage
from tests.cli.run_files import refusal
from tests.tokenizers.short_tekken import tekken_file

pytestmark = pytest.mark.usefixtures("built_once")
HOSTILE = '</s> </div><script>alert("1")</script> &amp; \u202e\x1b[31m 🤷 日本'
CHAT = [
    {"role": "user", "content": f"What is 2+2? {HOSTILE}"},
    {"role": "assistant", "content": "It is 4.\n"},
]
WRITTEN = f"<s>[INST] What is 2+2? {HOSTILE}[/INST] It is 4.\n</s>"
TOOLS = """{{ bos_token }}{% for tool in tools or [] %}{{ tool.function.name }};{% endfor %}
{%- for m in messages %}{% if m.role != 'system' %}[{{ m.role }}]{{ m.content | trim }}
{%- if m.role == 'assistant' %}{{ eos_token }}{% endif %}{% endif %}{% endfor %}"""


MODEL = tekken_file()
FLAGS = ("--tokenizer-model", str(MODEL), "--tokenizer-prompt-format")


def inspect(capsys, *words, prompt_format="mistral"):
    main(["inspect", *words, *FLAGS, prompt_format])
    return capsys.readouterr()


def refused(capsys, *words):
    return refusal(capsys, "inspect", *words, *FLAGS, "mistral")


@pytest.fixture(scope="module")
def tokenizer():
    return MegatronTokenizer.from_pretrained(MODEL, prompt_format="mistral")


@pytest.fixture
def chat(tmp_path):
    file = tmp_path / "chat.json"
    file.write_text(json.dumps(CHAT), encoding="utf-8")
    return str(file)


@pytest.fixture
def lines(tmp_path):
    file = tmp_path / "lines.jsonl"
    turns = [{"from": "human", "value": "Say b."}, {"from": "gpt", "value": "b"}]
    wrong = [{"from": "human", "value": "?"}, {"from": "nobody", "value": "!"}]
    records = [{"conversations": turns}, {"conversations": wrong}, {"conversations": turns}]
    file.write_text("\n".join(map(json.dumps, records)), encoding="utf-8")
    return str(file)


@pytest.fixture
def template(tmp_path):
    file = tmp_path / "tools.jinja"
    file.write_text(TOOLS, encoding="utf-8")
    return f"file:{file}"


def only_row(out):
    (line,) = out.splitlines()
    return json.loads(line)


def test_a_row_says_where_every_character_and_token_comes_from(capsys, chat, tokenizer):
    row = only_row(inspect(capsys, "--conversation", chat, "--json").out)
    encoded = tokenizer.encode_conversation(CHAT)
    assert row["text"] == encoded.text == WRITTEN
    assert [token["id"] for token in row["tokens"]] == encoded.ids.tolist()
    assert [token["trained"] for token in row["tokens"]] == encoded.trained.tolist()
    assert [token["bytes"][1] for token in row["tokens"]] == encoded.byte_ends.tolist()
    spans = [(s["text"], s["source"], s["message"], s["field"], s["trained"]) for s in row["spans"]]
    assert spans == [
        ("<s>", "template", None, None, False),
        ("[INST] ", "template", None, None, False),
        (CHAT[0]["content"], "message", 0, "content", False),
        ("[/INST]", "template", None, None, False),
        (" ", "template", None, None, True),
        ("It is 4.\n", "message", 1, "content", True),
        ("</s>", "template", None, None, True),
    ]
    assert "".join(row["text"][s["start"] : s["end"]] for s in row["spans"]) == WRITTEN
    turns = [(t["message"], t["role"], t["tokens"], t["trained_tokens"]) for t in row["turns"]]
    trained = int(encoded.trained.sum())
    assert turns[0] == (None, None, 1, 0)
    assert turns[1][:2] == (0, "user")
    assert turns[2] == (1, "assistant", trained, trained)
    assert sum(turn[2] for turn in turns) == len(encoded.ids)
    assert row["turns"][1]["untrained"] == "the role user is not trained"


def test_without_colour_brackets_mark_sources_and_what_is_trained(capsys, chat):
    out = inspect(capsys, "--conversation", chat, "--color", "never").out
    assert "[INST] ‹What is 2+2? </s> </div>" in out
    assert "&amp; \\u202e␛[31m 🤷 日本›[/INST]" in out
    assert "⟪ ‹It is 4.␤\n›</s>⟫" in out
    assert "── 0 user · " in out
    assert "the role user is not trained" in out
    assert "  0 user: names of control tokens in it stay text: </s>\n" in out
    assert "\x1b" not in out


def test_colour_tells_sources_apart_and_trained_text_is_bold_and_underlined(capsys, chat):
    out = inspect(capsys, "--conversation", chat, "--color", "always").out
    styled = re.findall(r"((?:\x1b\[[\d;]+m)+)([^\x1b]*)\x1b\[0m", out)
    styles = {text: style for style, text in styled}
    assert styles["It is 4.␤"].endswith("\x1b[1;4m")
    assert styles["</s>"].endswith("\x1b[1;4m")
    assert styles["</s>"] != styles["It is 4.␤"]
    assert "\x1b[1;4m" not in styles["[INST] "]


def test_tokens_are_listed_on_request(capsys, chat):
    words = ("--conversation", chat, "--color", "never")
    assert "piece" not in inspect(capsys, *words).out
    out = inspect(capsys, *words, "--tokens", "--limit", "3").out
    assert "trained  piece" in out
    assert "tokens more; --limit 0 shows all" in out


def test_the_page_shows_the_text_and_the_mask_and_nothing_of_it_becomes_markup(
    capsys, chat, tmp_path, tokenizer
):
    path = tmp_path / "new" / "chat.html"
    out = inspect(capsys, "--conversation", chat, "--html", str(path)).out
    assert out.endswith(f"written: {path}\n")
    source = path.read_text(encoding="utf-8")
    page = HtmlPage(source)
    shown = WRITTEN.replace("\u202e", "\\u202e").replace("\x1b", "\\x1b")
    assert "".join(page.inside("i", "kbd")) == shown
    assert "".join(page.inside("i", "kbd", style="t")) == " It is 4.\n</s>"
    assert page.inside("kbd") == ["<s>", "[INST]", "[/INST]", "</s>"]
    assert sum(tag == "script" for tag, _ in page.elements) == 3
    encoded = tokenizer.encode_conversation(CHAT)
    tokens, pieces, _ = page.inside("script")
    assert json.loads(tokens)["ids"] == encoded.ids.tolist()
    assert np.cumsum(json.loads(tokens)["lengths"]).tolist() == encoded.byte_ends.tolist()
    assert json.loads(pieces)["2"] == "</s>"


def test_the_page_counts_every_token_once(capsys, chat, tmp_path, tokenizer):
    path = tmp_path / "chat.html"
    inspect(capsys, "--conversation", chat, "--html", str(path))
    page = HtmlPage(path.read_text(encoding="utf-8"))
    firsts, count = [], 0
    for tag, attributes in page.elements:
        if "data-first" in attributes:
            firsts.append((int(attributes["data-first"]), count))
        elif tag in ("i", "kbd"):
            count += int(attributes.get("data-n", "1"))
    assert all(first == counted for first, counted in firsts)
    assert count == len(tokenizer.encode_conversation(CHAT).ids)


def test_the_page_stays_small(capsys, tmp_path):
    file = tmp_path / "long.json"
    file.write_text(json.dumps(CHAT * 200), encoding="utf-8")
    path = tmp_path / "long.html"
    inspect(capsys, "--conversation", str(file), "--html", str(path))
    page = HtmlPage(path.read_text(encoding="utf-8"))
    tokens = len(json.loads(page.inside("script")[0])["ids"])
    assert tokens > 8_000
    assert path.stat().st_size < 20_000 + 50 * tokens


def test_all_records_are_shown_and_those_that_cannot_be_are_named(capsys, lines, tmp_path):
    path = tmp_path / "lines.html"
    words = ("--conversation", lines, "--record", "all")
    printed = inspect(capsys, *words, "--json", "--html", str(path))
    rows = [json.loads(line) for line in printed.out.splitlines()]
    assert [row["record"] for row in rows] == [1, 3]
    assert rows[0]["text"] == rows[1]["text"] == "<s>[INST] Say b.[/INST] b</s>"
    assert "lines.jsonl, record 2: " in printed.err
    assert "conversations[1].from" in printed.err
    page = HtmlPage(path.read_text(encoding="utf-8"))
    assert page.inside("h2") == ["record 2", "record 1", "record 3"]
    assert any("conversations[1].from" in text for text in page.inside("p"))
    anchors = [a["id"] for _, a in page.elements if re.match(r"r\d+m", a.get("id") or "")]
    assert anchors == ["r1m0", "r1m1", "r3m0", "r3m1"]


def test_one_record_that_cannot_be_shown_is_an_error_with_its_place(capsys, lines):
    assert "lines.jsonl, record 2: " in refused(capsys, "--conversation", lines, "--record", "2")


def test_tools_of_a_record_reach_the_template_as_text_of_a_variable(capsys, tmp_path, template):
    file = tmp_path / "tools.jsonl"
    record = {"messages": CHAT, "tools": [{"name": "look</s>up"}]}
    file.write_text(json.dumps(record), encoding="utf-8")
    row = only_row(
        inspect(capsys, "--conversation", str(file), "--json", prompt_format=template).out
    )
    (span,) = [span for span in row["spans"] if span["source"] == "variable"]
    assert (span["text"], span["kind"], span["trained"]) == ("look</s>up", "variable", False)
    assert {"message": None, "text": "names of control tokens in it stay text: </s>"} in row[
        "warnings"
    ]


def test_what_a_template_does_to_messages_is_a_warning(capsys, tmp_path, template):
    chat = [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "  Hello "},
        {"role": "assistant", "content": "Hi.", "reasoning_content": "A greeting."},
        {"role": "user", "content": "Bye"},
        {"role": "assistant", "content": "Bye.", "train": False},
    ]
    file = tmp_path / "chat.json"
    file.write_text(json.dumps(chat), encoding="utf-8")
    flags = ("--tokenizer-exclude-unknown",)
    template_file = Path(template.removeprefix("file:"))
    words = ("--conversation", str(file), "--json", "--chat-template", str(template_file), *flags)
    row = only_row(inspect(capsys, *words, prompt_format="auto").out)
    assert [(w["message"], w["text"]) for w in row["warnings"]] == [
        (0, "content is left out"),
        (1, "content is changed: 3 characters of white space around it are left out"),
        (2, "reasoning_content is left out"),
        (4, "not trained: the message says that it is not trained"),
    ]


def test_a_conversation_that_training_refuses_says_so(capsys, tmp_path):
    file = tmp_path / "chat.json"
    file.write_text(json.dumps(CHAT[:1]), encoding="utf-8")
    row = only_row(inspect(capsys, "--conversation", str(file), "--json").out)
    assert row["refusal"].startswith("there is nothing to train on")
    assert row["warnings"][0] == {"message": None, "text": "nothing of the conversation is trained"}
    out = inspect(capsys, "--conversation", str(file)).out
    assert "a run leaves the conversation out: there is nothing to train on" in out


def test_standard_input_is_read(capsys, chat, monkeypatch):
    wanted = only_row(inspect(capsys, "--conversation", chat, "--json").out)
    monkeypatch.setattr("sys.stdin", io.StringIO(json.dumps({"messages": CHAT}) + "\n"))
    assert only_row(inspect(capsys, "--conversation", "-", "--json").out) == wanted


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        ((), "there is nothing to show"),
        (("text", "--conversation", "chat.json"), "there is a text and a file of conversations"),
        (("text", "--html", "x.html"), "--html: the option is for --conversation"),
        (("text", "--record", "all"), "--record all: the option is for --conversation"),
        (("text", "--record", "some"), "'some' is neither a number nor all"),
        (("--conversation", "absent.json"), "absent.json: cannot read the file"),
    ],
)
def test_a_command_that_asks_for_nothing_or_too_much_is_refused(
    capsys, tmp_path, monkeypatch, words, problem
):
    monkeypatch.chdir(tmp_path)
    assert problem in refused(capsys, *words)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ('{"messages": []}\n{"messages":', "file.jsonl:2: neither a JSON document nor JSON lines"),
        ('{"text": "a"}', "file.jsonl: the records have no schema that is known"),
        ("", "file.jsonl: there are no records"),
    ],
)
def test_a_file_without_conversations_is_refused_with_its_place(capsys, tmp_path, text, problem):
    file = tmp_path / "file.jsonl"
    file.write_text(text, encoding="utf-8")
    assert problem in refused(capsys, "--conversation", file)


def test_cells_follow_tokens_that_share_a_character_or_cross_sources():
    text = "a🤷 b"
    content = Provenance("message", 0, "content")
    encoded = EncodedConversation(
        text=text,
        spans=(Span(0, 3, Provenance("template")), Span(3, 4, content)),
        trained_ranges=[(3, 4)],
        ids=np.array([1, 2, 3, 4, 5]),
        # a, two halves of the emoji, the space with b, and a token without bytes.
        byte_ends=np.array([1, 3, 5, 7, 7]),
        trained=np.array([False, False, False, True, False]),
        excluded={},
    )
    is_control = np.array([True, False, False, False, False])
    cells = cells_of(encoded, {0: "assistant"}, is_control)
    shown = [(c.text, c.kind, c.first_token, c.token_count, c.continues) for c in cells]
    assert shown == [
        ("a", "template", 0, 1, False),
        ("🤷", "template", 1, 2, False),
        (" ", "template", 3, 1, False),
        ("b", "assistant", 4, 1, True),
    ]
    assert [cell.is_control for cell in cells] == [True, False, False, False]
    assert [cell.is_trained for cell in cells] == [False, False, True, True]
