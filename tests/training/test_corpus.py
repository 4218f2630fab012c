from __future__ import annotations

import gzip
import json
from pathlib import Path

import pyarrow
import pytest
from pyarrow import parquet

from megatron_ext.errors import DataError
from megatron_ext.training.corpus import read_documents


def test_json_lines_are_documents_and_any_other_file_is_one(tmp_path: Path) -> None:
    lines, text = tmp_path / "a.jsonl", tmp_path / "b.md"
    lines.write_text('{"text": "one"}\n\n{"text": "two", "id": 3}\n')
    text.write_text("three\nlines\n")
    assert read_documents([str(text), str(lines)]) == ["three\nlines\n", "one", "two"]


def test_a_line_separator_inside_a_text_ends_no_line(tmp_path: Path) -> None:
    texts = ["a\u2028b", "c\x0cd\u0085e", "f\ng"]
    rows = "".join(json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in texts)
    (tmp_path / "a.jsonl").write_text(rows, encoding="utf-8")
    assert read_documents([str(tmp_path / "a.jsonl")]) == texts


def test_a_whole_surrogate_pair_is_its_character(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(r'{"text": "\ud83d\ude00"}')
    assert read_documents([str(tmp_path / "a.jsonl")]) == ["😀"]


def test_the_last_line_needs_no_newline(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "one"}\n{"text": "two"}')
    assert read_documents([str(tmp_path / "a.jsonl")]) == ["one", "two"]


def test_the_text_may_lie_under_another_key(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"body": "one"}\n')
    assert read_documents([str(tmp_path / "a.jsonl")], text_key="body") == ["one"]


def test_empty_documents_are_left_out_while_there_are_others(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": ""}\n{"text": "two"}\n')
    (tmp_path / "b.txt").touch()
    files = [str(tmp_path / "a.jsonl"), str(tmp_path / "b.txt")]
    assert read_documents(files) == ["two"]


def test_files_without_any_text_are_counted_and_named(tmp_path: Path) -> None:
    (tmp_path / "a.txt").touch()
    (tmp_path / "b.jsonl").touch()
    with pytest.raises(DataError, match=r"no text; got 2 empty files: .*a\.txt, .*b\.jsonl"):
        read_documents([str(tmp_path / "a.txt"), str(tmp_path / "b.jsonl")])


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('{"text": "a"', "the line is not JSON"),
        ("[]", "no text under 'text'; got list"),
        ('{"text": null}', "no text under 'text'; got a value of type NoneType"),
        ('{"text": ["a"]}', "no text under 'text'; got a value of type list"),
        ('{"body": "a", "id": 1}', "got keys ['body', 'id']; set data.text_key"),
        (r'{"text": "a\ud83d b"}', "half of a surrogate pair"),
    ],
    ids=["cut", "list", "null", "sentences", "other-key", "surrogate"],
)
def test_a_line_without_a_usable_text_is_refused_with_its_place(
    tmp_path: Path, line: str, words: str
) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text(f'{{"text": "one"}}\n\n{line}\n{{"text": "two"}}\n')
    with pytest.raises(DataError) as caught:
        read_documents([str(file)])
    assert str(caught.value).startswith(f"{file}:3: ")
    assert words in str(caught.value)


def test_bytes_that_are_no_utf8_are_refused_with_their_place(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes("ab café".encode("latin-1"))
    with pytest.raises(DataError, match=r"a\.txt: the text is not UTF-8; got .* at byte 6"):
        read_documents([str(tmp_path / "a.txt")])


def test_a_line_of_bytes_that_are_no_utf8_is_refused_with_its_place(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "a"}\n' + '{"text": "é"}'.encode("latin-1"))
    with pytest.raises(DataError, match=r"a\.jsonl:2: the line is not UTF-8; got .* at byte 10"):
        read_documents([str(tmp_path / "a.jsonl")])


@pytest.mark.parametrize(
    ("name", "words"), [("absent.txt", "No such file"), ("", "Is a directory")]
)
def test_what_cannot_be_read_is_refused(tmp_path: Path, name: str, words: str) -> None:
    with pytest.raises(DataError, match=f"the input cannot be read; got {words}"):
        read_documents([str(tmp_path / name)])


def test_compressed_lines_and_parquet_are_read_alike(tmp_path: Path) -> None:
    texts = ["one", "zwölf", "三"]
    rows = "".join(json.dumps({"text": text}) + "\n" for text in texts)
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(rows.encode()))
    parquet.write_table(pyarrow.table({"text": texts}), tmp_path / "b.parquet")
    files = [str(tmp_path / name) for name in ("a.jsonl.gz", "b.parquet")]
    assert read_documents(files) == texts * 2


def test_a_file_that_is_named_twice_counts_twice(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one")
    assert read_documents([str(tmp_path / "a.txt")] * 2) == ["one", "one"]
