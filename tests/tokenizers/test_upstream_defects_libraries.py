"""What Megatron's libraries got wrong, each with what they did instead.

The comments say what megatron-core 0.16.1 does with the same input.
"""

from __future__ import annotations

import warnings

import pytest

from megatron_ext.errors import TokenizerError
from megatron_ext.tokenizers import MegatronTokenizer
from tests.tokenizers.tokenizer_files import RANKS_IN_LIST

ROLES = ("bos", "eos", "pad", "unk", "mask", "cls", "sep")


@pytest.fixture
def opened(tokenizer_path):
    """A tokenizer of a file by name, or of a library without one, with options."""

    def open_it(name, **options):
        if name in ("byte-level", "null"):
            return MegatronTokenizer.from_pretrained(None, {"library": name}, **options)
        return MegatronTokenizer.from_pretrained(tokenizer_path(name), **options)

    return open_it


# SentencePiece.


@pytest.mark.parametrize("role", ["cls", "sep", "mask", "pad"])
def test_a_role_that_a_sentencepiece_model_lacks_is_none(opened, role):
    # NameError, which nobody catches; -1 for the padding, which its datasets rely on.
    assert getattr(opened("sentencepiece-v1"), role) == (-1 if role == "pad" else None)
    assert getattr(opened("sentencepiece-v1"), f"{role}_id") is None


def test_special_tokens_that_the_model_holds_need_no_legacy_mode(opened):
    # ValueError for any special token.
    ours = opened("sentencepiece-v3", special_tokens=["[INST]"], parse_special_tokens=True)
    assert ours.vocab_size == 32768
    assert ours.tokenize("[INST]") == [ours.token_to_id("[INST]")]


@pytest.mark.parametrize("name", ["sentencepiece-v1", "json-rank-list", "rank-file"])
def test_special_tokens_can_be_added_outside_of_legacy_mode(opened, name):
    # AttributeError from SentencePiece, NotImplementedError from tiktoken.
    ours = opened(name)
    ours.add_special_tokens({"mask_token": "[M]", "additional_special_tokens": ["<X>"]})
    assert ours.vocab[ours.mask] == "[M]"
    assert ours.vocab[ours.token_to_id("<X>")] == "<X>"
    assert ours.additional_special_tokens_ids == [ours.token_to_id("<X>")]


def test_every_role_works_when_legacy_special_tokens_are_a_list(opened):
    # AttributeError: only a mapping sets the names that these properties read.
    names = ["<mask>", "<pad>", "<cls>", "<sep>", "<eod>", "<X>"]
    ours = opened("sentencepiece-v1", legacy=True, special_tokens=names)
    ids = [ours.mask, ours.pad, ours.cls, ours.sep, ours.eod]
    assert ids == [32000, 32001, 32002, 32003, 32004]
    assert (ours.bos, ours.eos) == (1, 2)
    assert ours.additional_special_tokens_ids == [32005]


def test_special_tokens_without_a_role_are_listed_in_both_modes(opened):
    # AttributeError in both.
    assert opened("sentencepiece-v1").additional_special_tokens_ids == []
    assert len(opened("sentencepiece-v3").additional_special_tokens_ids) > 5


def test_legacy_decoding_inserts_no_spaces(opened):
    # 'the  <X> world </s> the', and no space at either end.
    ours = opened(
        "sentencepiece-v1",
        legacy=True,
        special_tokens=["<X>", "</s>"],
        trim_spm_separator_after_special_token=False,
    )
    for text in ("the <X> world</s>the", "<X>the", "the</s>", " <X> "):
        assert ours.detokenize(ours.tokenize(text)) == text


def test_legacy_text_with_many_special_tokens_is_cut_in_one_pass(opened):
    # Each special token searched the rest of the text for every name and copied it.
    names = [f"<{i}>" for i in range(100)]
    ours = opened("sentencepiece-v1", legacy=True, special_tokens=names)
    ids = ours.tokenize("a<7>" * 20_000)
    assert ids.count(ours.token_to_id("<7>")) == 20_000


@pytest.mark.parametrize("name", ["sentencepiece-nfkc", "sentencepiece-nfkc-bytes"])
@pytest.mark.parametrize("text", ["the  world ", " the", "a   b", "  "])
def test_kept_spaces_do_not_spoil_the_ids(opened, name, text):
    # With byte fallback: 'the \ufffd\ufffd world \ufffd\ufffd', the rest of a sentinel character.
    ours = opened(name, ignore_extra_whitespaces=False)
    assert ours.detokenize(ours.tokenize(text)) == text


def test_no_character_is_special_when_spaces_are_kept(opened):
    # The sentinel itself was cut out of the text.
    ours = opened("sentencepiece-nfkc-bytes", ignore_extra_whitespaces=False)
    assert ours.detokenize(ours.tokenize("a ☯  b")) == "a ☯  b"


@pytest.mark.parametrize("name", ["sentencepiece-v1", "sentencepiece-nfkc"])
def test_sentencepiece_offsets_need_no_method_that_releases_dropped(opened, name):
    # AttributeError: decode_ids_as_immutable_proto.
    ours = opened(name)
    text = "the parser"
    offsets = ours.offsets(ours.tokenize(text), text)
    assert offsets[0] == 0
    assert len(offsets) == len(ours.tokenize(text))
    assert all(0 <= offset < len(text) for offset in offsets)


@pytest.mark.parametrize(
    ("name", "template", "warned"),
    [
        ("sentencepiece-nfkc", "{% for m in messages %}{{ m.role + '\\n' }}{% endfor %}", True),
        ("sentencepiece-nfkc", "{% for m in messages %}{{ m.content }}{% endfor %}", False),
        ("sentencepiece-v1", "{% for m in messages %}{{ m.role + '\\n' }}{% endfor %}", False),
    ],
    ids=["lost", "not-written", "kept"],
)
def test_it_is_said_that_the_lines_of_a_format_run_together(opened, name, template, warned):
    # Nothing tells that the model's normaliser makes spaces of newlines.
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        opened(name, prompt_format="default", chat_template=template)
    assert ["makes a space of a newline" in str(warning.message) for warning in said] == (
        [True] if warned else []
    )


# tiktoken.


def test_base64_rank_files_are_read(opened):
    # AssertionError: only a name that ends in .json.
    assert opened("rank-file").vocab_size == RANKS_IN_LIST + 1000


def test_a_regular_expression_is_a_pattern(opened):
    # ValueError: v1 or v2.
    ours = opened("json-rank-list", pattern=r"\S|\s")
    assert len(ours.tokenize("the")) == 3


def test_special_tokens_need_not_include_the_seven(opened):
    # AssertionError.
    ours = opened("json-rank-list", special_tokens=["<s>", "</s>"], num_special_tokens=2)
    assert (ours.bos, ours.eos, ours.eod, ours.pad_id) == (0, 1, 1, None)


def test_a_vocabulary_beyond_the_file_is_refused_with_both_sizes(opened):
    # AssertionError without a message.
    with pytest.raises(TokenizerError, match=r"vocab_size = 9999.*1256 to 3000"):
        opened("json-rank-list", vocab_size=9999)


def test_the_number_of_special_tokens_may_be_left_open(opened):
    # TypeError: None is not less than the vocabulary.
    assert opened("json-rank-list", num_special_tokens=None).vocab_size == RANKS_IN_LIST + 1000


def test_text_does_not_spell_control_tokens_and_may_hold_their_names(opened):
    # text_to_ids gave the control token, text_to_tokens raised ValueError.
    ours = opened("json-rank-list")
    library = ours._tokenizer
    assert ours.bos not in ours.tokenize("a<s>b")
    assert ours.detokenize(ours.tokenize("a<s>b")) == "a<s>b"
    assert library.tokens_to_text(library.text_to_tokens("a<s>b")) == "a<s>b"


def test_ids_are_shifted_once_in_both_directions(opened):
    # token_to_id("a") is 161 where the encoder gives 129; inv_vocab has holes and ids beyond it.
    ours = opened("json-rank-list", num_special_tokens=32)
    assert ours.tokenize("a") == [ours.token_to_id("a")] == [32 + ord("a")]
    assert ours.inv_vocab[32 + ord("a")] == "a"
    assert list(ours.inv_vocab) == list(range(ours.vocab_size))


def test_the_vocabulary_shows_special_tokens(opened):
    # The mapping had ordinary tokens only.
    ours = opened("json-rank-list")
    assert ours.vocab["<s>"] == ours.bos
    assert ours.vocab[999] == "<SPECIAL_999>"
    assert len(ours.vocab) == ours.vocab_size


@pytest.mark.parametrize("text", ["🙂", "吾輩は猫である", "é🤷‍♀️"])
def test_characters_of_several_tokens_are_decoded_whole(opened, text):
    # Replacement characters: each token was decoded by itself.
    ours = opened("json-rank-list")
    assert len(ours.tokenize(text)) > len(text) / 2
    assert ours.detokenize(ours.tokenize(text)) == text


def test_special_tokens_with_a_role_are_not_additional_ones(opened):
    # The padding, mask, cls and sep tokens were listed.
    ours = opened("json-rank-list", special_tokens=["<pad>", "<mask>", "<cls>", "<sep>", "<X>"])
    assert ours.additional_special_tokens_ids == [4]


def test_tiktoken_offsets_count_characters_where_tokens_end_inside_them(opened):
    # No offsets in 0.16.1.
    ours = opened("json-rank-list")
    text = "a🙂b"
    ids = ours.tokenize(text)
    assert len(ids) > 3
    assert ours.offsets(ids, text) == [0, *[1] * (len(ids) - 2), 2]


# Byte-level.


def test_every_byte_is_text_to_the_byte_level_library(opened):
    # The end of a document was byte 0x00 and the padding byte 0x01.
    ours = opened("byte-level")
    text = "".join(map(chr, range(128)))
    assert ours.tokenize(text) == list(range(128))
    assert ours.detokenize(ours.tokenize(text)) == text
    assert not {ours.eos, ours.eod, ours.pad, ours.bos} & set(range(256))


def test_every_id_of_the_byte_level_library_is_decoded(opened):
    # ValueError from 256 on; '\x00' for the end of a document; white space at the end was dropped.
    ours = opened("byte-level", special_tokens=["<X>"])
    every_id = range(ours.vocab_size)
    assert ours.detokenize(every_id, skip_special_tokens=True) == bytes(range(256)).decode(
        errors="replace"
    )
    assert ours.detokenize([*b"a \n", ours.eos], skip_special_tokens=True) == "a \n"


def test_special_tokens_of_the_byte_level_library_are_read_on_request(opened):
    # Never.
    ours = opened("byte-level", special_tokens=["<X>"], parse_special_tokens=True)
    assert ours.tokenize("a<X>") == [97, ours.token_to_id("<X>")]


def test_the_byte_level_library_has_the_whole_surface(opened):
    # RecursionError for cls, sep and mask; AttributeError for the rest; an unknown id of 259.
    ours = opened("byte-level", special_tokens=["<X>", "</s>"])
    assert all(getattr(ours, role) is None for role in ("cls", "sep", "mask", "unk", "bos"))
    assert len(ours.vocab) == len(ours.inv_vocab) == ours.vocab_size
    assert ours.offsets(ours.tokenize("aéb"), "aéb") == [0, 1, 1, 2]
    assert ours.additional_special_tokens_ids == [ours.token_to_id("<X>")]


# Null.


def test_the_null_library_has_every_id_or_none(opened):
    # AttributeError for the padding, RecursionError or AttributeError for the rest.
    ours = opened("null", vocab_size=10)
    assert (ours.eod, ours.eos) == (9, 9)
    assert [getattr(ours, f"{role}_id") for role in ROLES if role != "eos"] == [None] * 6


def test_the_null_library_takes_an_empty_text(opened):
    # ValueError: int('').
    assert opened("null", vocab_size=10).tokenize("") == []


def test_both_sizes_of_the_null_library_are_to_be_had(opened):
    # N + 1 ids in 0.16.1, N later: a padded vocabulary changed without a word.
    assert opened("null", vocab_size=10).vocab_size == 10
    old = opened("null", vocab_size=10, add_eod=True)
    assert (old.vocab_size, old.eod) == (11, 10)


@pytest.mark.parametrize(
    "name", ["sentencepiece-v1", "json-rank-list", "rank-file", "byte-level", "null"]
)
def test_no_special_id_is_a_negative_number_or_an_exception(opened, name):
    # -1, NameError, AttributeError or RecursionError, by library.
    ours = opened(name, **({"vocab_size": 10} if name == "null" else {}))
    for role in (*ROLES, "eod"):
        token_id = ours.eod if role == "eod" else getattr(ours, f"{role}_id")
        assert token_id is None or 0 <= token_id < ours.vocab_size
    assert ours.eod is not None
