"""The null library: ids written as numbers."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_ext.errors import TokenizerError
from megatron_ext.tokenizers import MegatronTokenizer, TokenizerConfig, build_tokenizer
from megatron_ext.tokenizers.libraries.null import NullTokenizer

PLAIN = NullTokenizer(vocab_size=1000)
NAMED = NullTokenizer(
    vocab_size=1000, additional_special_tokens=["<a>", "<pad>"], placeholders={"<image>": -200}
)
SPACE = st.text(" \t\n\u3000", min_size=1, max_size=3)
WRITTEN = st.lists(st.tuples(SPACE, st.integers(0, 999), st.sampled_from(["", "00"])), max_size=8)


@given(WRITTEN, st.sampled_from(["", " ", "\n\u3000"]))
def test_each_number_is_its_id_and_ends_where_the_next_begins(written, tail):
    text = "".join(f"{space}{zeros}{number}" for space, number, zeros in written) + tail
    numbers = [number for _, number, _ in written]
    ids, ends = PLAIN.encode_with_byte_ends(text)
    assert ids.tolist() == numbers == PLAIN.text_to_ids(text)
    assert (ids.dtype, ends.dtype) == (np.int32, np.int64)
    begins = [0, *ends.tolist()]
    spans = [text.encode()[a:b].decode() for a, b in zip(begins, ends, strict=False)]
    assert "".join(spans) == (text if numbers else "")
    assert [int(span) for span in spans] == numbers
    assert all(span == span.lstrip() for span in spans[1:])


@given(st.lists(st.integers(0, 999), max_size=8))
def test_a_stream_of_ids_decodes_to_a_text_that_gives_them_back(ids):
    text = PLAIN.ids_to_text(ids)
    assert text == " ".join(map(str, ids))
    assert PLAIN.text_to_ids(text) == ids
    ends = PLAIN.byte_ends(ids).tolist()
    assert ends == PLAIN.encode_with_byte_ends(text)[1].tolist()
    assert b"".join(PLAIN.token_bytes(i) or b"" for i in ids)[:-1] == text.encode()
    assert PLAIN.tokens_to_ids(PLAIN.ids_to_tokens(ids)) == ids


@pytest.mark.parametrize("text", ["", " ", "\n\t \u3000"])
def test_a_text_without_numbers_has_no_ids(text):
    assert PLAIN.text_to_ids(text) == []
    ids, ends = PLAIN.encode_with_byte_ends(text)
    assert (len(ids), len(ends)) == (0, 0)
    assert PLAIN.byte_ends([]).tolist() == []


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("1 two 3", "the text is not all numbers; got 'two' at character 2; expected 0 to 999"),
        ("1 -2", "got '-2' at character 2"),
        ("1_0", "got '1_0' at character 0"),
        ("٣", "the text is not all numbers"),
        ("+5", "the text is not all numbers"),
        ("5 1000", "the number is outside the vocabulary; got '1000' at character 2"),
        ("5 " + "9" * 5000, "got '9{40}...' at character 2"),
        ("a\ud800", "at character [01]"),
        ("1 <pad>", "got '<pad>' at character 2"),
    ],
    ids=["word", "sign", "underscore", "arabic", "plus", "range", "huge", "surrogate", "special"],
)
def test_other_text_is_refused_with_its_place(text, message):
    for encode in (PLAIN.text_to_ids, PLAIN.encode_with_byte_ends, NAMED.text_to_ids):
        with pytest.raises(TokenizerError, match=message):
            encode(text)
    with pytest.raises(TokenizerError):
        PLAIN.text_to_flat_ids(["1", text])


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, (10, 9, None)),
        ({"add_eod": True}, (11, 10, None)),
        ({"eod_id": 0, "pad_id": 0}, (10, 0, 0)),
        ({"pad_id": -1}, (10, 9, None)),
        ({"add_eod": True, "eod_id": 3, "pad_id": 10}, (11, 3, 10)),
        ({"additional_special_tokens": ["<x>", "<pad>"]}, (12, 9, 11)),
        ({"additional_special_tokens": ["<x>"], "add_eod": True, "eod_id": 11}, (12, 11, None)),
    ],
    ids=["main", "0.16", "zero", "negative-pad", "all", "named-pad", "named-eod"],
)
def test_both_conventions_of_megatron_and_chosen_ids(options, expected):
    tokenizer = NullTokenizer(vocab_size=10, **options)
    assert (tokenizer.vocab_size, tokenizer.eod, tokenizer.pad_id) == expected
    assert tokenizer.eos_id == tokenizer.eod
    assert (tokenizer.bos_id, tokenizer.cls_id, tokenizer.sep_id, tokenizer.mask_id) == (None,) * 4


def test_the_added_end_of_document_is_a_number_too():
    tokenizer = NullTokenizer(vocab_size=10, add_eod=True)
    assert tokenizer.text_to_ids("9 10") == [9, 10]
    assert tokenizer.ids_to_text([9, 10]) == "9 10"
    assert tokenizer.ids_to_text([9, 10], skip_special_tokens=True) == "9"


def test_names_are_read_where_control_tokens_are_read():
    text = "1 <image>2 <a>"
    ids, ends = NAMED.encode_with_byte_ends(text, parse_special=True)
    assert ids.tolist() == [1, -200, 2, 1000] == NAMED.text_to_ids(text, parse_special=True)
    assert ends.tolist() == [2, 9, 11, 14]
    assert NAMED.ids_to_text(ids.tolist()) == "1 <image> 2 <a>"
    assert NAMED.ids_to_text(ids.tolist(), skip_special_tokens=True) == "1 2"
    assert NAMED.byte_ends(ids).tolist() == [2, 2, 3, 3]
    only, _ = NAMED.encode_with_control_spans("1 <image>", [(2, 9)])
    assert only.tolist() == [1, -200]
    with pytest.raises(TokenizerError, match="'<a>' at character 11"):
        NAMED.encode_with_control_spans(text, [(2, 9)])
    flat, offsets = NAMED.text_to_flat_ids(["1", "", "<a> 2"], parse_special=True)
    assert (flat.tolist(), offsets.tolist()) == ([1, 1000, 2], [0, 1, 1, 3])


def test_control_tokens_have_names_and_no_bytes():
    assert NAMED.tokens_to_ids(["<a>", "<pad>", "<image>", "7"]) == [1000, 1001, -200, 7]
    for token_id in (1000, 1001, -200):
        assert NAMED.is_control(token_id)
        assert NAMED.token_bytes(token_id) is None
        assert NAMED.token_to_id(NAMED.id_to_token(token_id)) == token_id
    assert not NAMED.is_control(999)
    assert NAMED.additional_special_tokens_ids == [1000]
    assert NAMED.special_token_names == {"eos_token": "999", "pad_token": "<pad>"}


@pytest.mark.parametrize("token", ["1000", "007", "-1", "x", "", "1 2", "9" * 5000])
def test_a_string_that_is_no_token_is_a_key_error(token):
    with pytest.raises(KeyError):
        PLAIN.token_to_id(token)


@pytest.mark.parametrize("token_id", [-1, 1000, -200])
def test_ids_outside_the_vocabulary_are_refused(token_id):
    for ask in (PLAIN.id_to_token, PLAIN.token_bytes, lambda i: PLAIN.ids_to_text([1, i])):
        with pytest.raises(TokenizerError, match=r"outside the vocabulary; got -?[0-9]+; expected"):
            ask(token_id)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "vocab_size: a null tokenizer needs the size of its vocabulary; expected >= 1"),
        ({"vocab_size": 0}, "got 0; expected >= 1"),
        ({"vocab_size": 10, "eod_id": 10}, "outside the vocabulary; got 10; expected 0 to 9"),
        ({"vocab_size": 10, "pad_id": 10}, "outside the vocabulary; got 10"),
        ({"vocab_size": 10, "additional_special_tokens": ["7"]}, "cannot have this name; got '7'"),
        ({"vocab_size": 10, "additional_special_tokens": ["a b"]}, "cannot have this name"),
        ({"vocab_size": 10, "engine": "gigatoken"}, "the null library has no fast engine"),
    ],
)
def test_options_that_cannot_be_are_refused(options, message):
    with pytest.raises(TokenizerError, match=message):
        NullTokenizer(**options)


def test_the_fingerprint_follows_the_vocabulary():
    prints = [
        NullTokenizer(vocab_size=10).fingerprint(),
        NullTokenizer(vocab_size=11).fingerprint(),
        NullTokenizer(vocab_size=10, additional_special_tokens=["<x>"]).fingerprint(),
    ]
    assert len(set(prints)) == 3
    assert prints[0] == NullTokenizer(vocab_size=10, eod_id=2).fingerprint()


def test_it_is_built_from_a_configuration_and_from_megatrons_call():
    configured = build_tokenizer(
        TokenizerConfig(library="null", vocab_size=100, null_add_eod=True, null_pad_id=-1)
    )
    assert (configured.vocab_size, configured.eod, configured.pad) == (101, 100, -1)
    called = MegatronTokenizer.from_pretrained(
        metadata_path={"library": "null-text"}, vocab_size=131072
    )
    ids = called.tokenize("11 325 97")
    assert ids == [11, 325, 97]
    assert (called.vocab_size, called.eod, called.eos_id, called.cls) == (
        131072,
        131071,
        131071,
        None,
    )
    assert called.detokenize(ids, skip_special_tokens=True) == "11 325 97"
    assert called.offsets(ids, "11 325 97") == [0, 3, 7]
    assert called.inv_vocab[325] == "325"
