"""``megatron-ext tokenize`` as a user calls it."""

import json
import time

import numpy as np
import psutil
import pytest
from megatron.core.datasets.indexed_dataset import IndexedDataset

from megatron_ext.cli.main import main
from megatron_ext.tokenizers import MegatronTokenizer
from tests.cli.run_files import kill, refusal, start
from tests.fork_server import run_python
from tests.preprocessing.runs import contents, write_json_lines
from tests.tokenizers.tokenizer_files import byte_level

BYTES = ("--tokenizer-library", "byte-level")
TEXTS = ["one", "zwölf", "", "三 tokens", "line\nline"]


@pytest.fixture
def corpus(tmp_path):
    """A few records."""
    return write_json_lines(tmp_path / "a.jsonl", ({"text": text} for text in TEXTS))


def tokenize(*arguments):
    """The verb in this process, over bytes."""
    main(["tokenize", *BYTES, *map(str, arguments)])


def refused(capsys, *arguments):
    """The one line with which the verb ends."""
    *_, line = refusal(capsys, "tokenize", *BYTES, *arguments).splitlines()
    return line.removeprefix("megatron-ext: error: ")


def test_a_run_says_what_came_of_it(tmp_path, corpus, capsys):
    corpus.write_text(corpus.read_text() + "no json\n")
    tokenize("--input", corpus, "--output-prefix", tmp_path / "out" / "a")
    output, errors = capsys.readouterr()
    size = sum(len(text.encode()) for text in TEXTS)
    assert f"5 documents, 0.0 MB of text, {size} tokens in text_document, 1 empty, 1 left out" in (
        output
    )
    assert output.endswith(f"written: {tmp_path / 'out' / 'a_text_document'} (.bin, .idx)\n")
    assert f"left out: {corpus}:6: the line is not JSON" in errors
    assert "MB/s of text" in errors
    assert f"output_prefix: {tmp_path / 'out' / 'a'}\n" in output
    assert "tokenizer:\n  library: byte-level\n" in output
    dataset = IndexedDataset(str(tmp_path / "out" / "a_text_document"))
    assert [bytes(row.astype(np.uint8)).decode() for row in dataset] == [t for t in TEXTS if t]
    report = json.loads((tmp_path / "out" / "a_report.json").read_text())
    assert report["bad"][0]["place"] == f"{corpus}:6"


def test_a_path_from_the_users_folder_is_found_there_behind_an_equals_sign_too(
    tmp_path, corpus, monkeypatch
):
    monkeypatch.setenv("HOME", str(tmp_path))
    tokenize(f"--input=~/{corpus.name}", "--output-prefix=~/out/a")
    assert (tmp_path / "out" / "a_text_document.bin").is_file()


@pytest.mark.parametrize(
    ("flags", "asked", "said"),
    [
        ((), "", "read as alpaca (instruction and output, or question and answer, prompt and comp"),
        (
            ("--conversation-schema", "sharegpt"),
            "conversation_schema: sharegpt\n",
            "1 left out, 0 without a trained token, read as sharegpt (conversations, each with fr",
        ),
    ],
    ids=["auto", "named"],
)
def test_a_run_over_conversations_says_how_it_read_them(tmp_path, capsys, flags, asked, said):
    template = tmp_path / "chat.jinja"
    template.write_text("{% for m in messages %}{{ m.role }}: {{ m.content }};{% endfor %}")
    pair = {"instruction": "q", "output": "a"}
    turns = [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]
    rows = [pair, {**pair, "conversations": turns}] if flags else [pair]
    chat = write_json_lines(tmp_path / "chat.jsonl", rows)
    mode = ("--tokenizer-mode", "sft", "--tokenizer-prompt-format", f"file:{template}")
    tokenize("--input", chat, "--output-prefix", tmp_path / "a", *mode, *flags)
    output = capsys.readouterr().out
    assert said in output
    assert asked in output
    assert ("conversation_schema" in output) == bool(flags)
    dataset = IndexedDataset(str(tmp_path / "a_messages_document"))
    assert [bytes(row.astype(np.uint8)) for row in dataset] == [b"user: q;assistant: a;"]


def test_named_templates_write_records_with_and_without_tools(tmp_path, capsys):
    model = byte_level(tmp_path)
    turns = "{% for m in messages %}{{ m.content }}<|end|>{% endfor %}"
    named = {"default": turns, "tool_use": f"TOOLS{turns}", "rag": f"RAG{turns}"}
    rows = [{"name": name, "template": source} for name, source in named.items()]
    config = model / "tokenizer_config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "chat_template": rows}))
    chat = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    file = write_json_lines(
        tmp_path / "chat.jsonl", [{"messages": chat}, {"messages": chat, "tools": tools}]
    )
    mode = ("--tokenizer-model", str(model), "--tokenizer-mode", "sft")
    choice = "chat template default of default, rag, tool_use; with tools tool_use"
    for asked, begins in (((), ["", "TOOLS"]), (("--chat-template", "rag"), ["RAG", "RAG"])):
        out = tmp_path / "-".join(("a", *asked))
        main(["tokenize", "--input", str(file), "--output-prefix", str(out), *mode, *asked])
        said = capsys.readouterr().out
        main(["inspect", "--conversation", str(file), "--record", "all", *mode, *asked])
        shown = capsys.readouterr().out
        assert (choice in said) == (choice in shown) == (not asked)
        tokenizer = MegatronTokenizer.from_pretrained(model)
        rows = IndexedDataset(f"{out}_messages_document")
        masks = IndexedDataset(f"{out}_messages_loss_mask")
        assert [tokenizer.detokenize(row) for row in rows] == [
            f"{begin}q<|end|>a<|end|>" for begin in begins
        ]
        trained = [row[mask > 0] for row, mask in zip(rows, masks, strict=True)]
        assert [tokenizer.detokenize(row) for row in trained] == ["a<|end|>"] * 2
    error = refusal(capsys, "tokenize", "--input", file, "-o", "x", *mode, "--chat-template", "RAG")
    assert "chat_template: there is no such chat template; got 'RAG'; expected Jinja" in error
    assert error.endswith("or a name: default, rag, tool_use\n")


def test_a_shard_says_that_it_is_finished(tmp_path, corpus, capsys):
    flags = ("--input", corpus, "--output-prefix", tmp_path / "a", "--shard-count", 2)
    for index in (0, 1):
        tokenize(*flags, "--shard-index", index)
        assert capsys.readouterr().out.endswith(f"finished: shard {index} of 2\n")
    tokenize(*flags)
    assert (tmp_path / "a_text_document.idx").exists()


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        (["--input", "absent.jsonl"], "absent.jsonl: there is no such file"),
        (["--input", "a.jsonl", "--output-prefix", "out/"], "--output-prefix: the prefix names"),
        (
            ["--input", "a.jsonl", "--workers", "0"],
            "--workers: too few; got 0; expected 1 to 4,096",
        ),
        (["--input", "a.jsonl", "--workers", "9" * 30], "--workers: too many"),
        (["--input", "a.jsonl", "--shards", "0"], "--shards: too few"),
        (["--input", "a.jsonl", "--shard-index", "0"], "--shard-index: one shard of how many?"),
        (
            ["--input", "a.jsonl", "--shards", "2", "--shard-index", "2"],
            "--shard-index: there is no such shard; got 2; expected 0 to 1",
        ),
        (["--input", "a.jsonl", "--json-keys", "a/b"], "--text-field: the key cannot be part of"),
        (["--input", "a.jsonl", "--json-keys", "a", "a"], "--text-field: a key is named twice"),
        (["--input", "a.jsonl", "--text-field", "body"], "a.jsonl:1: the line has no text under"),
        (["--input", "a.jsonl", "--json-keys", "body", "--strict"], "a.jsonl:1: the line has no"),
        (["--input", "a.jsonl", "--split-sentences"], "--split-sentences: sentences are not split"),
        (["--input", "a.jsonl", "--tokenizer-mode", "multimodal"], "a multimodal tokenizer needs"),
        (
            ["--input", "a.jsonl", "--tokenizer-prompt-format", "chatml"],
            "--tokenizer-prompt-format: a prompt format is named, and texts have no use for one; "
            "got chatml; add --tokenizer-mode sft where the records hold conversations",
        ),
        (["--input", "a.jsonl", "--no-such-flag"], "unrecognized arguments: --no-such-flag"),
    ],
    ids=lambda value: " ".join(value[2:] or value) if isinstance(value, list) else "",
)
def test_what_cannot_be_done_is_one_line_and_exit_code_2(
    tmp_path, corpus, capsys, monkeypatch, flags, line
):
    monkeypatch.chdir(tmp_path)
    prefix = [] if "--output-prefix" in flags else ["--output-prefix", "out/a"]
    assert line in refused(capsys, *flags, *prefix)
    assert not list(tmp_path.glob("out/*document*"))


def test_output_that_cannot_be_written_is_one_line(tmp_path, corpus, capsys):
    (tmp_path / "file").touch()
    line = refused(capsys, "--input", corpus, "--output-prefix", tmp_path / "file" / "a")
    assert "cannot write the output; got Not a directory" in line


def test_an_interrupted_run_says_that_it_can_go_on(tmp_path, corpus, capsys, monkeypatch):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("megatron_ext.preprocessing.preprocess.assemble", interrupted, raising=True)
    flags = ("--input", corpus, "--output-prefix", tmp_path / "a")
    with pytest.raises(SystemExit) as exit:
        tokenize(*flags)
    assert exit.value.code == 130
    *_, line = capsys.readouterr().err.splitlines()
    assert line == "megatron-ext: interrupted; the same command takes the run up again"
    monkeypatch.undo()
    tokenize(*flags)
    assert (tmp_path / "a_text_document.idx").exists()


def test_the_help_loads_nothing_heavy():
    code = (
        "import sys; from megatron_ext.cli.main import main\n"
        "try: main(['tokenize', '--help'])\n"
        "except SystemExit: pass\n"
        "assert not {'torch', 'megatron.core', 'pyarrow', 'transformers'} & sys.modules.keys()"
    )
    printed = run_python(code).stdout
    assert "--shard-index" in printed
    assert "--tokenizer-prompt-format" in printed


def test_nothing_but_the_builder_loads_torch(tmp_path, corpus):
    code = (
        "import sys; from megatron_ext.cli.main import main; "
        f"main(['tokenize', '--tokenizer-library', 'byte-level', '--input', {str(corpus)!r}, "
        f"'--output-prefix', {str(tmp_path / 'a')!r}, '--shards', '1', '--shard-index', '0']); "
        "assert not {'torch', 'megatron.core'} & sys.modules.keys()"
    )
    run_python(code)


def test_a_killed_run_leaves_no_worker_and_goes_on_to_the_same_output(tmp_path):
    long = "a text that is long enough to take some time " * 20
    corpus = write_json_lines(tmp_path / "a.jsonl", ({"text": f"{i} {long}"} for i in range(6000)))
    flags = ["tokenize", "--tokenizer-library", "byte-level", "--append-eod", "--input"]
    flags += [str(corpus), "--shards", "60", "--workers", "2", "--output-prefix"]
    process = start(*flags, str(tmp_path / "out" / "a"))
    try:
        workers = _wait_for_a_shard(process, tmp_path / "out" / "a.parts")
        process.kill()
        process.wait()
        _, alive = psutil.wait_procs(workers, timeout=30)
        assert not alive
    finally:
        kill(process)
    finished = len(list((tmp_path / "out" / "a.parts").glob("0*")))
    assert 0 < finished < 60
    assert not (tmp_path / "out" / "a_text_document.idx").exists()
    for name in ("out", "whole"):
        main([*flags, str(tmp_path / name / "a")])
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def _wait_for_a_shard(process, parts):
    """The processes under ``process`` when the first shard is finished."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and process.poll() is None:
        if list(parts.glob("0*")):
            return psutil.Process(process.pid).children(recursive=True)
        time.sleep(0.005)
    raise AssertionError(f"no shard was finished: {process.poll()}")
