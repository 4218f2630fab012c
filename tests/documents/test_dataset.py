import gzip
import json
import pickle

import pytest
from torch.utils.data import DataLoader

from megatron_ext import ArrowTextDataset
from megatron_ext.errors import DataError
from tests.documents.corpus_files import (
    DOCUMENTS,
    KINDS,
    write_arrow,
    write_lines,
    write_parquet,
    write_stream,
)


def texts_of(dataset):
    return [dataset[index]["text"] for index in range(len(dataset))]


@pytest.mark.parametrize("name", KINDS)
def test_every_kind_of_file_gives_the_same_documents(name, tmp_path):
    dataset = ArrowTextDataset(KINDS[name](tmp_path / name))
    assert texts_of(dataset) == list(DOCUMENTS)
    assert dataset.sizes.tolist() == [len(text.encode()) for text in DOCUMENTS]
    assert dataset.report.bytes == sum(len(text.encode()) for text in DOCUMENTS)
    assert dataset[3] == {"text": "x" * 300, "index": 3}


def test_a_folder_and_a_pattern_give_all_files_in_order(tmp_path):
    write_parquet(tmp_path / "b.parquet")
    write_lines(tmp_path / "a.jsonl", ["first"])
    (tmp_path / "c.txt").write_text("plain\ntext")
    (tmp_path / "d.md.gz").write_bytes(gzip.compress(b"compressed"))
    expected = ["first", *DOCUMENTS, "plain\ntext", "compressed"]
    assert texts_of(ArrowTextDataset(tmp_path)) == expected
    assert texts_of(ArrowTextDataset([str(tmp_path / "a*"), tmp_path / "b.parquet"])) == [
        "first",
        *DOCUMENTS,
    ]


def test_rows_without_text_are_counted_with_file_and_row(tmp_path):
    path = write_lines(tmp_path / "a.jsonl", ["good", "", None, 3, "last"])
    path.write_bytes(path.read_bytes() + b'{"text": "cut o\n\n{"body": "x"}\n')
    dataset = ArrowTextDataset(path)
    assert texts_of(dataset) == ["good", "last"]
    assert [dataset.place(index) for index in (0, 1)] == [f"{path}:1", f"{path}:5"]
    report = dataset.report
    assert (report.rows, report.documents, report.empty_rows, report.bad_rows) == (8, 2, 1, 4)
    assert [place.split(": ")[0] for place in report.places] == [
        f"{path}:{row}" for row in (2, 3, 4, 6, 8)
    ]


@pytest.mark.parametrize("is_cached", [False, True])
def test_strict_stops_at_the_first_row_without_text(is_cached, tmp_path):
    path = write_parquet(tmp_path / "a.parquet", ["good", None, ""])
    if is_cached:
        assert ArrowTextDataset(path).report.bad_rows == 1
    with pytest.raises(DataError, match=r"a\.parquet:2: the line has no text under 'text'"):
        ArrowTextDataset(path, strict=True)


@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet", "a.arrow"])
def test_a_missing_column_is_named_with_what_there_is(name, tmp_path):
    write = {"a.jsonl": write_lines, "a.parquet": write_parquet, "a.arrow": write_arrow}[name]
    with pytest.raises(DataError, match=rf"no text.*{name}:1: .*'body'.*keys \[.*'text'"):
        ArrowTextDataset(write(tmp_path / name), text_key="body")


@pytest.mark.parametrize("name", ["a.parquet", "a.arrow"])
def test_a_file_that_is_none_of_its_kind_is_refused(name, tmp_path):
    (tmp_path / name).write_bytes(b"PAR1" * 50)
    with pytest.raises(DataError, match=rf"{name}: the .* file cannot be read"):
        ArrowTextDataset(tmp_path / name)


def test_a_stream_that_breaks_off_gives_what_is_before(tmp_path):
    path = write_stream(tmp_path / "a.arrow")
    path.write_bytes(path.read_bytes()[:-200])
    dataset = ArrowTextDataset(path)
    assert texts_of(dataset) == list(DOCUMENTS[:4])
    assert dataset.report.bad_rows == 1
    assert dataset.report.places[0].startswith(f"{path}:5: the file is damaged from this row on")


def test_an_empty_corpus_is_refused(tmp_path):
    with pytest.raises(DataError, match="the corpus holds no text"):
        ArrowTextDataset(write_lines(tmp_path / "a.jsonl", []))
    with pytest.raises(DataError, match="no such file"):
        ArrowTextDataset(tmp_path / "b.jsonl")


def test_the_index_is_built_once_and_anew_when_a_file_changes(tmp_path, monkeypatch):
    path = write_lines(tmp_path / "a.jsonl")
    first = ArrowTextDataset(path, cache_dir=tmp_path / "cache")
    with monkeypatch.context() as patch:
        patch.setattr("megatron_ext.documents.index._IndexBuilder.add", None)
        assert texts_of(ArrowTextDataset(path, cache_dir=tmp_path / "cache")) == list(DOCUMENTS)
    fresh = pickle.loads(pickle.dumps(first))
    write_lines(path, ["other"])
    with pytest.raises(DataError, match="has changed since"):
        fresh.content(0)
    assert texts_of(ArrowTextDataset(path, cache_dir=tmp_path / "cache")) == ["other"]


def test_workers_read_what_the_main_process_reads(tmp_path):
    write_parquet(tmp_path / "a.parquet")
    write_stream(tmp_path / "b.arrow")
    (tmp_path / "c.json").write_text(json.dumps({"text": "one\ntwo"}))
    dataset = ArrowTextDataset(tmp_path)
    loader = DataLoader(dataset, batch_size=None, num_workers=2)
    assert [item["text"] for item in loader] == texts_of(dataset)


def test_what_to_mend_is_named_as_the_data_set_names_it(tmp_path):
    with pytest.raises(DataError, match="there is no such file; check data_files"):
        ArrowTextDataset(tmp_path / "none.jsonl")
    (tmp_path / "a.txt").write_text("text")
    with pytest.raises(DataError, match=r"data set cannot be written.*cache_dir"):
        ArrowTextDataset(tmp_path / "a.txt", cache_dir=tmp_path / "a.txt")
