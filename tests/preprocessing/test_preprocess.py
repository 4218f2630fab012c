"""Whole runs: the files are those of Megatron's own loop, whatever the shards and workers."""

import errno
import gzip
import json
import shutil
import time
from concurrent.futures import ThreadPoolExecutor

import pyarrow
import pytest
from pyarrow import parquet

from megatron_ext.documents.worker_pool import WorkerPool
from megatron_ext.errors import ConfigError, DataError, TokenizerError
from megatron_ext.files import begin_lock
from megatron_ext.preprocessing import indexed_output
from megatron_ext.preprocessing import preprocess as preprocess_module
from megatron_ext.preprocessing.preprocess import preprocess
from megatron_ext.tokenizers import TokenizerConfig, build_tokenizer
from tests.preprocessing.megatron_loop import write_one_by_one
from tests.preprocessing.runs import (
    BYTES,
    config_of,
    contents,
    run,
    write_json_lines,
    write_word_list,
)
from tests.tokenizers import tokenizer_files
from tests.tokenizers.short_tekken import tekken_file

TEXTS = [
    "A dictionary display yields a new dictionary object.",
    "",
    "Le café coûte 2,50 € ; naïveté.",
    "   ",
    "日本語の文章も、ふつうに学習できます。\nline two\r\n\tx",
    " 😀" * 40,
    "\u2028 a line separator \x85 is no newline",
    "</s> <s> <unk>",
]
RECORDS = [{"id": i, "text": text} for i, text in enumerate(TEXTS * 3)]
TOKENIZERS = {
    "bytes": lambda folder: BYTES,
    "huggingface": lambda folder: _config(tokenizer_files.byte_level(folder)),
    "wordpiece": lambda folder: _config(tokenizer_files.word_piece(folder)),
    "sentencepiece": lambda folder: _config(tokenizer_files.nfkc_sentencepiece(folder)),
    "tekken": lambda folder: _config(tekken_file()),
}


def _config(path):
    return TokenizerConfig(model=str(path))


@pytest.fixture
def file(tmp_path):
    """``RECORDS`` as lines."""
    return write_json_lines(tmp_path / "a.jsonl", RECORDS)


def whole(file):
    """What an uninterrupted run over ``file`` writes."""
    run(file, output=file.parent / "whole" / "a")
    return contents(file.parent / "whole")


@pytest.fixture
def out(tmp_path):
    """An empty folder for the output."""
    (tmp_path / "out").mkdir()
    return tmp_path / "out"


@pytest.fixture
def expected(tmp_path):
    """An empty folder for the output of Megatron's loop."""
    (tmp_path / "expected").mkdir()
    return tmp_path / "expected"


@pytest.mark.parametrize("shard_count", [1, 5], ids=["one-shard", "five-shards"])
@pytest.mark.parametrize("append_eod", [False, True], ids=["no-eod", "eod"])
@pytest.mark.parametrize("name", TOKENIZERS)
def test_the_files_are_byte_for_byte_those_of_a_loop_over_documents(
    tmp_path, out, expected, name, append_eod, shard_count, file
):
    config = TOKENIZERS[name](tmp_path)
    tokenizer = build_tokenizer(config)
    if append_eod and tokenizer.eod is None:
        pytest.skip("the tokenizer has no EOD")
    write_one_by_one(RECORDS, tokenizer, expected / "a", append_eod=append_eod)
    report = run(
        file, output=out / "a", tokenizer=config, append_eod=append_eod, shard_count=shard_count
    )
    assert contents(out) == contents(expected)
    assert report.documents == len(RECORDS)


def test_lists_of_sentences_and_several_keys_are_written_as_megatron_writes_them(
    tmp_path, out, expected
):
    records = [
        {"text": ["One.", "", " Two."], "title": "x"},
        {"text": [], "title": ""},
        {"text": ["", ""], "title": ["a", "b"]},
        {"text": "plain", "title": ["", "b"]},
    ]
    file = write_json_lines(tmp_path / "a.jsonl", records)
    keys = ("text", "title")
    write_one_by_one(records, build_tokenizer(BYTES), expected / "a", keys=keys, append_eod=True)
    run(file, output=out / "a", json_keys=keys, append_eod=True)
    assert contents(out) == contents(expected)


def test_every_kind_of_file_gives_the_same_documents_in_the_order_of_the_input(
    tmp_path, out, expected
):
    data = tmp_path / "data"
    (data / "deeper").mkdir(parents=True)
    lines = "".join(json.dumps(record) + "\n" for record in RECORDS)
    (data / "a.json").write_text(lines)
    (data / "b.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    table = pyarrow.table({"text": [record["text"] for record in RECORDS]})
    parquet.write_table(table, data / "c.parquet", row_group_size=5)
    (data / "d.txt").write_bytes(b"a text\r\n file\n")
    (data / "e.txt.gz").write_bytes(gzip.compress("zwölf".encode()))
    (data / "deeper" / "f.ndjson").write_text(lines.rstrip("\n"))
    (data / "LICENSE").write_text("of no known kind")
    (data / ".hidden.jsonl").write_text("not read")
    documents = [*RECORDS * 3, {"text": "a text\r\n file\n"}, *RECORDS, {"text": "zwölf"}]
    write_one_by_one(documents, build_tokenizer(BYTES), expected / "a")
    report = run(data, output=out / "a", shard_count=7)
    assert contents(out) == contents(expected)
    assert report.skipped_files == (str(data / "LICENSE"),)
    assert not report.bad


@pytest.mark.parametrize("has_records", [True, False])
def test_files_about_the_data_beside_records_are_not_documents(tmp_path, out, has_records):
    """A folder as the hub has it, and as the datasets library writes it; or one of texts."""
    data = tmp_path / "data"
    (data / "train").mkdir(parents=True)
    about = {"README.md": "# Card\n", "train/dataset_info.json": '{\n "text": 1\n}\n'}
    about |= {"train/state.json": '{\n "_fingerprint": 1\n}\n'} if has_records else {}
    for name, text in about.items():
        (data / name).write_text(text)
    if has_records:
        table = pyarrow.table({"text": ["one", "two"]})
        with pyarrow.ipc.new_stream(data / "train" / "data.arrow", table.schema) as stream:
            stream.write_table(table)
        (data / "state.json").write_text('{"text": "three"}\n')
        for output, name in (("a", data), ("b", data / "**")):
            report = run(name, output=out / output)
            assert report.documents == 3
            assert sorted(report.skipped_files) == sorted(str(data / name) for name in about)
    else:
        (data / "train" / "dataset_info.json").unlink()
        assert run(data, output=out / "a").documents == 1


def test_workers_and_shards_leave_no_trace_in_the_output(tmp_path, out):
    file = write_json_lines(tmp_path / "a.jsonl", [*RECORDS, {"body": "bad"}, *RECORDS])
    reports = []
    for name, workers, shard_count in (("one", 1, 1), ("many", 1, 200), ("two", 2, None)):
        (out / name).mkdir()
        run(file, output=out / name / "a", workers=workers, shard_count=shard_count)
        reports.append((out / name / "a_report.json").read_text())
    assert contents(out / "one") == contents(out / "many") == contents(out / "two")
    assert reports[0] == reports[1] == reports[2]
    assert json.loads(reports[0])["bad"][0]["place"] == f"{file}:{len(RECORDS) + 1}"


@pytest.mark.parametrize(
    ("shard_count", "cores", "processes"),
    [(None, 8, 1), (3, 8, 3), (5, 2, 2), (5, 1, 1)],
    ids=["one-shard", "few-shards", "few-cores", "one-core"],
)
def test_unless_told_otherwise_each_shard_has_a_process_as_far_as_there_are_cores(
    file, out, monkeypatch, shard_count, cores, processes
):
    started = []

    def pool_here(*, make_work, worker_count):
        started.append(worker_count)
        return WorkerPool(make_work=make_work, worker_count=1)

    monkeypatch.setattr(preprocess_module, "usable_cores", lambda: cores)
    monkeypatch.setattr(preprocess_module, "WorkerPool", pool_here)
    run(file, output=out / "a", shard_count=shard_count, workers=None)
    assert started == [processes]


def test_shards_made_one_by_one_are_put_together_by_a_last_run(tmp_path, out, file):
    for index in (2, 0, 1):
        config = config_of(file, output=out / "a", shard_count=3, shard_indices=(index,))
        assert preprocess(config) is None
        assert not config.names.existing()
    run(file, output=out / "a")
    assert contents(out) == whole(file)


def test_a_last_run_makes_what_no_other_has_made(tmp_path, out, file):
    preprocess(config_of(file, output=out / "a", shard_count=9, shard_indices=(4, 7)))
    run(file, output=out / "a", shard_count=9)
    assert contents(out) == whole(file)


def test_what_cannot_be_used_is_left_out_counted_and_listed(tmp_path, out):
    file = tmp_path / "a.jsonl"
    lines = [
        b'{"text": "one"}',
        b"",
        b'{"text": "two"',
        b'{"body": "three"}',
        b'{"text": 4}',
        rb'{"text": "\ud800"}',
        '{"text": "é"}'.encode("latin-1"),
        b'{"text": NaN}',
        b'"text"',
        b'{"text": ["a", 5]}',
        b"[" * 100_000,
        b'{"text": "last"}',
    ]
    file.write_bytes(b"\n".join(lines))
    report = run(file, output=out / "a", shard_count=3)
    assert report.documents == 2
    assert report.bad_records == 9
    problems = [
        (3, "the line is not JSON"),
        (4, "no text under 'text'; got keys ['body']; set --text-field"),
        (5, "got a value of type int"),
        (6, "the text holds half of a surrogate pair"),
        (7, "not UTF-8"),
        (8, "got a value of type float"),
        (9, "no text under 'text'; got str"),
        (10, "got a value of type list"),
        (11, "the line is not JSON"),
    ]
    assert [bad.place for bad in report.bad] == [f"{file}:{line}" for line, _ in problems]
    for bad, (_, words) in zip(report.bad, problems, strict=True):
        assert words in bad.problem
    # Said by itself: the line is JSON.
    assert report.bad[3].problem.startswith("the text holds half")
    stored = json.loads((out / "a_report.json").read_text())
    assert [row["place"] for row in stored["bad"]] == [bad.place for bad in report.bad]


def test_a_text_that_the_tokenizer_refuses_is_one_bad_record(tmp_path, out):
    texts = ["1 2 3", "4 five", "", "6"]
    file = write_json_lines(tmp_path / "a.jsonl", ({"text": text, "n": "7"} for text in texts))
    null = TokenizerConfig(library="null", vocab_size=100)
    report = run(file, output=out / "a", tokenizer=null, json_keys=("text", "n"))
    assert [bad.place for bad in report.bad] == [f"{file}:2"]
    assert report.tokens == {"text_document": 4, "n_document": 3}
    assert report.documents == 3


@pytest.mark.parametrize("shard_count", [1, 6])
def test_a_strict_run_stops_at_the_first_bad_line_with_its_place(tmp_path, out, shard_count):
    file = write_json_lines(tmp_path / "a.jsonl", [*RECORDS, {"body": ""}, {"title": ""}])
    with pytest.raises(DataError) as caught:
        run(file, output=out / "a", strict=True, shard_count=shard_count)
    assert str(caught.value).startswith(f"{file}:{len(RECORDS) + 1}: the line has no text")
    assert not config_of(file, output=out / "a").names.existing()
    assert not [path for path in out.iterdir() if not path.name.endswith(".lock")]


def test_a_strict_run_keeps_its_shards_where_the_next_start_may_succeed(tmp_path, out, monkeypatch):
    def interrupted(*_):
        raise DataError("the input cannot be read")

    file = write_json_lines(tmp_path / "a.jsonl", RECORDS)
    monkeypatch.setattr("megatron_ext.preprocessing.preprocess._make_missing", interrupted)
    with pytest.raises(DataError, match="cannot be read"):
        run(file, output=out / "a", strict=True)
    assert config_of(file, output=out / "a").names.work_folder.exists()


def test_a_strict_run_takes_no_shard_that_a_lenient_one_left(tmp_path, out):
    file = write_json_lines(tmp_path / "a.jsonl", [{"body": ""}, *RECORDS])
    preprocess(config_of(file, output=out / "a", shard_count=2, shard_indices=(0, 1)))
    with pytest.raises(DataError, match=r"a\.jsonl:1: the line has no text"):
        run(file, output=out / "a", strict=True)


def test_a_compressed_file_that_is_cut_off_gives_what_it_holds(tmp_path, out):
    records = [{"text": f"{i} {text}"} for i in range(300) for text in TEXTS]
    whole = gzip.compress("".join(json.dumps(record) + "\n" for record in records).encode())
    file = tmp_path / "a.jsonl.gz"
    file.write_bytes(whole[: len(whole) // 2])
    report = run(file, output=out / "a")
    assert 100 < report.documents < len(records)
    assert [bad.place for bad in report.bad] == [f"{file}:{report.documents + 1}"]
    assert "the compressed file is cut off" in report.bad[0].problem


@pytest.mark.parametrize(
    ("contents_of_file", "words"),
    [
        (b"", "the input holds no text"),
        (b"\n\n", "no record of the input can be used"),
        (b'{"body": "a"}\n[]\n', r"^\S*a\.jsonl:1: the line has no text"),
        (b'{"text": ""}\n', "give no tokens"),
    ],
    ids=["empty", "blank", "all-bad", "no-tokens"],
)
def test_input_without_a_usable_text_is_refused_and_leaves_nothing(
    tmp_path, out, contents_of_file, words
):
    (tmp_path / "a.jsonl").write_bytes(contents_of_file)
    with pytest.raises(DataError, match=words):
        run(tmp_path / "a.jsonl", output=out / "a")
    assert not list(out.iterdir())


def test_a_key_that_no_file_has_is_refused_before_anything_is_written(tmp_path, out):
    first = write_json_lines(tmp_path / "a.jsonl", RECORDS)
    second = write_json_lines(tmp_path / "b.jsonl", [{"id": 1, "body": "x"}] * 3)
    table = pyarrow.table({"title": ["x"]})
    parquet.write_table(table, tmp_path / "c.parquet")
    with pytest.raises(DataError, match=r"^\S*a\.jsonl:1: the line has no text under 'boddy'"):
        preprocess(
            config_of(
                first,
                second,
                tmp_path / "c.parquet",
                output=out / "a",
                json_keys=("boddy",),
                shard_count=4,
                shard_indices=(0,),
            )
        )
    assert not list(out.iterdir())
    report = run(first, second, output=out / "a", json_keys=("body",))
    assert (report.documents, report.bad_records) == (3, len(RECORDS))


@pytest.mark.parametrize("shard_count", [1, 4])
def test_bad_records_beyond_the_first_ones_are_counted_but_not_listed(
    tmp_path, out, monkeypatch, shard_count
):
    monkeypatch.setattr("megatron_ext.preprocessing.report.MOST_LISTED", 5)
    records = [{"text": "x"} if i % 3 == 0 else {"body": i} for i in range(30)]
    file = write_json_lines(tmp_path / "a.jsonl", records)
    report = run(file, output=out / "a", shard_count=shard_count)
    assert [row.place for row in report.bad] == [f"{file}:{line}" for line in (2, 3, 5, 6, 8)]
    assert (report.documents, report.bad_records, report.bad_unlisted) == (10, 20, 15)
    assert json.loads((out / "a_report.json").read_text())["bad_unlisted"] == 15


@pytest.mark.parametrize("key", ["messages", "conversations"])
def test_conversations_that_are_read_as_texts_are_told_of_the_flag(tmp_path, out, key):
    file = write_json_lines(tmp_path / "a.jsonl", [{key: [{"role": "user", "content": "x"}]}])
    with pytest.raises(DataError) as caught:
        run(file, output=out / "a")
    assert "pass --tokenizer-mode sft to read the conversations there" in str(caught.value)
    with pytest.raises(DataError, match="value of type list; pass --tokenizer-mode sft"):
        run(file, output=out / "a", json_keys=(key,))


def test_an_eod_that_the_tokenizer_lacks_is_refused_before_anything_is_written(tmp_path, out, file):
    tokenizer = _config(write_word_list(tmp_path))
    with pytest.raises(ConfigError, match="--append-eod: the tokenizer has no end-of-document"):
        run(file, output=out / "a", tokenizer=tokenizer, append_eod=True)
    assert not list(out.iterdir())


def test_an_engine_that_cannot_be_used_is_refused_before_anything_is_written(tmp_path, out, file):
    tokenizer = TokenizerConfig(model=str(write_word_list(tmp_path)), engine="gigatoken")
    with pytest.raises(TokenizerError, match="gigatoken"):
        run(file, output=out / "a", tokenizer=tokenizer)
    assert not list(out.iterdir())


def test_output_that_exists_is_replaced_only_when_told_so(tmp_path, out, file):
    other = write_json_lines(tmp_path / "b.jsonl", RECORDS[:3])
    run(file, output=out / "a")
    before = contents(out)
    with pytest.raises(ConfigError, match="the output exists already; pass --overwrite"):
        run(other, output=out / "a")
    assert contents(out) == before
    run(other, output=out / "a", overwrite=True)
    assert contents(out) == whole(other)


def test_the_output_may_lie_in_the_folder_that_is_read(tmp_path):
    data = tmp_path / "data"
    data.mkdir()
    write_json_lines(data / "a.jsonl", RECORDS)
    preprocess(config_of(data, output=data / "a", shard_count=2, shard_indices=(0,)))
    first = run(data, output=data / "a")
    second = run(data, output=data / "a", overwrite=True)
    assert first.inputs == second.inputs == [str(data / "a.jsonl")]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"append_eod": True}, "another append eod; got True; expected False"),
        ({"json_keys": ("id",)}, "another json keys"),
        ({"tokenizer": TokenizerConfig(library="byte-level", vocab_size=400)}, "another tokenizer"),
        ({"shard_count": 5}, "another number of shards; got 5; expected 4"),
    ],
    ids=["eod", "keys", "tokenizer", "shards"],
)
def test_an_unfinished_run_is_not_taken_up_by_another(file, out, options, words):
    preprocess(config_of(file, output=out / "a", shard_count=4, shard_indices=(1,)))
    with pytest.raises(ConfigError, match=words) as caught:
        run(file, output=out / "a", **options)
    assert "pass --overwrite to start again" in str(caught.value)


def test_an_unfinished_run_is_not_taken_up_with_another_input(tmp_path, out, file):
    preprocess(config_of(file, output=out / "a", shard_count=4, shard_indices=(0,)))
    write_json_lines(file, RECORDS[::-1])
    with pytest.raises(ConfigError, match=rf"the input has changed .*; got {file}; pass --overw"):
        run(file, output=out / "a")
    run(file, output=out / "a", overwrite=True)
    assert contents(out) == whole(file)


def test_to_overwrite_does_not_throw_away_what_an_unfinished_run_has_made(file, out):
    config = config_of(file, output=out / "a", shard_count=2, shard_indices=(0,))
    preprocess(config)
    part = config.names.work_folder / "00000" / "text_document.bin"
    before = part.stat().st_ino
    preprocess(
        config_of(file, output=out / "a", shard_count=2, shard_indices=(0, 1), overwrite=True)
    )
    assert part.stat().st_ino == before


def test_processes_that_overwrite_at_once_keep_what_the_first_of_them_began(
    tmp_path, out, monkeypatch, file
):
    stale = {"output": out / "a", "shard_count": 2}
    preprocess(config_of(file, **stale, shard_indices=(0,), append_eod=True))
    first = config_of(file, **stale, shard_indices=(0,), overwrite=True)
    second = config_of(file, **stale, shard_indices=(1,), overwrite=True)
    plain = preprocess_module.check_first_records

    def while_the_other_begins(*arguments):
        # Both have seen the old plan; the first one comes to its end before the second goes on.
        monkeypatch.setattr(preprocess_module, "check_first_records", plain)
        preprocess(first)

    monkeypatch.setattr(preprocess_module, "check_first_records", while_the_other_begins)
    preprocess(second)
    shards = [file.name for file in first.names.work_folder.iterdir()]
    assert sorted(shards) == ["00000", "00001", "plan.json"]
    run(file, output=out / "a")
    assert contents(out) == whole(file)


def test_a_process_that_ends_after_another_leaves_the_output_of_that_one(out, monkeypatch, file):
    config, plain = config_of(file, output=out / "a"), indexed_output._pending_datasets

    def while_the_other_ends(*arguments):
        monkeypatch.undo()
        pending = plain(*arguments)
        preprocess(config)
        return pending

    monkeypatch.setattr(indexed_output, "_pending_datasets", while_the_other_ends)
    with pytest.raises(DataError, match="another process has finished the run meanwhile"):
        preprocess(config)
    assert contents(out) == whole(file)
    assert not config.names.work_folder.exists()


def test_one_process_at_a_time_holds_the_lock_and_leaves_no_file(tmp_path):
    path, inside, most = tmp_path / "lock", [0], [0]

    def hold(_):
        with begin_lock(path):
            inside[0] += 1
            most[0] = max(most[0], inside[0])
            time.sleep(0.002)
            inside[0] -= 1

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(hold, range(40)))
    assert most == [1]
    assert not list(tmp_path.iterdir())


def test_a_write_that_fails_without_a_name_says_where(file, out, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("megatron_ext.preprocessing.encoded_documents.PartWriter.add", full)
    with pytest.raises(DataError, match=r"^\S*a\.parts: cannot write the output; got No space"):
        run(file, output=out / "a")


def test_a_damaged_part_is_found(file, out):
    config = config_of(file, output=out / "a", shard_count=2, shard_indices=(0, 1))
    preprocess(config)
    part = config.names.work_folder / "00001" / "text_document.bin"
    part.write_bytes(part.read_bytes()[:-2])
    with pytest.raises(DataError, match=r"00001.*: a finished part is damaged; .* remove .*00001"):
        run(file, output=out / "a")
    assert not config.names.existing()
    shutil.rmtree(part.parent)
    run(file, output=out / "a")
