"""SentencePiece with special tokens of the user's, in both modes, and with every space kept."""

import io
import pickle
import re
import warnings
from functools import partial
from itertools import pairwise

import pytest
import sentencepiece
from hypothesis import given
from hypothesis import strategies as st

from megatron_ext.errors import TokenizerError
from megatron_ext.tokenizers import TOKENIZER_LIBRARIES
from megatron_ext.tokenizers.libraries.sentencepiece_model import (
    bytes_field,
    edit_model,
    read_field,
    varint_field,
)
from tests.tokenizers.tokenizer_files import MANY, SENTENCES

KEEPS_SPACES = "sentencepiece-v1"
"""A published model with byte fallback, whose normaliser leaves spaces alone."""
SHORTENS_SPACES = "sentencepiece-nfkc"
SHORTENS_SPACES_WITH_BYTES = "sentencepiece-nfkc-bytes"
MODELS = (KEEPS_SPACES, SHORTENS_SPACES, SHORTENS_SPACES_WITH_BYTES)
NAMES = ("<X>", "<mask>", "[IMG]", "</s>")
WRITTEN = st.lists(
    st.one_of(st.sampled_from([*NAMES, " ", "  ", "the parser", " the", "é", "🙂", "<", "X>"])),
    max_size=8,
).map("".join)


@pytest.fixture(scope="session")
def built(adapted):
    return partial(adapted, "sentencepiece")


def library_of(path):
    return sentencepiece.SentencePieceProcessor(model_file=str(path))


def model_with(**options):
    """Bytes of a small model trained with other options."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(SENTENCES),
        model_writer=model,
        character_coverage=0.98,
        minloglevel=2,
        **{"vocab_size": 500, "model_type": "bpe", **options},
    )
    return model.getvalue()


# Special tokens that the model holds.


def test_a_special_token_of_the_model_keeps_its_id_and_is_read_where_it_is_asked_for(built):
    ours = built("sentencepiece-v3", special_tokens=["[INST]", "[/INST]"])
    ids, ends = ours.encode_with_byte_ends("[INST]the", parse_special=True)
    assert ids.tolist() == [ours.token_to_id("[INST]"), *ours.text_to_ids("the")]
    assert ends.tolist() == [6, 9]
    assert ours.token_to_id("[INST]") not in ours.text_to_ids("[INST]the")
    assert ours.vocab_size == built("sentencepiece-v3").vocab_size
    assert len(built("sentencepiece-v3").additional_special_tokens_ids) > 5
    assert built(KEEPS_SPACES).additional_special_tokens_ids == []


@pytest.mark.parametrize("mode", [False, True], ids=["modern", "legacy"])
def test_a_piece_that_text_could_spell_no_longer_comes_out_of_text(tmp_path, mode):
    file = tmp_path / "x.model"
    file.write_bytes(model_with(user_defined_symbols="<turn>"))
    theirs = library_of(file)
    turn = theirs.piece_to_id("<turn>")
    assert turn in theirs.encode("a <turn> b")
    ours = TOKENIZER_LIBRARIES["sentencepiece"].build(
        file, {"additional_special_tokens": ["<turn>"], "legacy": mode}
    )
    assert turn not in ours.text_to_ids("a <turn> b")
    assert ours.text_to_ids("a <turn>", parse_special=True)[-1] == turn
    assert ours.is_control(turn)
    assert ours.token_bytes(turn) is None
    assert ours.vocab_size == theirs.get_piece_size()


def test_a_special_token_that_the_model_lacks_is_refused_with_the_flag_that_appends_it(built):
    with pytest.raises(TokenizerError, match=r"'<X>'.*--tokenizer-sentencepiece-legacy"):
        built(KEEPS_SPACES, special_tokens=["<s>", "<X>"])


def test_the_unknown_piece_can_be_named(built):
    ours = built(KEEPS_SPACES, special_tokens=["<unk>"])
    assert ours.unk_id == 0
    assert ours.text_to_ids("<unk>", parse_special=True) == [0]


# Special tokens that the model lacks.


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("option", ["special_tokens", "additional_special_tokens"])
def test_what_the_model_lacks_gets_the_next_ids_in_order(built, tokenizer_path, name, option):
    size = library_of(tokenizer_path(name)).get_piece_size()
    ours = built(name, **{option: ["<X>", "</s>", "<Y>"]}, legacy=option == "special_tokens")
    assert ours.vocab_size == size + 2
    assert ours.tokens_to_ids(["<X>", "</s>", "<Y>"]) == [size, 2, size + 1]
    assert ours.ids_to_tokens([size, size + 1]) == ["<X>", "<Y>"]
    assert ours.token_bytes(size) is None
    assert ours.is_control(size)
    assert ours.additional_special_tokens_ids == [size, size + 1]
    assert ours.eos_id == 2


def test_additional_special_tokens_are_text_unless_asked_for(built):
    for legacy in (False, True):
        ours = built(KEEPS_SPACES, additional_special_tokens=["<X>"], legacy=legacy)
        assert ours.token_to_id("<X>") not in ours.text_to_ids("a <X>")
        assert ours.text_to_ids("a <X>", parse_special=True)[-1] == ours.token_to_id("<X>")


@pytest.mark.parametrize(
    "options",
    [
        {"special_tokens": {"mask_token": "<mask>", "eod_token": "<eod>", "bos_token": "<X>"}},
        {"special_tokens": ["<mask>", "<eod>"], "bos_token": "<X>"},
        {"special_tokens": ["<MASK>", "<EOD>"], "bos_token": "<X>"},
        {"mask_token": "<mask>", "eod_token": "<end of document>", "bos_token": "<X>"},
    ],
    ids=["mapping", "list", "old-spelling", "options"],
)
def test_roles_come_from_a_mapping_from_usual_names_and_from_options(built, options):
    ours = built(KEEPS_SPACES, legacy=True, **options)
    size = built(KEEPS_SPACES).vocab_size
    assert sorted([ours.mask_id, ours.eod, ours.bos_id]) == [size, size + 1, size + 2]
    assert ours.id_to_token(ours.bos_id) == "<X>"
    assert ours.id_to_token(ours.mask_id).lower() == "<mask>"
    assert (ours.eos_id, ours.unk_id) == (2, 0)
    assert (ours.pad_id, ours.cls_id, ours.sep_id) == (None, None, None)
    assert ours.additional_special_tokens_ids == []


def test_a_list_does_not_take_a_role_from_the_model(built):
    ours = built(KEEPS_SPACES, legacy=True, special_tokens=["<bos>", "<pad>", "<cls>", "<sep>"])
    assert ours.bos_id == 1
    ids = [ours.token_to_id(name) for name in ("<pad>", "<cls>", "<sep>")]
    assert [ours.pad_id, ours.cls_id, ours.sep_id] == ids
    assert ours.eod == ours.eos_id == 2


def test_a_control_piece_of_the_model_with_a_usual_name_has_its_role(tmp_path):
    file = tmp_path / "x.model"
    file.write_bytes(model_with(control_symbols="[CLS],[SEP]"))
    ours = TOKENIZER_LIBRARIES["sentencepiece"].build(file)
    assert (ours.cls_id, ours.sep_id) == (ours.token_to_id("[CLS]"), ours.token_to_id("[SEP]"))
    assert ours.mask_id is None


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"special_tokens": "<X>"}, "list of names.*'<X>'"),
        ({"special_tokens": ["<X>", ""]}, "list of names.*''"),
        ({"special_tokens": ["<X>", "<X>"]}, "named twice.*'<X>'"),
        ({"special_tokens": {"boss_token": "<X>"}}, "boss_token.*did you mean 'bos_token'"),
        ({"additional_special_tokens": [7]}, "list of names.*7"),
        ({"pad_token": ""}, "list of names"),
        ({"engine": "warp"}, "unknown engine"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_wrong_option_is_refused(built, options, words):
    with pytest.raises(TokenizerError, match=words):
        built(KEEPS_SPACES, legacy=True, **options)


# Legacy mode in text.


def as_megatron(processor, ours, text, *, trim):
    """Megatron's legacy encoding: the stretch after the last special token is not trimmed."""
    separator = processor.piece_to_id("▁")
    ids = []
    *parts, last = re.split(f"({'|'.join(map(re.escape, NAMES))})", text)
    for part in parts:
        if part in NAMES:
            ids.append(ours.token_to_id(part))
            continue
        stretch = processor.encode(part)
        if trim and ids and stretch[:1] == [separator]:
            stretch = stretch[1:]
        ids += stretch
    return ids + processor.encode(last)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("trim", [True, False], ids=["trim", "keep"])
@MANY
@given(text=WRITTEN)
def test_legacy_ids_are_those_of_the_stretches_between_special_tokens(
    built, tokenizer_path, name, trim, text
):
    ours = built(
        name, legacy=True, special_tokens=list(NAMES), trim_spm_separator_after_special_token=trim
    )
    expected = as_megatron(library_of(tokenizer_path(name)), ours, text, trim=trim)
    assert ours.text_to_ids(text) == expected
    assert ours.text_to_ids_batch([text, "", text])[2].tolist() == expected
    ids, ends = ours.encode_with_byte_ends(text)
    assert ids.tolist() == expected
    assert all(a <= b for a, b in pairwise([0, *ends.tolist()]))
    assert not len(ids) or ends[-1] == len(text.encode())


def test_only_the_tokens_that_were_named_are_read_in_legacy_text(built):
    ours = built(KEEPS_SPACES, legacy=True, special_tokens=["<X>"])
    assert (ours.legacy, built(KEEPS_SPACES).legacy) == (True, False)
    assert 1 not in ours.text_to_ids("<s>the<X>")
    assert ours.text_to_ids("<s>the<X>", parse_special=True)[0] == 1


def test_legacy_text_between_chosen_places_reads_no_special_token_elsewhere(built):
    ours = built(KEEPS_SPACES, legacy=True, special_tokens=["<X>"])
    ids, ends = ours.encode_with_control_spans("<X>the<X>", [(0, 3)])
    assert ids.tolist().count(ours.token_to_id("<X>")) == 1
    assert (ends[0], ends[-1]) == (3, 9)


@pytest.mark.parametrize("name", MODELS)
@MANY
@given(text=WRITTEN)
def test_legacy_text_comes_back_as_it_was(built, name, text):
    ours = built(
        name,
        legacy=True,
        special_tokens=list(NAMES),
        ignore_extra_whitespaces=False,
        trim_spm_separator_after_special_token=False,
    )
    ids = ours.text_to_ids(text)
    if ours.unk_id not in ids:
        assert ours.ids_to_text(ids) == text


def test_trimming_drops_the_space_of_a_chat_template_and_no_other(built):
    ours = built(KEEPS_SPACES, legacy=True, special_tokens=["[INST]", "[/INST]"])
    written = "[INST] who [/INST] you"
    assert ours.ids_to_tokens(ours.text_to_ids(written)) == [
        *("[INST]", "▁who", "▁", "[/INST]", "▁", "▁you")
    ]
    assert ours.ids_to_text(ours.text_to_ids(written)) == "[INST]who [/INST] you"
    spans = ours.encode_with_byte_ends(written)[1].tolist()
    assert spans == [6, 10, 11, 18, 18, 22]


# Spaces.


@pytest.mark.parametrize("name", [SHORTENS_SPACES, SHORTENS_SPACES_WITH_BYTES])
@pytest.mark.parametrize(
    "text",
    ["the  world ", " the", "   ", " a   b  ", "for i in x:  pass   ", ""],
    ids=["runs-and-tail", "lead", "only-spaces", "all", "code", "empty"],
)
def test_every_space_is_kept_on_request(built, name, text):
    ours = built(name, ignore_extra_whitespaces=False)
    ids, ends = ours.encode_with_byte_ends(text)
    assert ours.ids_to_text(ids.tolist()) == text
    assert ours.text_to_ids_batch([text])[0].tolist() == ids.tolist() == ours.text_to_ids(text)
    assert ours.byte_ends(ids).tolist() == ends.tolist()
    default = built(name)
    if text.strip() != text or "  " in text:
        assert default.ids_to_text(default.text_to_ids(text)) == " ".join(text.split())


@pytest.mark.parametrize("name", [SHORTENS_SPACES, SHORTENS_SPACES_WITH_BYTES])
@MANY
@given(words=st.lists(st.sampled_from(["the", "parser", "(x)", "a1"]), min_size=1, max_size=6))
def test_text_without_spare_spaces_has_the_ids_of_the_model(built, tokenizer_path, name, words):
    text = " ".join(words)
    ours = built(name, ignore_extra_whitespaces=False)
    assert ours.text_to_ids(text) == library_of(tokenizer_path(name)).encode(text)


def test_no_character_is_special_when_spaces_are_kept(built):
    # Megatron's own sentinel was cut out of the text.
    ours = built(SHORTENS_SPACES_WITH_BYTES, ignore_extra_whitespaces=False)
    assert ours.ids_to_text(ours.text_to_ids("a ☯  b")) == "a ☯  b"


def test_a_model_that_keeps_spaces_is_not_changed(built):
    kept = built(KEEPS_SPACES, ignore_extra_whitespaces=False)
    for text in ("a  b ", "  x\n"):
        assert kept.text_to_ids(text) == built(KEEPS_SPACES).text_to_ids(text)


@pytest.mark.parametrize(
    "options",
    [
        {"model_type": "char", "hard_vocab_limit": False},
        {"model_type": "word", "hard_vocab_limit": False},
        {"model_type": "unigram", "normalization_rule_name": "identity"},
        {"add_dummy_prefix": False},
    ],
    ids=["characters", "words", "unigram", "no-dummy-prefix"],
)
def test_a_dummy_prefix_has_no_bytes_in_models_of_every_kind(tmp_path, options):
    (tmp_path / "x.model").write_bytes(model_with(**options))
    ours = TOKENIZER_LIBRARIES["sentencepiece"].build(tmp_path / "x.model")
    ids, ends = ours.encode_with_byte_ends("the parser of arguments")
    assert ours.byte_ends(ids).tolist() == ends.tolist()
    assert ours.ids_to_text(ids.tolist()) == "the parser of arguments"


# The edit of the model.


def test_an_edited_model_lacks_the_self_test_that_it_would_fail():
    self_test = bytes_field(
        4, bytes_field(1, bytes_field(1, b"a  b") + bytes_field(2, "▁x".encode()))
    )
    model = model_with()
    edited = edit_model(model + self_test, keep_spaces=True)
    assert edited == edit_model(model, keep_spaces=True)
    assert edited.startswith(model)


@given(st.integers(1, 1000), st.integers(0, 2**40), st.binary(max_size=300))
def test_fields_are_read_as_they_were_written(number, value, content):
    message = varint_field(number, value) + bytes_field(number, content)
    found, wire, read, at = read_field(message, 0)
    assert (found, wire, read) == (number, 0, value)
    found, wire, length, end = read_field(message, at)
    assert (found, wire, message[end - length : end], end) == (number, 2, content, len(message))


def test_a_tokenizer_with_added_tokens_survives_pickling(built):
    ours = built(
        SHORTENS_SPACES, legacy=True, special_tokens=["<X>"], ignore_extra_whitespaces=False
    )
    text = "the  <X> parser "
    ids = ours.text_to_ids(text)
    copy = pickle.loads(pickle.dumps(ours))
    assert copy.text_to_ids(text) == ids
    assert copy.fingerprint() == ours.fingerprint()
    assert dict(copy.files()) == dict(ours.files())


def test_legacy_text_with_many_special_tokens_is_cut_in_one_pass(opened):
    # Each special token searched the rest of the text for every name and copied it.
    names = [f"<{i}>" for i in range(100)]
    ours = opened("sentencepiece-v1", legacy=True, special_tokens=names)
    ids = ours.tokenize("a<7>" * 20_000)
    assert ids.count(ours.token_to_id("<7>")) == 20_000


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
