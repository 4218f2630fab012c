"""Our ids are those of the library that made the file, special tokens in text apart."""

import json
from functools import cache
from pathlib import Path

import pytest
import sentencepiece
import tiktoken
from hypothesis import given
from hypothesis import strategies as st
from mistral_common.tokens.tokenizers.tekken import Tekkenizer
from tokenizers import Tokenizer

from megatron_ext.tokenizers import MegatronTokenizer
from megatron_ext.tokenizers.libraries.tiktoken_file import EARLY_TEKKEN_SPECIAL_TOKENS, PATTERNS
from tests.tokenizers.short_tekken import tekken_file
from tests.tokenizers.tokenizer_files import MAKERS, MANY, RANKS_IN_LIST, SENTENCES

OF_HUGGINGFACE = [name for name in MAKERS if name.startswith("huggingface")]
OF_SENTENCEPIECE = [name for name in MAKERS if name.startswith("sentencepiece")]
ORDINARY = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="<[|"), max_size=40)
NAMES = st.sampled_from(["<s>", "</s>", "<unk>", "<|end|>", "<tool>", "[CLS]", "[SEP]", "<pad>"])


@cache
def sentencepiece_of(path: Path) -> sentencepiece.SentencePieceProcessor:
    return sentencepiece.SentencePieceProcessor(model_file=str(path))


@cache
def tokenizers_of(folder: Path) -> Tokenizer:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


@pytest.mark.parametrize("name", OF_SENTENCEPIECE)
@MANY
@given(text=st.one_of(ORDINARY, st.sampled_from(SENTENCES)))
def test_sentencepiece_ids_are_those_of_sentencepiece(tokenizer, tokenizer_path, name, text):
    theirs = sentencepiece_of(tokenizer_path(name))
    assert tokenizer(name).tokenize(text) == theirs.encode(text)


@pytest.mark.parametrize("name", OF_HUGGINGFACE)
@MANY
@given(text=st.one_of(ORDINARY, st.sampled_from(SENTENCES)))
def test_huggingface_ids_are_those_of_tokenizers(tokenizer, tokenizer_path, name, text):
    theirs = tokenizers_of(tokenizer_path(name))
    ids = theirs.encode(text, add_special_tokens=False).ids
    assert tokenizer(name).tokenize(text) == ids
    assert tokenizer(name).detokenize(ids) == theirs.decode(ids, skip_special_tokens=False)


@pytest.mark.parametrize("name", OF_HUGGINGFACE)
@MANY
@given(text=st.lists(st.one_of(ORDINARY, NAMES), max_size=5).map("".join))
def test_parsed_special_tokens_are_those_of_tokenizers(tokenizer, tokenizer_path, name, text):
    theirs = tokenizers_of(tokenizer_path(name))
    ids, _ = tokenizer(name).encode_with_byte_ends(text, parse_special=True)
    assert ids.tolist() == theirs.encode(text, add_special_tokens=False).ids


def test_a_text_has_the_ids_of_a_file_without_its_dropout(tokenizer, tokenizer_path, tmp_path):
    file = tokenizer_path("huggingface-byte-level") / "tokenizer.json"
    document = json.loads(file.read_text(encoding="utf-8"))
    document["model"]["dropout"] = 1.0
    (tmp_path / "tokenizer.json").write_text(json.dumps(document), encoding="utf-8")
    ours, without = MegatronTokenizer.from_pretrained(tmp_path), tokenizer("huggingface-byte-level")
    for text in SENTENCES:
        assert ours.text_to_ids(text) == without.text_to_ids(text)


@pytest.fixture(scope="session")
def tekkenizer():
    return Tekkenizer.from_file(tekken_file())


@MANY
@given(text=st.text(max_size=40))
def test_tekken_ids_are_those_of_mistral_common(tokenizer, tekkenizer, text):
    ids = tokenizer("tekken").tokenize(text)
    assert ids == tekkenizer.encode(text, bos=False, eos=False)
    assert tokenizer("tekken").detokenize(ids) == tekkenizer.decode(ids)


def test_tekken_special_tokens_have_the_ids_and_names_of_mistral_common(tokenizer, tekkenizer):
    ours = tokenizer("tekken")
    assert ours.vocab_size == tekkenizer.n_words
    names = [tekkenizer.id_to_piece(i) for i in range(tekkenizer.num_special_tokens)]
    assert ours.vocab[: len(names)] == names
    assert [ours.token_to_id(name) for name in names] == list(range(len(names)))
    assert (ours.bos_id, ours.eos_id) == (tekkenizer.bos_id, tekkenizer.eos_id)
    assert ours.pad_id == tekkenizer.pad_id


def test_special_tokens_of_early_tekken_files_are_those_of_mistral_common():
    rows = Tekkenizer.DEPRECATED_SPECIAL_TOKENS
    assert [row["rank"] for row in rows] == list(range(len(rows)))
    assert tuple(str(row["token_str"].value) for row in rows) == EARLY_TEKKEN_SPECIAL_TOKENS


def test_the_second_pattern_is_the_one_in_the_tekken_file(tekkenizer):
    assert PATTERNS["v2"] == tekkenizer._model._pat_str


@pytest.fixture(scope="module")
def ranks_of_tiktoken(tokenizer):
    ours = tokenizer("json-rank-list")
    ranks = {ours.token_bytes(i): i - 1000 for i in range(1000, ours.vocab_size)}
    return tiktoken.Encoding(
        "ranks", pat_str=PATTERNS["v2"], mergeable_ranks=ranks, special_tokens={}
    )


@MANY
@given(text=st.text(max_size=40))
def test_a_json_rank_list_is_shifted_by_its_special_tokens_once(tokenizer, ranks_of_tiktoken, text):
    ranks = ranks_of_tiktoken.encode_ordinary(text)
    assert tokenizer("json-rank-list").tokenize(text) == [1000 + rank for rank in ranks]


def test_tables_of_a_json_rank_list_agree_on_every_id(tokenizer):
    ours = tokenizer("json-rank-list")
    assert ours.vocab_size == 1000 + RANKS_IN_LIST
    assert [ours.inv_vocab[i] for i in range(ours.vocab_size)] == ours.vocab
    for token_id in (0, 999, 1000 + ord("a"), 2500, ours.vocab_size - 1):
        assert ours.token_to_id(ours.id_to_token(token_id)) == token_id
    assert ours.token_bytes(1000 + ord("a")) == b"a"
    assert ours.id_to_token(999) == "<SPECIAL_999>"


def test_ids_of_a_rank_file_are_its_ranks_and_special_tokens_follow(tokenizer):
    ours, listed = tokenizer("rank-file"), tokenizer("json-rank-list")
    text = "the parser of arguments"
    assert ours.tokenize(text) == [i - 1000 for i in listed.tokenize(text)]
    assert ours.token_to_id("<unk>") == RANKS_IN_LIST
    assert ours.vocab_size == RANKS_IN_LIST + 1000
    # A rank that the file leaves out is an unused id.
    assert (ours.token_bytes(1990), ours.id_to_token(1990)) == (None, "")
