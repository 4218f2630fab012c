"""Digit schemes, the audit's numbers, and a tokenizer that keeps the old digits."""

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_ext.cli.main import main
from megatron_ext.tokenizers import TokenizerConfig, build_tokenizer
from megatron_ext.transfer.audit import audit_transfer
from megatron_ext.transfer.digits import digit_pieces, digit_scheme, keep_digits
from tests.alignment.shared_text import SHARED, needs_shared, published

NEW = ["tiny", *(("llama3_2", "qwen3", "gpt2") if os.environ.get("MEGATRON_EXT_ALL_TEXT") else ())]
TEXTS = ["In 1984 there were 365 days.", "Ещё одна строка, и 12 чисел.", "日本語"]


@needs_shared
@pytest.mark.parametrize(
    ("name", "scheme"),
    [("gpt2", "by merges"), ("qwen3", "one by one"), ("llama3_2", "threes from the left")],
)
def test_the_digit_schemes_of_published_tokenizers(name, scheme):
    assert digit_scheme(published(name)) == scheme


@needs_shared
def test_an_audit_counts_what_the_tokenizers_do(capsys):
    old, new = published("qwen3"), published("llama3_2")
    found = audit_transfer(old, new, TEXTS)
    assert found.digits == ("one by one", "threes from the left")
    assert found.numbers["1110"] == ([1, 1, 1, 1], [3, 1])
    assert found.copied + found.spelled == found.ordinary == 128_000
    common = {old.token_bytes(i) for i in range(old.vocab_size)} - {None, b""}
    ordinary = (new.token_bytes(i) for i in range(new.vocab_size))
    assert found.copied == sum(token in common for token in ordinary if token)
    assert any("--keep-digits" in warning for warning in found.warnings)
    assert found.means == 0
    unspelled = replace(found, spelled=0)
    assert unspelled.means == found.spelled
    assert any("their rows are the mean" in warning for warning in unspelled.warnings)
    specials = {row.role: row for row in found.specials}
    assert specials["eos"].source == "<|im_end|>"
    assert specials["bos"].source is None
    total = sum(len(text.encode()) for text in TEXTS)
    assert sum(row.bytes for row in found.fertility) == total
    tokens = sum(row.bytes / row.new for row in found.fertility)
    assert tokens == pytest.approx(sum(len(new.text_to_ids(text)) for text in TEXTS))
    assert {"Latin", "Cyrillic", "Han"} <= {row.script for row in found.fertility}


def test_scripts_that_follow_each_other_without_a_space_are_told_apart(untied, new_tokenizer):
    old, new = (build_tokenizer(TokenizerConfig(model=str(it))) for it in (untied, new_tokenizer))
    text = "the 吾輩は猫である、ニャー 2"
    rows = audit_transfer(old, new, [text]).fertility
    # What is shared is of the letter before it, a space of that behind it; a number is of none.
    sizes = {"Hiragana": 15, "Katakana": 9, "Han": 10, "Latin": 3, "Common": 2}
    assert {row.script: row.bytes for row in rows} == sizes
    for tokenizer, name in ((old, "old"), (new, "new")):
        tokens = sum(row.bytes / getattr(row, name) for row in rows)
        assert tokens == pytest.approx(len(tokenizer.text_to_ids(text)))


def test_the_command_prints_text_or_one_object(tmp_path, untied, new_tokenizer, capsys):
    (tmp_path / "text.jsonl").write_text(json.dumps({"text": "the weather"}) + "\n")
    words = ["transfer", "audit", str(untied), str(new_tokenizer)]
    main([*words, "--data", str(tmp_path / "text.jsonl")])
    assert "copied in text" in capsys.readouterr().out
    main([*words, "--json"])
    row = json.loads(capsys.readouterr().out)
    assert (row["new_ids"], row["copied_text"]) == (287, None)


@needs_shared
@pytest.mark.parametrize("old", ["llama3_2", "qwen3"])
@pytest.mark.parametrize("new", NEW)
def test_the_old_digits_are_kept_and_nothing_else_changes(tmp_path, new_tokenizer, old, new):
    source = new_tokenizer if new == "tiny" else Path(SHARED) / "tokenizers" / new
    old, new = published(old), build_tokenizer(TokenizerConfig(model=str(source)))
    scheme = keep_digits(source, tmp_path, new=new, old=old)
    kept = build_tokenizer(TokenizerConfig(model=str(tmp_path)))
    assert digit_scheme(kept) == scheme == digit_scheme(old)
    for number in ("7", "12345", "0000000"):
        assert digit_pieces(kept, number) == digit_pieces(old, number)
    for text in ("no numbers, but words\n\n  and lines", "Привет, 日本"):
        assert kept.text_to_ids(text) == new.text_to_ids(text)
    text = "in 1984 and x2024y 12"
    assert kept.detokenize(kept.text_to_ids(text)) == text
    digits = [t for i in kept.text_to_ids("98765") if (t := kept.token_bytes(i)) and t.isdigit()]
    assert b"".join(digits) == b"98765"
