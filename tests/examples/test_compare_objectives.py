"""The parts of the comparison of objectives whose mistakes no figure would show."""

import importlib.resources
import json
import os
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from megatron_ext import CrossTokenizerCollator, TeacherCTSpec
from megatron_ext.alignment.chunk_places import BEGINS
from megatron_ext.cli.demo.vocabulary_head import write_head
from megatron_ext.data.aligner import AlignedText, PackedSample, TeacherTokens
from megatron_ext.errors import DataError, TokenizerError
from megatron_ext.tokenizers import MegatronTokenizer
from megatron_ext.training.microbatch import Microbatch

REPOSITORY = Path(__file__).parents[2]
sys.path.append(str(REPOSITORY / "examples" / "compare_objectives"))

from measure import Scores  # noqa: E402
from text_split import HELD_OUT, write_split  # noqa: E402

TEKKEN = Path(str(importlib.resources.files("mistral_common") / "data" / "tekken_240911.json"))
SHARED = Path(os.environ.get("MEGATRON_EXT_SHARED") or REPOSITORY / ".." / "shared")
GPT2 = SHARED / "tokenizers" / "openai_tiktoken" / "r50k_base.tiktoken"
TEXT = "In 2017 she paid 48 dollars and $120, naïvely: 48+24 = 72."


def tokens_of(vocabulary):
    tokenizer = MegatronTokenizer.from_pretrained(vocabulary)
    return [tokenizer.token_bytes(i) or b"" for i in tokenizer.tokenize(TEXT)]


def test_the_head_of_tekken_is_a_tokenizer_that_spells_numerals(tmp_path):
    head = write_head(TEKKEN, 4096, tmp_path / "head.json")
    assert MegatronTokenizer.from_pretrained(head).vocab_size == 4096
    tokens = tokens_of(head)
    assert b"".join(tokens).decode() == TEXT
    assert not [token for token in tokens if sum(chr(byte).isdigit() for byte in token) > 1]


@pytest.mark.skipif(not GPT2.exists(), reason=f"GPT-2's published ranks are absent: {GPT2}")
def test_the_head_of_gpt2_has_tokens_of_several_digits(tmp_path):
    tokens = tokens_of(write_head(GPT2, 8192, tmp_path / "head.json"))
    assert b"".join(tokens).decode() == TEXT
    assert {b" 2017", b" 48", b"24"} <= set(tokens)
    # A merge that is too late for this head.
    assert b"120" in tokens_of(GPT2)
    assert b"120" not in tokens


def test_the_head_of_a_sentencepiece_model_spells_by_bytes_what_it_lacks(tmp_path):
    source = TEKKEN.with_name("tokenizer.model.v1")
    text = f"{TEXT} \u4f60  \n x"
    whole = MegatronTokenizer.from_pretrained(source)
    tokenizer = MegatronTokenizer.from_pretrained(write_head(source, 2048, tmp_path / "head.model"))
    ids = tokenizer.tokenize(text)
    assert tokenizer.vocab_size == 2048
    assert tokenizer.detokenize(ids) == text
    assert len(ids) > len(whole.tokenize(text))
    # Ids of the first pieces are those of the whole vocabulary.
    assert [tokenizer.token_bytes(i) for i in range(1500)] == [
        whole.token_bytes(i) for i in range(1500)
    ]


@pytest.mark.parametrize("size", [100, 200_000])
@pytest.mark.parametrize("name", [TEKKEN.name, "tokenizer.model.v1"])
def test_a_head_of_no_such_size_is_refused(tmp_path, name, size):
    with pytest.raises(TokenizerError, match=f"no such head of the vocabulary; got {size}"):
        write_head(TEKKEN.with_name(name), size, tmp_path / "head")


def test_a_rank_list_that_says_no_pattern_is_refused(tmp_path):
    ranks = tmp_path / "ranks.json"
    ranks.write_text(json.dumps(json.loads(TEKKEN.read_text())["vocab"][:1000]))
    with pytest.raises(TokenizerError, match="nothing says how this vocabulary cuts text"):
        write_head(ranks, 500, tmp_path / "head.json")


def test_held_out_lines_are_in_no_training_text_and_the_students_are_the_teachers(tmp_path):
    source = tmp_path / "lines.jsonl"
    source.write_text(
        "".join(json.dumps({"q": f"[{i}]", "a": i}) + "\n" for i in range(HELD_OUT + 64))
    )
    write_split([source], ["q", "a"], tmp_path / "data")
    parts = {
        name: {
            line
            for row in (tmp_path / "data" / f"{name}.jsonl").read_text().splitlines()
            for line in json.loads(row)["text"].split("\n\n")
        }
        for name in ("train", "student", "validation")
    }
    assert {name: len(lines) for name, lines in parts.items()} == {
        "train": 64,
        "student": 8,
        "validation": HELD_OUT,
    }
    assert parts["student"] < parts["train"]
    assert not parts["train"] & parts["validation"]
    assert all(line == f"[{line.split()[1]}]\n{line.split()[1]}" for line in parts["train"])
    with pytest.raises(DataError, match="lacks a field of its text; got q, a; expected text"):
        write_split([source], ["text"], tmp_path / "data")


def test_paragraphs_of_a_text_are_its_lines(tmp_path):
    source = tmp_path / "prose.txt"
    source.write_text("".join(f"[{i}]\nmore\n\n" for i in range(HELD_OUT + 64)))
    write_split([source, source], [], tmp_path / "data")
    [document, *_] = (tmp_path / "data" / "validation.jsonl").read_text().splitlines()
    assert all(text.endswith("]\nmore") for text in json.loads(document)["text"].split("\n\n"))


@pytest.mark.parametrize("side", ["student", "teacher"])
def test_numerals_cost_the_bits_of_the_tokens_that_cover_them(tmp_path, side):
    tokenizer = MegatronTokenizer.from_pretrained(write_head(TEKKEN, 512, tmp_path / "head.json"))
    text = "ab 120, 7 and 48"
    ids = np.array(tokenizer.tokenize(text), np.int32)
    widths = np.diff(tokenizer.encode_with_byte_ends(text)[1], prepend=0).astype(np.int32)
    # The teacher is the same tokenizer, each token a chunk.
    marks = np.full(len(ids), BEGINS, np.uint8)
    sample = PackedSample((AlignedText(ids, widths, (TeacherTokens(ids, marks, marks),)),))
    spec = TeacherCTSpec(name="teacher", tokenizer=MegatronTokenizer.from_pretrained(TEKKEN))
    reader = CrossTokenizerCollator(tokenizer, 32, [spec], append_eod=False)
    batch = Microbatch.of(reader([sample]), {})
    scores = Scores(tokenizer)
    getattr(scores, f"add_{side}")([sample], torch.zeros(1, 32, 512), batch)
    found = scores.summary()
    # Evenly distributed over 512 tokens, each costs 9 bits; here each digit is a token.
    assert found["numerals"] == 2
    assert found["digits"] == 5
    assert found["bits_per_digit"] == pytest.approx(9.0)
    assert found["numeral_probability"] == pytest.approx((2.0**-27 + 2.0**-18) / 2)
    assert found["bits_per_byte"] == pytest.approx(9.0 * len(ids) / len(text))
    assert found["first_choices"] == 1
