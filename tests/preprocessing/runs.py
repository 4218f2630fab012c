"""Small runs of the preprocessing, and what they leave on the disk."""

import json

from tokenizers import Tokenizer, models, pre_tokenizers

from megatron_ext.preprocessing.config import PreprocessConfig
from megatron_ext.preprocessing.preprocess import preprocess
from megatron_ext.tokenizers import TokenizerConfig

BYTES = TokenizerConfig(library="byte-level")
"""A tokenizer whose ids are the bytes of the text: no file, no library."""


def write_json_lines(path, records):
    """One record a line, with characters as they are."""
    lines = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records)
    path.write_text(lines, encoding="utf-8")
    return path


def write_word_list(folder):
    """A tokenizer without any special token: a few words, and the first of them for others."""
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder / "tokenizer.json"


def config_of(*inputs, output, **options):
    """A run over ``inputs`` in this process and with the byte tokenizer, unless told otherwise."""
    return PreprocessConfig(
        inputs=tuple(map(str, inputs)),
        output_prefix=str(output),
        **{"tokenizer": BYTES, "workers": 1, **options},
    )


def run(*inputs, output, **options):
    """A whole run."""
    report = preprocess(config_of(*inputs, output=output, **options))
    assert report is not None
    return report


def contents(folder):
    """Bytes of every file under ``folder`` that is no report."""
    return {
        str(file.relative_to(folder)): file.read_bytes()
        for file in sorted(folder.rglob("*"))
        if file.is_file() and not file.name.endswith("_report.json")
    }
