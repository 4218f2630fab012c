"""The byte-level library: every byte is its own id, and nothing else is a byte."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from megatron_ext.errors import TokenizerError
from megatron_ext.tokenizers import MegatronTokenizer, TokenizerConfig, build_tokenizer
from megatron_ext.tokenizers.libraries.byte_level import ByteLevelTokenizer

PLAIN = ByteLevelTokenizer(special_tokens=["<tool>", "<think>"])
LEGACY = ByteLevelTokenizer(legacy=True)
TEXTS = st.text(st.characters(exclude_categories=["Cs"]))


@given(TEXTS)
@example("a \n\t ")
def test_ids_are_the_utf8_bytes_and_decode_to_the_text(text):
    for tokenizer in (PLAIN, LEGACY):
        ids, ends = tokenizer.encode_with_byte_ends(text)
        assert bytes(ids.tolist()) == text.encode()
        assert ends.tolist() == list(range(1, len(text.encode()) + 1))
        assert tokenizer.text_to_ids(text) == ids.tolist()
        assert tokenizer.byte_ends(ids).tolist() == ends.tolist()
        assert tokenizer.ids_to_text(ids.tolist()) == text
        assert tokenizer.tokens_to_text(tokenizer.text_to_tokens(text)) == text


@given(st.lists(TEXTS, max_size=4))
def test_a_batch_holds_the_ids_of_each_text(texts):
    ids, offsets = PLAIN.text_to_flat_ids(texts)
    assert (ids.dtype, offsets.dtype) == (np.int32, np.int64)
    rows = [ids[begin:end].tolist() for begin, end in pairwise(offsets)]
    assert rows == [list(text.encode()) for text in texts]
    parsed = PLAIN.text_to_ids_batch(["a<tool>", *texts], parse_special=True)
    assert parsed[0].tolist() == [97, PLAIN.token_to_id("<tool>")]


def test_no_special_id_is_a_byte_and_none_collides_with_another():
    special = [PLAIN.eos_id, PLAIN.pad_id, PLAIN.eod, *PLAIN.additional_special_tokens_ids]
    assert special == [256, 257, 256, 512, 513]
    assert PLAIN.vocab_size == 514
    assert (PLAIN.bos_id, PLAIN.unk_id, PLAIN.cls_id, PLAIN.sep_id, PLAIN.mask_id) == (None,) * 5


@pytest.mark.parametrize("name", ["<eos>", "<pad>", "<tool>", "<think>"])
def test_a_special_token_in_text_is_text_unless_it_is_asked_for(name):
    token_id = PLAIN.token_to_id(name)
    text = f"é {name} {name}"
    assert token_id not in PLAIN.text_to_ids(text)
    ids, ends = PLAIN.encode_with_byte_ends(text, parse_special=True)
    assert ids.tolist() == [0xC3, 0xA9, 32, token_id, 32, token_id]
    assert ends.tolist() == [1, 2, 3, 3 + len(name), 4 + len(name), 4 + 2 * len(name)]
    assert PLAIN.ids_to_text(ids.tolist()) == text
    assert PLAIN.ids_to_text(ids.tolist(), skip_special_tokens=True) == "é  "


@pytest.mark.parametrize("tokenizer", [PLAIN, LEGACY], ids=["apart", "legacy"])
def test_every_id_has_a_text_and_a_name_that_leads_back_to_it(tokenizer):
    for token_id in range(tokenizer.vocab_size):
        text = tokenizer.ids_to_text([token_id])
        name = tokenizer.id_to_token(token_id)
        raw = tokenizer.token_bytes(token_id)
        assert (raw is None) == tokenizer.is_control(token_id)
        assert text == (name if raw is None else raw.decode(errors="replace"))
        assert name == "" or tokenizer.token_to_id(name) == token_id
    assert tokenizer.ids_to_tokens([104, 32, 10, 255]) == ["h", " ", "<0x0A>", "<0xFF>"]


def test_ids_that_are_not_utf8_are_exact_in_bytes_and_replaced_in_text():
    ids = [*"吾".encode()[:2], PLAIN.eos_id, *"é".encode()]
    assert PLAIN.byte_ends(ids).tolist() == [1, 2, 2, 3, 4]
    assert PLAIN.ids_to_text(ids) == "\ufffd<eos>é"


def test_the_first_special_token_has_the_highest_id_as_in_megatron():
    tokenizer = ByteLevelTokenizer(
        vocab_size=1024, special_tokens=["<TEST1>", "<TEST2>"], _bos_id=3
    )
    assert tokenizer.tokens_to_ids(["<TEST1>", "<TEST2>"]) == [1025, 1024]
    assert (tokenizer.vocab_size, tokenizer.bos_id) == (1026, 3)


def test_additional_special_tokens_move_no_other_id():
    longer = ByteLevelTokenizer(
        special_tokens=["<tool>", "<think>"],
        additional_special_tokens=["<image>", "<tool>", "<audio>"],
    )
    assert longer.tokens_to_ids(["<tool>", "<think>", "<image>", "<audio>"]) == [513, 512, 514, 515]
    assert longer.additional_special_tokens_ids == [512, 513, 514, 515]


def test_a_special_token_with_a_usual_name_takes_its_role():
    tokenizer = ByteLevelTokenizer(special_tokens={"</s>": 0, "[CLS]": 0, "[SEP]": 0, "<unk>": 0})
    assert tokenizer.eos_id == tokenizer.token_to_id("</s>") == 515
    assert (tokenizer.cls_id, tokenizer.sep_id, tokenizer.unk_id) == (514, 513, 512)
    assert tokenizer.pad_id == 256


def test_legacy_ids_are_megatrons_and_stay_bytes():
    assert (LEGACY.eos_id, LEGACY.pad_id, LEGACY.bos_id) == (0, 1, None)
    assert LEGACY.vocab_size == 512
    ids = LEGACY.text_to_ids("a\0\1b")
    assert LEGACY.ids_to_text(ids) == "a\0\1b"
    assert LEGACY.ids_to_text(ids, skip_special_tokens=True) == "ab"
    assert LEGACY.token_bytes(0) == b"\0"


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"eos_id": 300}, (300, 256, None)),
        ({"eos_id": 256, "pad_id": 256, "bos_id": 256}, (256, 256, 256)),
        ({"eos_id": -1, "pad_id": -1}, (None, None, None)),
        ({"_eos_id": 0, "_pad_id": 1, "_bos_id": 2}, (0, 1, 2)),
        ({"legacy": True, "pad_id": 400}, (0, 400, None)),
        ({"vocab_size": 258}, (256, 257, None)),
        ({"vocab_size": 256, "legacy": True}, (0, 1, None)),
    ],
    ids=["eos", "one-for-all", "none", "megatron", "legacy-and-pad", "tight", "bytes-only"],
)
def test_ids_of_roles_can_be_chosen(options, expected):
    tokenizer = ByteLevelTokenizer(**options)
    assert (tokenizer.eos_id, tokenizer.pad_id, tokenizer.bos_id) == expected
    assert tokenizer.eod == tokenizer.eos_id
    for name in tokenizer.special_token_names.values():
        assert tokenizer.id_to_token(tokenizer.token_to_id(name)) == name


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"vocab_size": 255}, "vocab_size: the vocabulary is too small; got 255; expected >= 256"),
        ({"vocab_size": 257}, "no id is free for the pad token"),
        ({"eos_id": 512}, "eos_id: the id is outside the vocabulary; got 512; expected 0 to 511"),
        ({"eos_id": 1, "_eos_id": 2}, "two options name different ids; got eos_id 1 and _eos_id 2"),
        ({"special_tokens": "<tool>"}, "special_tokens is one string"),
        ({"special_tokens": ["a"]}, "cannot have this name; got 'a'"),
        ({"special_tokens": ["<0x0A>"]}, "cannot have this name"),
        ({"special_tokens": ["<x>", "<x>"]}, "cannot have this name"),
        ({"special_tokens": [""]}, "cannot have this name"),
        ({"special_tokens": ["<eos>"], "eos_id": 300}, "two ids would have one name"),
        ({"engine": "gigatoken"}, "the byte-level library has no fast engine"),
        ({"engine": "warp"}, "unknown engine; got 'warp'"),
    ],
)
def test_options_that_cannot_be_are_refused(options, message):
    with pytest.raises(TokenizerError, match=message):
        ByteLevelTokenizer(**options)


@pytest.mark.parametrize("token_id", [-1, 514])
def test_ids_outside_the_vocabulary_are_refused(token_id):
    for ask in (PLAIN.id_to_token, PLAIN.token_bytes, lambda i: PLAIN.ids_to_text([i])):
        with pytest.raises(TokenizerError, match="outside the vocabulary"):
            ask(token_id)


def test_a_lone_surrogate_is_refused_with_its_place():
    with pytest.raises(TokenizerError, match="lone surrogate at character 1"):
        PLAIN.text_to_flat_ids(["ok", "a\ud800"])


def test_it_is_built_from_a_configuration_and_from_megatrons_call():
    configured = build_tokenizer(
        TokenizerConfig(library="byte-level", special_tokens=("<tool>",), vocab_extra_ids=2)
    )
    names = ["<tool>", "<extra_id_0>", "<extra_id_1>"]
    assert [configured.token_to_id(name) for name in names] == [512, 513, 514]
    assert configured.tokenize("Hi") == [72, 105]
    called = MegatronTokenizer.from_pretrained(
        metadata_path={"library": "byte-level"}, vocab_size=1024, _bos_id=3, special_tokens=[]
    )
    assert called.detokenize(called.tokenize("Hello"), skip_special_tokens=True) == "Hello"
    assert (called.bos_id, called.eos, called.cls, called.vocab[72]) == (3, 256, None, "H")
    assert called.offsets(called.tokenize("né!"), "né!") == [0, 1, 1, 2]
