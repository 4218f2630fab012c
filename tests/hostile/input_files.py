"""Small inputs of every kind, a run and a model, to be damaged."""

import gzip
import json
import shutil
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Final

import pyarrow
import yaml
from pyarrow import parquet

_VERBS: Final = ("inspect", "align", "tokenize", "projection", "distill", "run")
_OF_MODELS: Final = ("report", "evaluate", "export_hf", "import_hf")
_LATE: Final = (
    "megatron.core.datasets.indexed_dataset",
    "megatron_ext.training.run_plan",
    "megatron_ext.training.inputs",
    "megatron_ext.preprocessing.preprocess",
    "megatron_ext.tokenizers.libraries.sentencepiece",
    "megatron_ext.tokenizers.libraries.tiktoken",
    "megatron_ext.tokenizers.libraries.huggingface",
    "tokenizers",
    "torch",
)


def import_verbs(*, is_large: bool) -> None:
    """Import what the commands need, so that children begin with it."""
    names = [*_VERBS, *(_OF_MODELS if is_large else ())]
    for name in (*(f"megatron_ext.cli.{name}" for name in names), *_LATE):
        import_module(name)
    if is_large:
        import_module("megatron_ext.training.distill")


def make_small(folder: Path) -> None:
    """Tokenizers, texts, conversations, a projection and a configuration."""
    from megatron_ext.projection import SparseProjection
    from megatron_ext.tokenizers import TokenizerConfig, build_tokenizer
    from megatron_ext.training.run_folder import config_values
    from tests.tokenizers.tokenizer_files import MAKERS
    from tests.training.tiny_run import student_run, write_corpus, write_rank_list

    (folder / "out").mkdir()
    for name, maker in (
        ("hf", "huggingface-byte-level"),
        ("wordpiece", "huggingface-wordpiece"),
        ("unigram", "huggingface-unigram"),
    ):
        (folder / name).mkdir()
        MAKERS[maker](folder / name)
    config = folder / "hf" / "tokenizer_config.json"
    values = json.loads(config.read_text()) if config.exists() else {}
    values["chat_template"] = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    config.write_text(json.dumps(values))
    metadata = {"library": "huggingface", "mode": "text", "chat_template": None}
    (folder / "hf" / "tokenizer_metadata.json").write_text(json.dumps(metadata))
    write_corpus(folder)
    write_rank_list(folder)
    work = folder / "work"
    work.mkdir()
    shutil.copy(MAKERS["rank-file"](work), folder / "ranks.tiktoken")
    shutil.copy(MAKERS["sentencepiece-nfkc-bytes"](work), folder / "spm.model")
    tekken = json.loads(MAKERS["tekken"](work).read_text())
    tekken["vocab"] = tekken["vocab"][:1500]
    tekken["config"]["default_vocab_size"] = 1500 + tekken["config"]["default_num_special_tokens"]
    (folder / "tekken.json").write_text(json.dumps(tekken))
    shutil.rmtree(work)
    _write_texts(folder)
    student, teacher = (
        build_tokenizer(TokenizerConfig(model=str(folder / name))) for name in ("hf", "ranks.json")
    )
    SparseProjection.from_tokenizers(student, teacher).save(folder / "pair.safetensors")
    run = config_values(student_run(folder, "student"))
    (folder / "run.yaml").write_text(yaml.safe_dump(run, sort_keys=False))
    (folder / "script.py").write_text("import sys\nsys.exit(0)\n")


def _write_texts(folder: Path) -> None:
    rows = [{"text": f"text {number} é"} for number in range(20)]
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    (folder / "text.jsonl").write_text(lines)
    (folder / "text.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    (folder / "list.json").write_text(json.dumps(rows, indent=1))
    (folder / "a.txt").write_text("plain text\n" * 9)
    table = pyarrow.Table.from_pylist(rows)
    parquet.write_table(table, folder / "text.parquet")
    with pyarrow.ipc.new_file(folder / "text.arrow", table.schema) as file:
        file.write_table(table)
    turns = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]
    record = {"messages": turns, "tools": [], "chat_template_kwargs": {"a": 1}}
    (folder / "chat.jsonl").write_text((json.dumps(record) + "\n") * 5)


def make_large(folder: Path) -> Iterator[tuple[str, ...]]:
    """The commands that make a run and a model, and the data of tasks."""
    from megatron_ext.training.run_folder import config_values
    from tests.training.tiny_run import teacher_run

    teacher = config_values(teacher_run(folder))
    (folder / "teacher.yaml").write_text(yaml.safe_dump(teacher, sort_keys=False))
    yield "distill", "--config", "teacher.yaml"
    yield "distill", "--config", "run.yaml"
    question = {"question": "1 + 1?", "choices": ["1", "2", "3", "4"], "answer": 1, "subject": "a"}
    (folder / "mmlu.jsonl").write_text((json.dumps(question) + "\n") * 3)
    sum_ = {"question": "What is 1 + 1?", "answer": "It is 2.\n#### 2"}
    (folder / "gsm8k.jsonl").write_text((json.dumps(sum_) + "\n") * 2)
    yield "export-hf", "teacher", "model"
