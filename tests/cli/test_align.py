"""``megatron-ext align``: the audit of a pair as text, JSON and a page."""

import gzip
import io
import json
import re
from functools import lru_cache
from pathlib import Path

import pytest

from megatron_ext.alignment import ChunkCounts, TokenAligner
from megatron_ext.cli import align
from megatron_ext.cli.main import main
from megatron_ext.cli.pages.audit_ribbon import ribbon_chunks
from megatron_ext.tokenizers import MegatronTokenizer
from tests.cli.html_page import HtmlPage
from tests.cli.run_files import refusal
from tests.tokenizers.short_tekken import tekken_file

DATA = Path(pytest.importorskip("mistral_common").__file__).parent / "data"
TEKKEN = tekken_file()
SENTENCEPIECE = DATA / "mistral_instruct_tokenizer_240323.model.v3"
PAIR = ("--student", str(TEKKEN), "--teacher", str(SENTENCEPIECE))
TEXT = 'Sold 201 of 2017 <b>"&amp;"</b>\n\tnaïve_name == 日本語 🤷\n'
HOSTILE = "<script>alert('x')</script> \"onclick=\" & </style> &lt;i&gt; 12\n"


def aligned(capsys, *words, pair=PAIR):
    main(["align", *words, *pair])
    return capsys.readouterr().out


def report_of(capsys, *words, pair=PAIR):
    return json.loads(aligned(capsys, *words, "--json", "-", pair=pair))


def refused(capsys, *words, pair=PAIR):
    return refusal(capsys, "align", *words, *pair)


@pytest.fixture(scope="module")
def tokenizers():
    return MegatronTokenizer.from_pretrained(TEKKEN), MegatronTokenizer.from_pretrained(
        SENTENCEPIECE
    )


@pytest.fixture(scope="module", autouse=True)
def _built_once():
    """Each tokenizer is built by the first call that names it."""
    with pytest.MonkeyPatch.context() as patch:
        build = align.build_tokenizer
        patch.setattr(align, "build_tokenizer", lru_cache(build))
        yield


def counted(tokenizers, *texts):
    total = ChunkCounts()
    for text in texts:
        total += ChunkCounts.of(TokenAligner(*tokenizers).align(text))
    return total


def test_the_json_holds_the_counts_of_the_aligner(capsys, tokenizers):
    report = report_of(capsys, "--text", TEXT)
    counts = counted(tokenizers, TEXT)
    assert report["all"]["chunk_shares"] == counts.shares()
    assert report["all"]["chunk_counts"]["student_unaligned"] == counts.student_unaligned
    assert report["all"]["chunks"] == counts.chunks
    assert report["bytes"] == len(TEXT.encode())
    assert report["student"]["tokens"] == len(tokenizers[0].text_to_ids(TEXT))
    assert report["teacher"]["tokens"] == len(tokenizers[1].text_to_ids(TEXT))
    size = tokenizers[0].vocab_size
    assert report["student"]["vocab_size"] == size
    name = f"{TEKKEN.parent.name}/{TEKKEN.name} · tiktoken, {size:,} ids"
    assert report["student"]["tokenizer"] == name
    assert sum(row["chunks"] for row in report["classes"]) == counts.chunks
    assert {row["name"] for row in report["scripts"]} >= {"Latin", "Common", "Han"}
    assert report["recommendation"]["reasons"]


def test_records_of_every_kind_of_file_give_the_same_report(capsys, tmp_path, tokenizers):
    from pyarrow import Table
    from pyarrow.parquet import write_table

    records = [{"text": TEXT}, {"text": "Привет 42"}, {"text": ""}]
    lines = "".join(json.dumps(record) + "\n" for record in records)
    (tmp_path / "a.jsonl").write_text(lines, encoding="utf-8")
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    write_table(Table.from_pylist(records), tmp_path / "c.parquet")
    counts = counted(tokenizers, TEXT, "Привет 42")
    for name in ("a.jsonl", "b.jsonl.gz", "c.parquet"):
        report = report_of(capsys, str(tmp_path / name))
        assert report["documents"] == 2
        assert report["all"]["chunk_shares"] == counts.shares()
    both = report_of(capsys, str(tmp_path / "a.jsonl"), str(tmp_path / "c.parquet"))
    assert both["all"]["chunks"] == 2 * counts.chunks
    assert report_of(capsys, str(tmp_path / "a.jsonl"), "--max-documents", "1")["documents"] == 1


def test_text_comes_from_a_file_standard_input_or_the_command(capsys, tmp_path, monkeypatch):
    (tmp_path / "a.txt").write_text(TEXT, encoding="utf-8")
    wanted = report_of(capsys, "--text", TEXT)["all"]
    assert report_of(capsys, str(tmp_path / "a.txt"))["all"] == wanted
    monkeypatch.setattr("sys.stdin", io.StringIO(TEXT))
    assert report_of(capsys, "-")["all"] == wanted
    # No path, whatever it begins with.
    assert report_of(capsys, "--text=~/a")["bytes"] == 3


def test_several_fields_are_documents_of_their_own(capsys, tmp_path, tokenizers):
    path = tmp_path / "gsm.jsonl"
    path.write_text(json.dumps({"question": "2 + 40?", "answer": "It is 42."}) + "\n")
    report = report_of(capsys, str(path), "--json-keys", "question", "answer")
    assert report["documents"] == 2
    assert report["all"]["chunks"] == counted(tokenizers, "2 + 40?", "It is 42.").chunks


def test_what_is_sent_names_files_without_the_folders_of_the_machine(capsys, tmp_path):
    paths = [tmp_path / "corpus" / name / "a.jsonl" for name in ("en", "fr")]
    for path in paths:
        path.parent.mkdir(parents=True)
        path.write_text(json.dumps({"text": "x 日本語 y"}) + "\n{\n", encoding="utf-8")
    (tmp_path / "corpus" / "en" / "picture.png").touch()
    page = tmp_path / "page.html"
    report = report_of(capsys, str(tmp_path / "corpus"), "--html", str(page))
    assert str(tmp_path) not in json.dumps(report) + page.read_text(encoding="utf-8")
    assert report["inputs"] == ["corpus"]
    assert report["skipped_files"] == ["picture.png"]
    assert [bad["place"] for bad in report["bad"]] == ["en/a.jsonl:2", "fr/a.jsonl:2"]
    assert report_of(capsys, str(paths[0]))["bad"][0]["place"] == "a.jsonl:2"


def test_the_text_report_says_shares_examples_with_their_line_and_the_objective(capsys, tmp_path):
    path = tmp_path / "corpus.jsonl"
    path.write_text(
        "".join(json.dumps({"text": text}) + "\n" for text in ("plain", "x 日本語 y", "日本語")),
        encoding="utf-8",
    )
    out = aligned(capsys, str(path))
    report = report_of(capsys, str(path))
    share = report["all"]["chunk_shares"]["one_to_one"]
    assert re.search(rf"\nall +{report['all']['chunks']} +{share:.1%} ", out)
    assert "corpus.jsonl:2" in out
    assert "⟪" in out
    assert report["recommendation"]["title"].split(":")[0] in out
    assert "\x1b[" not in out
    assert "\x1b[" in aligned(capsys, str(path), "--color", "always")
    assert "most affected tokens" not in aligned(capsys, str(path), "--examples", "0")


def test_the_flags_of_distill_name_the_tokenizers_too(capsys):
    pair = (
        *("--tokenizer-model", str(TEKKEN), "--tokenizer-library", "tiktoken"),
        *("--teacher-tokenizer-model", str(SENTENCEPIECE)),
        *("--teacher-tokenizer-library", "sentencepiece"),
    )
    assert report_of(capsys, "--text", TEXT, pair=pair) == report_of(capsys, "--text", TEXT)


def test_what_a_tokenizer_cannot_represent_is_counted_and_said(capsys, tmp_path):
    # WordPiece knows these words only.
    (tmp_path / "vocab.txt").write_text("[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\nsold\nof\n")
    pair = ("--student", str(tmp_path / "vocab.txt"), "--teacher", str(TEKKEN))
    report = report_of(capsys, "--text", "sold 日本 of", pair=pair)
    assert report["student"]["unknown_tokens"] > 0
    assert report["student"]["unknown_bytes"] >= len("日本".encode())
    out = aligned(capsys, "--text", "sold 日本 of", pair=pair)
    assert f"{report['student']['unknown_tokens']} unknown tokens" in out


# What goes wrong.


def test_bad_records_are_left_out_and_named(capsys, tmp_path):
    path = tmp_path / "corpus.jsonl"
    path.write_text('{"text": "one"}\n{"text": \n{"other": 1}\n{"text": "two"}\n')
    main(["align", str(path), "--json", str(tmp_path / "report.json"), *PAIR])
    captured = capsys.readouterr()
    assert "corpus.jsonl:2: the line is not JSON" in captured.err
    assert "corpus.jsonl:3: the line has no text under 'text'" in captured.err
    assert "left out: 2 records" in captured.out
    report = json.loads((tmp_path / "report.json").read_text())
    assert (report["documents"], report["bad_records"]) == (2, 2)
    assert "corpus.jsonl:2: the line is not JSON" in refused(capsys, str(path), "--strict")


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        pytest.param(["--text", ""], "there is no text to audit", id="empty text"),
        pytest.param([], "there is nothing to align", id="nothing"),
        pytest.param(["a.txt", "--text", "b"], "there are files and a text", id="both"),
        pytest.param(["-", "a.txt"], "standard input stands alone", id="standard input"),
        pytest.param(["absent.jsonl"], "there is no such file; check the name", id="absent"),
        pytest.param(["--text", "a", "--max-documents", "0"], "not a number of 1", id="none"),
        pytest.param(["--text", "a\udcff"], "not UTF-8 at character 1", id="surrogate"),
        pytest.param(["--text", "a", "--html", "/dev/null/x"], "cannot be written", id="html"),
    ],
)
def test_an_error_is_one_line(capsys, words, problem):
    message = refused(capsys, *words)
    assert problem in message
    assert message.count("\n") == 1


@pytest.mark.parametrize(
    ("pair", "problem"),
    [
        (PAIR[:2], "--teacher: no tokenizer is named"),
        (PAIR[2:], "--student: no tokenizer is named"),
        ((*PAIR[:2], "--teacher", "no/such/file.model"), "no/such/file.model"),
        ((*PAIR, "--tokenizer-engine", "fast"), "--tokenizer-engine"),
    ],
)
def test_a_tokenizer_that_is_not_there_is_named(capsys, pair, problem):
    assert problem in refused(capsys, "--text", "a", pair=pair)


def test_an_empty_corpus_is_refused(capsys, tmp_path):
    (tmp_path / "empty.jsonl").write_text('{"text": ""}\n')
    assert "no text to audit" in refused(capsys, str(tmp_path / "empty.jsonl"))


# The page.


def page_of(capsys, tmp_path, text, *words):
    path = tmp_path / "page.html"
    aligned(capsys, "--text", text, "--html", str(path), *words)
    return HtmlPage(path.read_text(encoding="utf-8"))


@pytest.mark.parametrize("text", [TEXT, HOSTILE])
def test_the_page_shows_every_token_of_both_sides_and_nothing_runs(
    capsys, tmp_path, tokenizers, text
):
    page = page_of(capsys, tmp_path, text)
    assert all(tag != "script" for tag, _ in page.elements)
    chunks = list(ribbon_chunks(text, *tokenizers))
    styles = {"1:1": None, "none": "o"}
    assert page.chunks == [
        (
            styles.get(chunk.kind, "x"),
            [[_shown(view) for view in side] for side in (chunk.student, chunk.teacher)],
        )
        for chunk in chunks
    ]
    ids = [int(re.match(r"id (\d+) · bytes \d+–\d+", title)[1]) for title in page.titles]
    assert ids == [
        view.token_id for c in chunks for side in (c.student, c.teacher) for view in side
    ]
    for number, tokenizer in enumerate(tokenizers):
        shown = [view.token_id for c in chunks for view in (c.student, c.teacher)[number]]
        assert shown == tokenizer.encode_with_byte_ends(text)[0].tolist()


def test_what_a_pointer_shows_of_differing_chunks_has_the_focus_of_keyboards_and_fingers(
    capsys, tmp_path, tokenizers
):
    page = page_of(capsys, tmp_path, TEXT)
    differing = [chunk for chunk in ribbon_chunks(TEXT, *tokenizers) if not chunk.is_one_to_one]
    told = [it["aria-label"] for tag, it in page.elements if tag == "b" and "tabindex" in it]
    assert len(told) == len(differing) > 0
    for words, chunk in zip(told, differing, strict=True):
        views = [*chunk.student, *chunk.teacher]
        ids = [int(token_id) for token_id in re.findall(r" id (\d+) · bytes", words)]
        assert ids == [view.token_id for view in views]
        assert len(words.split("\n")) == len(views)


def _shown(view):
    from megatron_ext.cli.pages.frame import in_line

    return in_line(view.shown) or "∅"


def test_control_characters_are_shown_by_what_fonts_of_browsers_have():
    from megatron_ext.cli.pages.frame import in_line

    assert in_line("a\r\n\tb\x1b\x00") == r"a\r↵\tb\x1b\x00"


def test_the_page_is_bounded_and_breaks_lines(capsys, tmp_path):
    text = "日本語 12\n" * 2000
    page = page_of(capsys, tmp_path, text, "--html-bytes", "100")
    assert page.side(0).replace("↵", "\n").replace("∅", "") == text.encode()[:100].decode(
        errors="ignore"
    )
    assert (tmp_path / "page.html").stat().st_size < 60_000
    assert (tmp_path / "page.html").read_text().count("<br>") == 100 // len("日本語 12\n".encode())


def test_the_kind_of_a_ribbon_chunk_counts_tokens_with_bytes(tokenizers):
    kinds = [chunk.kind for chunk in ribbon_chunks("x 2017", *tokenizers)]
    assert kinds.count("1:1") == counted(tokenizers, "x 2017").one_to_one
    assert set(kinds) <= {"1:1", "1:n", "n:1", "n:m", "none"}
