"""What Megatron's flags, builder, metadata and wrapper get wrong, and we must not.

Each test fails on the behaviour that its comment states, which megatron-core 0.16.1 or main of
August 2026 shows. What the tests of a library or of a contract hold too is held there alone.
"""

import json
import pickle
import shutil
from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from megatron_ext.errors import ConfigError, TokenizerError
from megatron_ext.megatron_lm.arguments import with_our_tokenizers
from megatron_ext.tokenizers import (
    MegatronTokenizer,
    MegatronTokenizerText,
    MegatronTokenizerVision,
    TokenizerConfig,
    build_tokenizer,
)

BY_METADATA, GIVEN, OWN = "{{ 'metadata' }}", "{{ 'given' }}", "{{ 'own' }}"
MODEL_FLAGS = {"make_vocab_size_divisible_by": 128, "tensor_model_parallel_size": 2, "rank": 0}
IMAGE_FLAGS: dict[str, Any] = {
    "tokenizer_prompt_format": "qwen2p5",
    "special_tokens": ["<image>"],
    "image_tag_type": "nvlm",
    "force_system_message": True,
}
"""What the multimodal scripts put into every namespace, required as their flags are."""


def namespace(**given: Any) -> Namespace:
    return Namespace(**{**MODEL_FLAGS, "tokenizer_type": None, **given})


# The builder.


@pytest.mark.parametrize("args", [TokenizerConfig(library="null", vocab_size=5), None], ids=repr)
def test_overrides_count(args):
    # main discards every keyword of the call.
    args = namespace(tokenizer_type="NullTokenizer", vocab_size=5) if args is None else args
    tokenizer = build_tokenizer(args, vocab_size=9, null_eod_id=0)
    assert tokenizer.eod == 0
    assert tokenizer.vocab_size >= 9


def test_an_override_that_is_no_field_is_refused_with_the_nearest():
    # main discards it.
    with pytest.raises(ConfigError, match=r"no such field; got 'vocabsize'.*mean 'vocab_size'"):
        build_tokenizer(TokenizerConfig(library="byte-level"), vocabsize=300)


@pytest.mark.parametrize(
    ("args", "fix"),
    [({"library": "byte-level"}, r"TokenizerConfig\(\*\*fields\)"), ("null", ""), (None, "")],
    ids=["dict", "str", "None"],
)
def test_what_describes_no_tokenizer_is_named_by_its_type(args, fix):
    # AttributeError: no attribute 'tokenizer_type'.
    with pytest.raises(ConfigError, match=f"got {type(args).__name__}.*{fix}"):
        build_tokenizer(args)


def test_metadata_of_a_null_tokenizer_count(tmp_path):
    # The flag is ignored on the null path.
    file = tmp_path / "metadata.json"
    template = "{{ messages[0].content }}"
    file.write_text(json.dumps({"library": "null-text", "chat_template": template}))
    for name in ("tokenizer_metadata", "metadata_path"):
        for metadata in (str(file), json.loads(file.read_text())):
            args = namespace(tokenizer_type="NullTokenizer", vocab_size=5, **{name: metadata})
            assert build_tokenizer(args).chat_template == template


def test_a_chat_template_that_is_given_wins_over_the_metadata_beside_the_tokenizer(
    tokenizer_path, tmp_path
):
    # The metadata's won without a word.
    file = Path(shutil.copy(tokenizer_path("json-rank-list"), tmp_path / "ranks.json"))
    MegatronTokenizer.write_metadata(file, "tiktoken", chat_template="{{ 1 }}")
    config = TokenizerConfig(model=str(file))
    assert build_tokenizer(config).chat_template == "{{ 1 }}"
    said = build_tokenizer(replace(config, chat_template="{{ 2 }}"))
    assert said.chat_template == "{{ 2 }}"
    said.add_special_tokens({"additional_special_tokens": ["<a>"]})
    assert said.chat_template == "{{ 2 }}"
    said.save_pretrained(tmp_path / "saved")
    assert MegatronTokenizer.from_pretrained(tmp_path / "saved").chat_template == "{{ 2 }}"
    again = MegatronTokenizer.from_pretrained(tmp_path / "saved", chat_template="{{ 3 }}")
    assert again.chat_template == "{{ 3 }}"


def test_a_rank_list_of_any_name_is_tiktokens(tokenizer_path, tmp_path):
    # Taken for BERT's vocabulary: "has no [UNK]".
    expected = build_tokenizer(TokenizerConfig(model=str(tokenizer_path("json-rank-list"))))
    for name in ("vocab.json", "multiMixV8.gpt4o_nc_sd.500000.128k.vocab.json"):
        file = shutil.copy(tokenizer_path("json-rank-list"), tmp_path / name)
        built = build_tokenizer(TokenizerConfig(model=str(file)))
        assert built.library == MegatronTokenizer.from_pretrained(file).library == "tiktoken"
        assert built.fingerprint() == expected.fingerprint()


# Padding of the vocabulary.


@pytest.mark.parametrize(
    ("given", "padded"),
    [
        ({}, 256),
        ({"padded_vocab_size": None}, 256),
        ({"padded_vocab_size": 777}, 777),
        ({"pad_vocab_size": True}, 256),
        ({"pad_vocab_size": False}, None),
        ({"make_vocab_size_divisible_by": None}, None),
    ],
    ids=["0.16", "unset", "settled", "main", "switched-off", "no-divisor"],
)
def test_megatrons_scripts_find_the_padded_size_where_they_look_for_it(given, padded):
    # 0.16.1's own builder for datasets never sets it; main's overwrites nothing that is settled,
    # and fails where the divisor is missing.
    args = namespace(tokenizer_type="NullTokenizer", vocab_size=130, **given)
    with_our_tokenizers(build_tokenizer)(args)
    assert getattr(args, "padded_vocab_size", None) == padded


# Flags.


@pytest.mark.parametrize("given", [{}, IMAGE_FLAGS], ids=["bare", "multimodal-script"])
def test_a_null_tokenizer_for_images_minds_no_flag_that_its_type_never_read(given):
    args = namespace(tokenizer_type="NullMultimodalTokenizer", vocab_size=100, **given)
    tokenizer = build_tokenizer(args)
    assert isinstance(tokenizer, MegatronTokenizerVision)
    assert (tokenizer.vocab_size, tokenizer.eod) == (101, 100)
    assert tokenizer.tokenize("5 <image> 7") == [5, -200, 7]


def test_a_text_tokenizer_of_a_multimodal_script_minds_no_flag_for_images(tokenizer_path):
    args = namespace(
        tokenizer_type="HuggingFaceTokenizer",
        tokenizer_model=str(tokenizer_path("huggingface-nfc")),
        image_tag_type="nvlm",
        force_system_message=True,
    )
    assert type(build_tokenizer(args)) is MegatronTokenizerText


@pytest.mark.parametrize("field", [{"image_tag_type": "nvlm"}, {"force_system_message": True}])
def test_an_option_for_images_is_not_ignored_without_them(field):
    # Whatever a class does not read is dropped without a word.
    with pytest.raises(ConfigError, match=f"{next(iter(field))}: .*mode multimodal; got mode text"):
        TokenizerConfig(library="byte-level", **field)


def test_tags_around_images_are_refused_where_texts_are_numbers():
    config = TokenizerConfig(
        library="null", vocab_size=9, mode="multimodal", image_tag_type="internvl"
    )
    with pytest.raises(TokenizerError, match="image_tag_type: a null tokenizer"):
        build_tokenizer(config)


@pytest.mark.parametrize("name", ["vocab_size", "null_eod_id", "vocab_extra_ids"])
def test_a_number_given_as_text_is_named(name):
    with pytest.raises(ConfigError, match=f"{name}: .*wrong type; got str, '12'"):
        TokenizerConfig(**{name: "12"})


@pytest.mark.parametrize(
    ("library", "option", "value", "expected"),
    [
        ("null", "vocab_size", "12", "expected int"),
        ("byte-level", "vocab_size", 300.0, "expected int"),
        ("byte-level", "_eos_id", "0", "expected int"),
        ("null", "engine", 3, "expected str"),
    ],
)
def test_an_option_of_the_wrong_type_is_named(library, option, value, expected):
    # TypeError from the middle of a class, or a tokenizer that fails later.
    with pytest.raises(TokenizerError, match=f"{option}: .*{library}.*wrong type.*{expected}"):
        MegatronTokenizer.from_pretrained(None, {"library": library}, **{option: value})


@pytest.mark.parametrize(
    ("path", "options", "message"),
    [
        (3, {}, "tokenizer_path: .*got int"),
        (b"x", {}, "tokenizer_path: .*got bytes"),
        (None, {"chat_template": 3}, "chat template is not a text; got int"),
        (None, {"prompt_format": 3}, "prompt_format: .*not a name; got int"),
    ],
    ids=["number", "bytes", "template", "format"],
)
def test_arguments_of_the_wrong_type_are_named(path, options, message):
    with pytest.raises((TokenizerError, ConfigError), match=message):
        MegatronTokenizer.from_pretrained(path, {"library": "byte-level"}, **options)


def test_megatrons_word_for_the_engine_is_taken(tokenizer_path):
    pytest.importorskip("gigatoken")
    path = tokenizer_path("huggingface-byte-level")
    tokenizer = MegatronTokenizer.from_pretrained(
        path, {"library": "huggingface"}, use_gigatoken=True
    )
    assert tokenizer._tokenizer.engine == "gigatoken"


# Metadata.


def test_metadata_may_be_read_only():
    # metadata_path, class_name and class_path are written into the mapping.
    metadata = MappingProxyType({"library": "byte-level"})
    assert MegatronTokenizer.from_pretrained(None, metadata).library == "byte-level"


# The factory.


def test_metadata_do_not_replace_members_of_the_tokenizer(opened):
    # Every key of the metadata becomes an attribute, whatever it hides.
    metadata = {"library": "byte-level", "tokenize": "x", "vocab_size": 3, "options": 1}
    tokenizer = MegatronTokenizer.from_pretrained(None, {**metadata, "model_type": "gpt"})
    assert (tokenizer.model_type, pickle.loads(pickle.dumps(tokenizer)).model_type) == ("gpt",) * 2
    with pytest.raises(AttributeError, match="no attribute 'class_name'"):
        _ = tokenizer.class_name
    assert tokenizer.tokenize("a") == [97]
    assert tokenizer.vocab_size == 512
    assert tokenizer.config["vocab_size"] == 3


# The wrapper.


def test_an_id_of_zero_is_found_wherever_an_id_is_looked_for(opened):
    # Megatron chains "a or b", which passes over the id 0.
    tokenizer = opened("null", vocab_size=300, pad_id=0, eod_id=0)
    assert (tokenizer.pad, tokenizer.eod) == (0, 0)
    assert tokenizer.special_tokens_dict["pad_token"] == 0
    tokenizer = opened("json-rank-list", num_special_tokens=20)
    assert tokenizer.unk == 0
    assert tokenizer.token_to_id("<unk>") == 0
    # Real Mistral vocabularies pad with the unknown token, whose id is 0; Megatron has None here.
    chat = opened("sentencepiece-v3", prompt_format="mistral")
    assert chat.unk == chat.pad == 0


def test_identifiers_follow_the_chat_template_on_request(tokenizer_path):
    # What the metadata say is never part of them: the cache of another template is found.
    path = tokenizer_path("huggingface-nfc")
    one, other = (
        MegatronTokenizer.from_pretrained(
            path, {"library": "huggingface", "chat_template": template}, identify_by_content=True
        )
        for template in (BY_METADATA, OWN)
    )
    assert one.unique_identifiers != other.unique_identifiers


def test_a_given_template_goes_before_the_metadatas_and_that_before_the_tokenizers_own(
    tokenizer_path, tmp_path
):
    # 0.16.1 has the given one last, and main after the metadata's.
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    document = (tokenizer_path("huggingface-nfc") / "tokenizer.json").read_bytes()
    (folder / "tokenizer.json").write_bytes(document)
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"chat_template": OWN, "eos_token": "<|end|>"}), encoding="utf-8"
    )
    bare = {"library": "huggingface"}
    with_template = {**bare, "chat_template": BY_METADATA}
    for metadata, options, expected in (
        (with_template, {"chat_template": GIVEN}, "given"),
        (with_template, {}, "metadata"),
        (bare, {"chat_template": GIVEN}, "given"),
        (bare, {}, "own"),
    ):
        tokenizer = MegatronTokenizer.from_pretrained(folder, metadata, **options)
        conversation = [{"role": "user", "content": "x"}]
        assert tokenizer.apply_chat_template(conversation, tokenize=False) == expected


# The HuggingFace library.


def test_a_vocabulary_with_unused_ids_has_a_list(tokenizer_path, tmp_path):
    # Megatron looks every id up in a dictionary that lacks the unused ones: KeyError.
    source = tokenizer_path("huggingface-byte-level") / "tokenizer.json"
    document = json.loads(source.read_text(encoding="utf-8"))
    last = max(row["id"] for row in document["added_tokens"])
    document["added_tokens"].append(
        {**document["added_tokens"][-1], "id": last + 3, "content": "<far>", "special": True}
    )
    (tmp_path / "tokenizer.json").write_text(json.dumps(document), encoding="utf-8")
    tokenizer = MegatronTokenizer.from_pretrained(tmp_path)
    assert tokenizer.vocab_size == last + 4
    assert tokenizer.vocab[last + 1 : last + 4] == ["", "", "<far>"]


def test_a_missing_end_of_sequence_is_none(tokenizer_path, tmp_path):
    # Every other id is None where it is missing; this one raises.
    source = tokenizer_path("huggingface-byte-level") / "tokenizer.json"
    text = source.read_text(encoding="utf-8").replace("<|end|>", "<other>")
    (tmp_path / "tokenizer.json").write_text(text, encoding="utf-8")
    tokenizer = MegatronTokenizer.from_pretrained(tmp_path)
    assert tokenizer.eos is tokenizer.eod is tokenizer._tokenizer.eos_id is None


def test_roles_are_completed_as_megatron_does_it_without_new_tokens(opened):
    tokenizer = opened("huggingface-wordpiece")
    assert tokenizer.bos == tokenizer.cls == tokenizer.token_to_id("[CLS]")
    size = tokenizer.vocab_size
    with_sep = opened("huggingface-wordpiece", sep_token="[SEP]")
    assert with_sep.eos == with_sep.sep == with_sep.token_to_id("[SEP]")
    assert with_sep.vocab_size == size


def test_options_of_megatrons_class_that_change_nothing_here_are_accepted(tokenizer_path):
    folder = tokenizer_path("huggingface-byte-level")
    ours = MegatronTokenizer.from_pretrained(folder, use_fast=False, trust_remote_code=True)
    plain = MegatronTokenizer.from_pretrained(folder)
    assert ours.tokenize("the parser ends") == plain.tokenize("the parser ends")
