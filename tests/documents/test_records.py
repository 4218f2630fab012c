"""Reading: every line once, wherever files are cut, and every fault with its place."""

import gzip
import json
import os
import tracemalloc
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import parquet

from megatron_ext.documents import lines
from megatron_ext.documents import lines as line_blocks
from megatron_ext.documents.record_fields import AS_THEY_ARE, RecordFields
from megatron_ext.documents.records import check_fields, cut_into_shards, lines_before, read_records
from megatron_ext.documents.source_file import (
    InputSlice,
    SourceFile,
    find_sources,
    source_file,
    source_kind,
)
from megatron_ext.errors import ConfigError, DataError

TEXT = RecordFields(("text",))
SENTENCES = RecordFields(("text",), "sentences")


def blocks_of(path, fields=TEXT):
    (pieces,) = cut_into_shards([source_file(path, source_kind(path))], 1)
    return [block for piece in pieces for block in read_records(piece, fields)]


def read(path, fields=TEXT):
    """Values under the first key, and the bad records, of a whole file."""
    blocks = blocks_of(path, fields)
    assert sum(block.size for block in blocks) == path.stat().st_size
    values = [value for block in blocks for value in block.columns[0]]
    return values, [(bad.line, bad.problem) for block in blocks for bad in block.bad]


@pytest.fixture
def small_blocks(monkeypatch):
    """Blocks of a few bytes, so that a small file has many."""
    monkeypatch.setattr(line_blocks, "BLOCK_BYTES", 7)


LINES = st.lists(
    st.one_of(
        st.text(max_size=6).map(lambda text: json.dumps({"text": text}, ensure_ascii=False)),
        st.just(""),
        st.just("no json"),
    ),
    max_size=12,
)


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.gz"])
def test_blocks_and_cuts_lose_no_line_and_double_none(tmp_path, suffix):
    path = tmp_path / f"a{suffix}"

    @settings(max_examples=60, deadline=None)
    @given(LINES, st.integers(1, 9), st.booleans())
    def check(lines, shard_count, ends_with_newline):
        content = ("\n".join(lines) + "\n" * ends_with_newline).encode()
        path.write_bytes(gzip.compress(content) if suffix.endswith(".gz") else content)
        expected_values, expected_bad = [], []
        for number, line in enumerate(lines, start=1):
            if line.startswith("{"):
                expected_values.append((number, json.loads(line)["text"]))
            elif line:
                expected_bad.append(number)
        values, bad = [], []
        file = source_file(path, source_kind(path))
        for piece in (piece for shard in cut_into_shards([file], shard_count) for piece in shard):
            before = lines_before(piece)
            for block in read_records(piece, TEXT):
                rows = zip(block.lines, block.columns[0], strict=True)
                values += [(before + line, value) for line, value in rows]
                bad += [before + (record.line or 0) for record in block.bad]
        assert values == expected_values
        assert bad == expected_bad

    check()


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 40), min_size=1, max_size=6), st.integers(1, 12))
def test_shards_are_of_about_the_same_size_and_in_order(sizes, count):
    files = [SourceFile(f"/{i}", "json-lines", size, 0) for i, size in enumerate(sizes)]
    shards = cut_into_shards(files, count)
    assert len(shards) == count
    pieces = [piece for shard in shards for piece in shard]
    for file in filter(lambda file: file.size, files):
        own = [piece for piece in pieces if piece.path == file.path]
        assert own[0].start == 0
        assert own[-1].stop == file.size
        assert all(a.stop == b.start for a, b in pairwise(own))
    assert [piece.path for piece in pieces] == sorted(piece.path for piece in pieces)
    shares = [sum(piece.size for piece in shard) for shard in shards]
    assert sum(shares) == sum(sizes)
    assert max(shares) - min(shares) <= 1


@pytest.mark.parametrize("has_orjson", [True, False], ids=["orjson", "json"])
@pytest.mark.parametrize(
    "line",
    [
        '{"text": "a", "x": NaN}',
        '{"text": "a", "x": 123456789012345678901234567890}',
        '{"text": "a", "text": "b"}',
        r'{"text": "\ud83d\ude00"}',
        r'{"text": "\ud83d"}',
        r'{"text": "a", "other": "\udc00"}',
        '{"text": "a"} {"text": "b"}',
        '{"text": "a\tb"}',
        '\ufeff{"text": "a"}',
    ],
    ids=["nan", "big", "twice", "pair", "half", "half-elsewhere", "two", "tab", "mark"],
)
def test_a_line_is_judged_alike_with_and_without_orjson(line, has_orjson, monkeypatch):
    judged = {
        '{"text": "a", "x": NaN}': "a",
        '{"text": "a", "x": 123456789012345678901234567890}': "a",
        '{"text": "a", "text": "b"}': "b",
        r'{"text": "\ud83d\ude00"}': "😀",
    }
    assert lines._fast_loads is not None
    if not has_orjson:
        monkeypatch.setattr(lines, "_fast_loads", None)
    block = lines.parse_lines([line.encode()], TEXT, first_line=1)
    assert block.columns[0] == ([judged[line]] if line in judged else [])
    assert len(block.bad) == (line not in judged)
    as_it_is = lines.parse_lines([line.encode()], AS_THEY_ARE, first_line=1)
    assert len(as_it_is.bad) == (line not in judged and "\\ud" not in line)


@pytest.mark.parametrize("damage", ["cut", "checksum", "garbage-behind", "no-gzip"])
def test_a_damaged_compressed_file_gives_its_lines_up_to_the_damage(tmp_path, damage):
    lines = b"".join(b'{"text": "%d"}\n' % i for i in range(1000))
    whole = gzip.compress(lines)
    content = {
        "cut": whole[:-40],
        "checksum": whole[:-8] + b"\0\0\0\0" + whole[-4:],
        "garbage-behind": whole + b"garbage",
        "no-gzip": lines,
    }[damage]
    (tmp_path / "a.jsonl.gz").write_bytes(content)
    values, bad = read(tmp_path / "a.jsonl.gz")
    assert values == [str(i) for i in range(len(values))]
    assert len(bad) == 1
    line, problem = bad[0]
    assert line == len(values) + 1
    assert "cut off or damaged" in problem
    assert len(values) == {"checksum": 1000, "garbage-behind": 1000, "no-gzip": 0}.get(
        damage, len(values)
    )
    if damage == "cut":
        assert 500 < len(values) < 1000


def test_a_compressed_file_may_have_several_members(tmp_path):
    members = [gzip.compress(b'{"text": "a"}\n{"te'), gzip.compress(b'xt": "b"}\n')]
    (tmp_path / "a.jsonl.gz").write_bytes(b"".join(members))
    assert read(tmp_path / "a.jsonl.gz") == (["a", "b"], [])


def test_parquet_rows_keep_their_order_and_their_numbers(tmp_path):
    texts = [str(i) if i % 10 else None for i in range(95)]
    table = pyarrow.table({"other": range(95), "text": texts})
    parquet.write_table(table, tmp_path / "a.parquet", row_group_size=20)
    values, bad = read(tmp_path / "a.parquet")
    assert values == [text for text in texts if text is not None]
    assert [line for line, _ in bad] == [i + 1 for i in range(95) if i % 10 == 0]
    file = source_file(tmp_path / "a.parquet", "parquet")
    pieces = [piece for shard in cut_into_shards([file], 3) for piece in shard]
    assert [lines_before(piece) for piece in pieces] == [0, 40, 80]
    assert sum(piece.size for piece in pieces) == file.size


def test_parquet_lists_are_sentences(tmp_path):
    table = pyarrow.table({"text": [["a", "b"], [], ["c", None]]})
    parquet.write_table(table, tmp_path / "a.parquet")
    values, bad = read(tmp_path / "a.parquet", SENTENCES)
    assert values == [["a", "b"], []]
    assert [line for line, _ in bad] == [3]


def test_a_parquet_text_that_is_no_utf8_is_one_bad_row(tmp_path):
    column = pyarrow.array([b"a", b"\xff\xfe", b"c"], pyarrow.binary()).view(pyarrow.string())
    parquet.write_table(pyarrow.table({"text": column}), tmp_path / "a.parquet")
    values, bad = read(tmp_path / "a.parquet")
    assert values == ["a", "c"]
    assert bad == [(2, "the row is not UTF-8; got Invalid UTF8 sequence at string index 0")]


def test_an_arrow_row_that_points_beyond_the_text_is_a_bad_one(tmp_path):
    offsets = np.array([0, 2, 1 << 30, 4, 6], np.int32)
    buffers = [None, pyarrow.py_buffer(offsets), pyarrow.py_buffer(b"abcdef")]
    column = pyarrow.Array.from_buffers(pyarrow.string(), 4, buffers)
    batch = pyarrow.RecordBatch.from_arrays([column], ["text"])
    with pyarrow.OSFile(str(tmp_path / "a.arrow"), "wb") as file:
        writer = pyarrow.ipc.new_file(file, batch.schema)
        writer.write(batch)
        writer.close()
    values, bad = read(tmp_path / "a.arrow")
    assert values == ["ab", "ef"]
    assert [line for line, _ in bad] == [2, 3]
    assert all("the row is damaged; got " in problem for _, problem in bad)


def test_a_parquet_file_without_the_column_counts_all_of_its_rows_as_bad(tmp_path):
    table = pyarrow.table({"body": ["a"] * 30})
    parquet.write_table(table, tmp_path / "a.parquet", row_group_size=20)
    bad = [record for block in blocks_of(tmp_path / "a.parquet") for record in block.bad]
    assert [(record.line, record.rows) for record in bad] == [(1, 20), (21, 10)]
    assert "no text under 'text'; got keys ['body']" in bad[0].problem


def test_a_damaged_row_group_counts_the_rows_that_are_lost(tmp_path):
    path = tmp_path / "a.parquet"
    texts = [f"text number {i}" for i in range(4000)]
    parquet.write_table(pyarrow.table({"text": texts}), path, row_group_size=2000)
    content = bytearray(path.read_bytes())
    begin = parquet.ParquetFile(path).metadata.row_group(1).column(0).dictionary_page_offset
    content[begin : begin + 200] = b"\xff" * 200
    path.write_bytes(bytes(content))
    blocks = blocks_of(path)
    assert [value for block in blocks for value in block.columns[0]] == texts[:2000]
    bad = [record for block in blocks for record in block.bad]
    assert [(record.line, record.rows) for record in bad] == [(2001, 2000)]


def test_what_is_no_parquet_is_refused_before_anything_is_read(tmp_path):
    (tmp_path / "a.parquet").write_bytes(b"PAR1 and nothing more")
    with pytest.raises(DataError, match=r"a\.parquet: the Parquet file cannot be read"):
        cut_into_shards([source_file(tmp_path / "a.parquet", "parquet")], 1)


def _write_rows(path, texts):
    rows = [{"text": text} for text in texts]
    if path.suffix == ".parquet":
        parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    elif path.suffix == ".arrow":
        table = pyarrow.Table.from_pylist(rows)
        with pyarrow.ipc.new_file(path, table.schema) as file:
            file.write_table(table)
    else:
        lines = "\n".join(map(json.dumps, rows))
        content = f"[\n{lines.replace('}', '},', 2)}\n]" if "list" in path.name else lines
        write = gzip.open if path.suffix == ".gz" else open
        with write(path, "wb") as file:
            file.write(content.encode())


@pytest.mark.parametrize(
    "name", ["a.jsonl", "a.jsonl.gz", "list.json", "list.json.gz", "a.parquet", "a.arrow"]
)
@pytest.mark.parametrize("size", [999, 5000])
def test_a_record_that_is_too_long_is_bad_and_its_neighbours_are_read(
    tmp_path, small_blocks, name, size
):
    _write_rows(tmp_path / name, ["first", "x" * size, "last"])
    values, bad = read(tmp_path / name, RecordFields(("text",), most_bytes=900))
    assert values == ["first", "last"]
    ((line, problem),) = bad
    assert line == (3 if "list" in name else 2)
    assert problem.startswith("the record is too long; got more than 900 bytes; cut it")


def test_slices_that_begin_in_a_record_that_is_too_long_skip_it(tmp_path, small_blocks):
    path = tmp_path / "a.jsonl"
    _write_rows(path, ["first", "x" * 5000, "last"])
    fields = RecordFields(("text",), most_bytes=900)
    shards = cut_into_shards([source_file(path, "json-lines")], 7)
    blocks = [block for shard in shards for piece in shard for block in read_records(piece, fields)]
    assert [value for block in blocks for value in block.columns[0]] == ["first", "last"]
    assert sum(len(block.bad) for block in blocks) == 1


@pytest.mark.parametrize("name", ["a.txt", "a.txt.gz"])
def test_a_text_that_is_too_long_is_bad(tmp_path, name):
    write = gzip.open if name.endswith(".gz") else open
    with write(tmp_path / name, "wb") as file:
        file.write(b"x" * 901)
    assert read(tmp_path / name, RecordFields(("text",), most_bytes=901)) == (["x" * 901], [])
    values, bad = read(tmp_path / name, RecordFields(("text",), most_bytes=900))
    assert values == []
    assert "too long" in bad[0][1]


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz"])
def test_no_more_of_a_record_is_held_than_its_limit(tmp_path, name):
    write = gzip.open if name.endswith(".gz") else open
    with write(tmp_path / name, "wb") as file:
        for _ in range(96):
            file.write(bytes(1 << 20))
    tracemalloc.start()
    assert len(read(tmp_path / name, RecordFields(("text",), most_bytes=1 << 20))[1]) == 1
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 48 << 20


def test_a_file_that_became_shorter_is_refused(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "a"}\n')
    piece = InputSlice(str(path), "json-lines", 0, 100, 100)
    with pytest.raises(DataError, match="has become shorter while it was read; got 14 bytes"):
        list(read_records(piece, TEXT))


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        (RecordFields(("text", "title")), "plain text has no fields; got the keys text, title"),
        (RecordFields(("messages",), "conversation"), "plain text holds no conversations"),
    ],
    ids=["keys", "conversation"],
)
def test_plain_text_gives_one_text_only(tmp_path, fields, words):
    (tmp_path / "a.txt").write_text("a")
    with pytest.raises(ConfigError, match=words):
        check_fields([source_file(tmp_path / "a.txt", "text")], fields)


@pytest.mark.parametrize("name", ["a.txt", "a.txt.gz"])
def test_the_byte_order_mark_of_a_text_is_none_of_it(tmp_path, name):
    content = "\ufeffa\r\n\ufeffb".encode()
    (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith("gz") else content)
    assert read(tmp_path / name) == (["a\r\n\ufeffb"], [])


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("a.jsonl", "json-lines"),
        ("a.JSON.GZ", "json-lines-gzip"),
        ("a.parquet", "parquet"),
        ("a.md", "text"),
        ("README", "text"),
        ("a.log.gz", "text-gzip"),
    ],
)
def test_a_name_tells_what_a_file_holds(name, kind):
    assert source_kind(name) == kind


def test_inputs_are_files_folders_and_patterns_in_the_order_of_their_names(tmp_path):
    for name in ("b.txt", "a.jsonl", "sub/z.txt", "sub/y.json", "[x].txt", "c.bin"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x")

    def names(*inputs):
        files = find_sources([str(tmp_path / name) for name in inputs]).files
        return [str(Path(file.path).relative_to(tmp_path)) for file in files]

    assert names("") == ["[x].txt", "a.jsonl", "b.txt", "sub/y.json", "sub/z.txt"]
    assert names("b.txt", "a.jsonl", "c.bin") == ["b.txt", "a.jsonl", "c.bin"]
    assert names("*.txt") == ["[x].txt", "b.txt"]
    assert names("[x].txt") == ["[x].txt"]
    assert names("**/*.json", "sub/z.txt") == ["sub/y.json", "sub/z.txt"]


def test_a_folder_that_links_to_itself_is_read_once(tmp_path):
    (tmp_path / "a.txt").write_text("x")
    (tmp_path / "again").symlink_to(tmp_path)
    (tmp_path / "b.txt").symlink_to(tmp_path / "a.txt")
    files = find_sources([str(tmp_path)]).files
    assert [file.path for file in files] == [str(tmp_path / "a.txt"), str(tmp_path / "b.txt")]


def test_a_pipe_is_refused(tmp_path):
    os.mkfifo(tmp_path / "a.jsonl")
    with pytest.raises(DataError, match=r"a\.jsonl: the input is not a regular file"):
        find_sources([str(tmp_path / "a.jsonl")])


@pytest.mark.parametrize(
    ("names", "words"),
    [
        (["absent.jsonl"], "there is no such file; check --input"),
        (["*.parquet"], "the pattern matches no file"),
        (["a.txt", "a.txt"], "the file is named twice"),
        (["other"], "no file of a known kind; got 1 other file; expected .jsonl"),
        (["a.jsonl.ZST"], "a compression that is not read; expected .*gzip.*; unpack it"),
    ],
    ids=["absent", "pattern", "twice", "unknown", "zstandard"],
)
def test_an_input_that_stands_for_nothing_is_refused(tmp_path, names, words):
    (tmp_path / "a.txt").write_text("x")
    (tmp_path / "a.jsonl.ZST").write_bytes(b"(\xb5/\xfd")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "LICENSE").write_text("x")
    with pytest.raises(DataError, match=words):
        find_sources([str(tmp_path / name) for name in names])
