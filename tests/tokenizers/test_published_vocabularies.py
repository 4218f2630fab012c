"""Published vocabularies on the published text: ids of their libraries, and exact byte ends.

Files of mistral-common's are there wherever the tests run; the others where they are at hand.
"""

import base64
import hashlib
import json
import re
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import sentencepiece
import tiktoken
import tiktoken_ext.openai_public
from mistral_common.tokens.tokenizers.tekken import Tekkenizer
from tokenizers import Tokenizer

from megatron_ext.tokenizers import TOKENIZER_LIBRARIES, TokenizerConfig, build_tokenizer
from megatron_ext.tokenizers.token_bytes import byte_of_character
from tests.tokenizers.published import (
    EVERY_STRETCH,
    SHARED,
    corpora,
    folders_with,
    needs_published_files,
    taken,
)
from tests.tokenizers.tokenizer_files import SENTENCES, mistral_file

SPELLED = {
    **dict.fromkeys(("gpt2", "llama3_2", "mistral_nemo", "phi4_mini"), "exact"),
    **dict.fromkeys(("llama2_sp", "mistral_7b_v1", "gemma3"), "after a prefix"),
    **dict.fromkeys(("bert_uncased", "t5_small"), "changed"),
}
"""How the tokens of a folder spell a text; those of others do where the text is in NFC."""
ODD = "caf\u0065\u0301 \u212b 🤷\u200d♀️ ▁ \n\n"
STRETCHES = (
    "django_po/ja.admin.po",
    "django_po/hi.admin.po",
    "django_po/vi.conf.po",
    "python_code/dataclasses.py.txt",
    "fastchat/dummy_conversation.json",
)
MISTRAL_FILES = taken(mistral_file("").iterdir())
SENTENCEPIECE_FILES = [
    *(file for file in MISTRAL_FILES if re.search(r"\.model\.v\d+m?\d*$", file.name)),
    *taken(SHARED.glob("tokenizers/*/*.model")),
]
TEKKEN_FILES = [file for file in MISTRAL_FILES if file.name.startswith("tekken")]
RANK_FILES = taken(SHARED.glob("tokenizers/*/*.tiktoken"))
FOLDERS = folders_with("tokenizer.json")
if not EVERY_STRETCH:
    # Loading a vocabulary takes a second.
    SENTENCEPIECE_FILES, FOLDERS = SENTENCEPIECE_FILES[::3], FOLDERS[::3]
    TEKKEN_FILES, RANK_FILES = TEKKEN_FILES[:1], RANK_FILES[:1]
LOSSY = {file for file in SENTENCEPIECE_FILES if file.parent.name == "sp_tiny"}
"""Their normaliser changes text."""
SHA256_OF_LLAMA_3 = "82e9d31979e92ab929cd544440f129d9ecd797b69e327f80f17e1c50d5551b55"
"""Of the file tokenizer.model in Meta-Llama-3-8B/original, as its repository lists it."""


def texts():
    """The published text, or sentences of our own where it is not at hand."""
    return corpora() or ["\n".join(SENTENCES)]


def stretches():
    """Some text of each script and kind."""
    files = [SHARED / "corpora" / name for name in STRETCHES]
    return [file.read_text(encoding="utf-8")[1000:5000] for file in files if file.is_file()]


def check_byte_ends(ours, some, spelled):
    """Ids and ends of each of ``some`` texts; a token's span is its bytes where it can be."""
    for text in [*some, *stretches(), ODD]:
        ids, ends = ours.encode_with_byte_ends(text)
        raw = text.encode()
        assert ids.tolist() == ours.text_to_ids(text)
        assert (np.diff(ends, prepend=0) >= 0).all()
        assert ends[-1] == len(raw)
        lossless = {"exact": True, "after a prefix": "▁" not in text, "in NFC": text.isascii()}
        if lossless.get(spelled):
            spans = [raw[a:b] for a, b in pairwise([0, *ends.tolist()])]
            prefix = len(b"".join(ours.token_bytes(i) for i in ids.tolist())) - len(raw)
            assert spans[0] == ours.token_bytes(int(ids[0]))[prefix:]
            assert spans[1:] == [ours.token_bytes(i) for i in ids[1:].tolist()]
            assert ours.byte_ends(ids).tolist() == ends.tolist()


def same_ids(ours, expected):
    """Whether a batch gives the expected ids for every text."""
    return [ids.tolist() for ids in ours.text_to_ids_batch(texts())] == expected


@pytest.mark.parametrize("file", SENTENCEPIECE_FILES, ids=lambda file: file.name)
def test_sentencepiece_files_give_the_ids_of_sentencepiece_and_exact_byte_ends(file):
    engine = "auto" if file in LOSSY else "gigatoken"
    ours = TOKENIZER_LIBRARIES["sentencepiece"].build(file, {"engine": engine})
    theirs = sentencepiece.SentencePieceProcessor(model_file=str(file))
    assert same_ids(ours, theirs.encode(texts(), num_threads=0))
    spelled = "changed" if file in LOSSY else "after a prefix"
    check_byte_ends(ours, texts()[:: 9 if file in LOSSY else 3], spelled)
    assert ours.vocab_size == theirs.get_piece_size()
    assert ours.vocab == [theirs.id_to_piece(i) for i in range(ours.vocab_size)]
    ids = (ours.bos_id, ours.eos_id, ours.unk_id)
    assert ids == (theirs.bos_id(), theirs.eos_id(), theirs.unk_id())


@pytest.mark.parametrize("file", TEKKEN_FILES, ids=lambda file: file.name)
def test_tekken_files_give_the_ids_of_mistral_common_and_exact_byte_ends(file):
    ours = TOKENIZER_LIBRARIES["tiktoken"].build(file, {"engine": "gigatoken"})
    theirs = Tekkenizer.from_file(file)
    assert same_ids(ours, [theirs.encode(text, bos=False, eos=False) for text in texts()])
    check_byte_ends(ours, texts()[::3], "exact")
    assert ours.vocab_size == theirs.n_words
    special = range(theirs.num_special_tokens)
    assert ours.vocab[: len(special)] == [theirs.id_to_piece(i) for i in special]


@pytest.mark.parametrize("file", RANK_FILES, ids=lambda file: file.name)
def test_rank_files_of_openai_give_the_ids_of_tiktoken_and_exact_byte_ends(file, monkeypatch):
    def load(url, expected_hash):
        assert url.endswith(file.name)
        assert hashlib.sha256(file.read_bytes()).hexdigest() == expected_hash
        rows = (line.split() for line in file.read_bytes().splitlines())
        return {base64.b64decode(token): int(rank) for token, rank in rows}

    monkeypatch.setattr(tiktoken_ext.openai_public, "load_tiktoken_bpe", load)
    ours = TOKENIZER_LIBRARIES["tiktoken"].build(file, {"engine": "gigatoken"})
    theirs = tiktoken.Encoding(**getattr(tiktoken_ext.openai_public, file.stem)())
    assert same_ids(ours, theirs.encode_ordinary_batch(texts()))
    check_byte_ends(ours, texts()[::3], "exact")
    assert ours.vocab_size == theirs.n_vocab
    assert ours.eos_id == theirs.eot_token
    written = "a".join(sorted(theirs.special_tokens_set))
    parsed = ours.text_to_ids(written, parse_special=True)
    assert parsed == theirs.encode(written, allowed_special="all")
    assert ours.ids_to_text(parsed) == written


@needs_published_files
@pytest.mark.parametrize("path", FOLDERS, ids=lambda path: path.name)
def test_folders_give_the_ids_of_tokenizers_and_exact_byte_ends(path):
    spelled = SPELLED.get(path.name, "in NFC")
    engine = "gigatoken" if EVERY_STRETCH and spelled != "changed" else "auto"
    ours = build_tokenizer(TokenizerConfig(model=str(path), engine=engine))
    theirs = Tokenizer.from_file(str(path / "tokenizer.json"))
    theirs.no_truncation()
    theirs.no_padding()
    # Special tokens that are written in the text are text to us.
    names = [token.content for token in theirs.get_added_tokens_decoder().values()]
    plain = [text for text in corpora() if not any(name in text for name in names if name.strip())]
    assert len(plain) > len(corpora()) / 2
    expected = theirs.encode_batch_fast(plain, add_special_tokens=False)
    for ids, want in zip(ours.text_to_ids_batch(plain), expected, strict=True):
        assert ids.tolist() == want.ids
    check_byte_ends(ours, plain[::7], spelled)
    if path.name == "qwen3":
        assert_no_added_token_comes_out_of_text(ours)


def assert_no_added_token_comes_out_of_text(qwen3):
    added = [piece for piece in qwen3.vocab[151643:] if piece]
    assert "<think>" in added
    assert max(qwen3.tokenize(" x ".join(added))) < 151643
    ids, _ = qwen3.encode_with_byte_ends("".join(added), parse_special=True)
    assert ids.tolist() == [qwen3.token_to_id(name) for name in added]


@pytest.fixture(scope="module")
def llama_3(tmp_path_factory) -> Path:
    """Meta's rank file, made again from the ``tokenizer.json`` that was made from it."""
    document = json.loads((SHARED / "tokenizers/llama3_2/tokenizer.json").read_text("utf-8"))
    byte_of = byte_of_character()
    rows = sorted((rank, piece) for piece, rank in document["model"]["vocab"].items())
    file = tmp_path_factory.mktemp("llama3") / "tokenizer.model"
    with file.open("wb") as stream:
        for rank, piece in rows:
            token = base64.b64encode(bytes(byte_of[character] for character in piece))
            stream.write(b"%s %d\n" % (token, rank))
    assert hashlib.sha256(file.read_bytes()).hexdigest() == SHA256_OF_LLAMA_3
    return file


@needs_published_files
def test_the_rank_file_of_llama_3_is_the_vocabulary_of_its_tokenizer_json(llama_3):
    ours = TOKENIZER_LIBRARIES["tiktoken"].build(llama_3)
    theirs = Tokenizer.from_file(str(SHARED / "tokenizers/llama3_2/tokenizer.json"))
    expected = theirs.encode_batch_fast(texts(), add_special_tokens=False)
    assert same_ids(ours, [row.ids for row in expected])
    check_byte_ends(ours, texts()[::3], "exact")
    assert ours.vocab_size == theirs.get_vocab_size() == 128256
    for token_id in range(128000, 128256):
        assert ours.id_to_token(token_id) == theirs.id_to_token(token_id)
    assert ours.bos_id == ours.token_to_id("<|begin_of_text|>")
    assert ours.eos_id == ours.token_to_id("<|end_of_text|>")
    assert ours.pad_id == ours.token_to_id("<|finetune_right_pad_id|>")


@needs_published_files
def test_more_special_tokens_of_llama_3_take_the_places_of_reserved_ones(llama_3):
    options = {"additional_special_tokens": ["<image>"]}
    ours = TOKENIZER_LIBRARIES["tiktoken"].build(llama_3, options)
    assert ours.token_to_id("<image>") == 128011
    assert ours.vocab_size == 128256
    assert ours.additional_special_tokens_ids == [128011]


@needs_published_files
def test_one_vocabulary_in_two_formats_has_one_fingerprint_and_one_tokenization():
    left, right = (
        build_tokenizer(TokenizerConfig(model=str(SHARED / "tokenizers" / name)))
        for name in ("llama2_sp", "llama2_sp/tokenizer.model")
    )
    assert left.fingerprint() == right.fingerprint()
    for text in [*stretches(), "<s>hello</s> there<s>"]:
        for parse_special in (False, True):
            ours, theirs = (
                side.encode_with_byte_ends(text, parse_special=parse_special)
                for side in (left, right)
            )
            assert ours[0].tolist() == theirs[0].tolist()
            assert ours[1].tolist() == theirs[1].tolist()
