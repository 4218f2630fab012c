"""What Megatron's flags, builder, padding and metadata get wrong, and we must not.

Each test fails on the behaviour that its comment states, which megatron-core 0.16.1 or main of
August 2026 shows. What old types mean in each release is tested in ``test_namespace.py``.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from argparse import Namespace
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from megatron_ext.errors import ConfigError, TokenizerError
from megatron_ext.tokenizers import (
    MegatronTokenizer,
    MegatronTokenizerText,
    MegatronTokenizerVision,
    TokenizerConfig,
    build_tokenizer,
    padded_vocab_size,
)
from megatron_ext.training.megatron_lm.megatron_builder import with_our_tokenizers

MODEL_FLAGS = {"make_vocab_size_divisible_by": 128, "tensor_model_parallel_size": 2, "rank": 0}
IMAGE_FLAGS: dict[str, Any] = {
    "tokenizer_prompt_format": "qwen2p5",
    "special_tokens": ["<image>"],
    "image_tag_type": "nvlm",
    "force_system_message": True,
}
"""What the multimodal scripts put into every namespace, required as their flags are."""


class OwnTokenizer(MegatronTokenizerText):
    """A class of a user's own."""


def namespace(**given: Any) -> Namespace:
    return Namespace(**{**MODEL_FLAGS, "tokenizer_type": None, **given})


# The builder.


def test_a_bare_configuration_is_enough():
    # main: AttributeError, the configuration lacks make_vocab_size_divisible_by.
    assert build_tokenizer(TokenizerConfig(library="byte-level")).vocab_size == 512


def test_building_leaves_the_namespace_as_it_was():
    # 0.16.1's and main's builders write padded_vocab_size into it.
    args = namespace(tokenizer_type="NullTokenizer", vocab_size=100)
    before = dict(vars(args))
    build_tokenizer(args)
    assert vars(args) == before


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
    file = Path(shutil.copy(tokenizer_path("sentencepiece-v1"), tmp_path / "tokenizer.model"))
    MegatronTokenizer.write_metadata(file, "sentencepiece", chat_template="theirs")
    config = TokenizerConfig(model=str(file))
    assert build_tokenizer(config).chat_template == "theirs"
    said = build_tokenizer(replace(config, chat_template="mine"))
    assert said.chat_template == "mine"
    said.add_special_tokens({"additional_special_tokens": ["<a>"]})
    assert said.chat_template == "mine"
    said.save_pretrained(tmp_path / "saved")
    assert MegatronTokenizer.from_pretrained(tmp_path / "saved").chat_template == "mine"
    again = MegatronTokenizer.from_pretrained(tmp_path / "saved", chat_template="other")
    assert again.chat_template == "other"


def test_a_rank_list_of_any_name_is_tiktokens(tokenizer_path, tmp_path):
    # Taken for BERT's vocabulary: "has no [UNK]".
    expected = build_tokenizer(TokenizerConfig(model=str(tokenizer_path("json-rank-list"))))
    for name in ("vocab.json", "multiMixV8.gpt4o_nc_sd.500000.128k.vocab.json"):
        file = shutil.copy(tokenizer_path("json-rank-list"), tmp_path / name)
        built = build_tokenizer(TokenizerConfig(model=str(file)))
        assert built.library == MegatronTokenizer.from_pretrained(file).library == "tiktoken"
        assert built.fingerprint() == expected.fingerprint()


def test_builder_and_datasets_get_equal_tokenizers(tokenizer_path):
    # 0.16.1: the script's builder and the dataset's builder are two, and make two classes.
    args = namespace(
        tokenizer_type="GPTSentencePieceTokenizer",
        tokenizer_model=str(tokenizer_path("sentencepiece-v1")),
    )
    one, other = build_tokenizer(args), build_tokenizer(args)
    assert type(one) is type(other) is MegatronTokenizerText
    assert one.unique_identifiers == other.unique_identifiers


# Padding of the vocabulary.


def test_the_padded_size_depends_on_nothing_but_its_arguments():
    # It is read from whatever the namespace holds, so that it changes with the number of GPUs.
    sizes = [
        padded_vocab_size(1000, make_vocab_size_divisible_by=128, tensor_model_parallel_size=tp)
        for tp in (1, 2, 8)
    ]
    assert sizes == [1024, 1024, 1024]
    assert (
        padded_vocab_size(1025, make_vocab_size_divisible_by=128, tensor_model_parallel_size=8)
        == 2048
    )


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


def test_the_image_token_is_inside_the_padded_vocabulary(tokenizer_path):
    # main: vocab_size is taken before <image> is added, whose id is outside an unpadded model.
    tokenizer = build_tokenizer(
        TokenizerConfig(
            model=str(tokenizer_path("huggingface-byte-level")),
            mode="multimodal",
            prompt_format="identity",
        )
    )
    size = padded_vocab_size(
        tokenizer.vocab_size, make_vocab_size_divisible_by=1, tensor_model_parallel_size=1
    )
    assert tokenizer.image_token_id < size == tokenizer.vocab_size


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
        (None, {"chat_template": 3}, "chat template is no text; got int"),
        (None, {"prompt_format": 3}, "prompt_format: .*no name; got int"),
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


@pytest.mark.parametrize("library", ["null", "null-text"])
def test_both_names_of_the_null_library_are_read(library):
    # Each release knows one of them.
    tokenizer = MegatronTokenizer.from_pretrained(None, {"library": library}, vocab_size=10)
    assert tokenizer.library == "null"


def test_a_class_of_ones_own_comes_back_from_what_was_written(tokenizer_path, tmp_path):
    # 0.16.1 writes model_type null beside it, and reading it raises KeyError: None.
    file = tmp_path / "tokenizer_metadata.json"
    path = tokenizer_path("huggingface-nfc")
    MegatronTokenizer.write_metadata(
        path, "huggingface", tokenizer_class=OwnTokenizer, metadata_path=file
    )
    assert type(MegatronTokenizer.from_pretrained(path, file)) is OwnTokenizer
    old = {**json.loads(file.read_text()), "model_type": None}
    assert type(MegatronTokenizer.from_pretrained(path, old)) is OwnTokenizer


def test_metadata_may_be_read_only():
    # metadata_path, class_name and class_path are written into the mapping.
    metadata = MappingProxyType({"library": "byte-level"})
    assert MegatronTokenizer.from_pretrained(None, metadata).library == "byte-level"


def test_metadata_of_a_name_that_is_no_path_are_written_where_they_are_told(tmp_path):
    # The documented example fails in every release: the name must exist on the disk.
    file = tmp_path / "tokenizer_metadata.json"
    MegatronTokenizer.write_metadata("GPT2BPETokenizer", "megatron", metadata_path=file)
    assert json.loads(file.read_text())["library"] == "megatron"


def test_constructing_a_tokenizer_for_images_does_not_import_the_model(tokenizer_path):
    # main: the module of the tokenizer imports LLaVA's for three constants, and torch with it.
    program = (
        "import sys; from megatron_ext.tokenizers import *; "
        "t = build_tokenizer(TokenizerConfig(model=sys.argv[1], mode='multimodal', "
        "prompt_format='identity')); assert t.tokenize('<image>') == [t.image_token_id]; "
        "print(sorted({'torch', 'megatron', 'transformers'} & set(sys.modules)))"
    )
    result = subprocess.run(
        [sys.executable, "-c", program, str(tokenizer_path("sentencepiece-v1"))],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert result.stdout.strip() == "[]"


# Saved tokenizers.


@pytest.mark.parametrize("kind", ["sft", "byte-level", "multimodal", "null-multimodal"])
def test_what_megatrons_checkpoints_leave_out_is_saved(
    kind: str, tokenizer_path: Callable[[str], Path], tmp_path: Path
):
    # main: no branch for sft, byte-level and null-multimodal; an empty folder for multimodal. The
    # prompt format, the metadata and the special tokens are saved by none.
    library = {"sft": "huggingface", "multimodal": "huggingface", "null-multimodal": "null"}
    config = TokenizerConfig(
        library=library.get(kind, kind),
        mode=kind.removeprefix("null-") if kind != "byte-level" else "text",
        model=None
        if kind in ("byte-level", "null-multimodal")
        else str(tokenizer_path("huggingface-nfc")),
        vocab_size=300 if kind == "null-multimodal" else None,
        prompt_format="identity" if kind in ("sft", "multimodal") else None,
        special_tokens=() if kind == "null-multimodal" else ("<new>",),
    )
    tokenizer = build_tokenizer(config)
    tokenizer.save_pretrained(tmp_path / "saved")
    again = MegatronTokenizer.from_pretrained(tmp_path / "saved")
    assert type(again) is type(tokenizer)
    assert (again.mode, again.prompt_format) == (tokenizer.mode, tokenizer.prompt_format)
    assert again.special_tokens_dict == tokenizer.special_tokens_dict
    assert again.vocab == tokenizer.vocab


def test_an_asset_that_cannot_be_saved_is_an_error_and_no_line_in_a_log(tmp_path):
    # main: any exception is logged and swallowed.
    (tmp_path / "file").write_text("")
    tokenizer = build_tokenizer(TokenizerConfig(library="byte-level"))
    with pytest.raises(TokenizerError, match="file"):
        tokenizer.save_pretrained(tmp_path / "file" / "saved")
