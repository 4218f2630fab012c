"""The class names that Megatron's releases gave to tokenizers."""

import pytest

import megatron_ext
from megatron_ext import tokenizers
from megatron_ext.errors import TokenizerError
from megatron_ext.tokenizers import (
    MegatronTokenizer,
    MegatronTokenizerText,
    MegatronTokenizerVision,
)

TEXT = ("GPTTokenizer", "BertTokenizer", "MambaTokenizer", "T5Tokenizer", "DefaultTokenizerText")


@pytest.mark.parametrize("package", [megatron_ext, tokenizers], ids=["package", "tokenizers"])
def test_every_alias_is_the_class_itself_and_no_layer_around_it(package):
    for name in TEXT:
        assert getattr(package, name) is MegatronTokenizerText
        assert name in package.__all__
    assert package.DefaultTokenizerVision is MegatronTokenizerVision


def test_an_alias_builds_a_tokenizer_and_leaves_its_config_alone():
    config = {"library": "byte-level"}
    assert megatron_ext.GPTTokenizer(path=None, config=config).tokenize("ab") == [97, 98]
    assert config == {"library": "byte-level"}


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("megatron.core.tokenizers.text.text_tokenizer", "MegatronTokenizerText"),
        ("megatron.core.tokenizers.text", "MegatronTokenizerText"),
        *(
            (f"megatron.core.tokenizers.text.models.{module}_tokenizer", name)
            for module, name in (
                ("gpt", "GPTTokenizer"),
                ("bert", "BertTokenizer"),
                ("mamba", "MambaTokenizer"),
                ("t5", "T5Tokenizer"),
                ("retro", "RetroTokenizer"),
                ("default", "DefaultTokenizerText"),
            )
        ),
    ],
    ids=lambda value: value.rpartition(".")[2],
)
def test_metadata_that_name_a_text_class_of_megatron_give_ours(module, name):
    metadata = {"library": "byte-level", "class_name": name, "class_path": module}
    tokenizer = MegatronTokenizer.from_pretrained(metadata_path=metadata)
    assert type(tokenizer) is MegatronTokenizerText


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("megatron.core.tokenizers.vision.vision_tokenizer", "MegatronTokenizerVision"),
        ("megatron.core.tokenizers.vision.models.default_tokenizer", "DefaultTokenizerVision"),
    ],
    ids=["0.19", "0.17"],
)
def test_metadata_that_name_a_vision_class_of_megatron_give_ours(module, name):
    for library in ("null-multimodal", "byte-level"):
        metadata = {"library": library, "class_name": name, "class_path": module}
        tokenizer = MegatronTokenizer.from_pretrained(metadata_path=metadata, vocab_size=300)
        assert type(tokenizer) is MegatronTokenizerVision


def test_a_text_class_of_megatron_beside_a_library_for_images_gives_the_one_for_images():
    metadata = {
        "library": "null-multimodal",
        "class_name": "MegatronTokenizerText",
        "class_path": "megatron.core.tokenizers.text.text_tokenizer",
    }
    tokenizer = MegatronTokenizer.from_pretrained(metadata_path=metadata, vocab_size=30)
    assert type(tokenizer) is MegatronTokenizerVision


def test_a_class_that_megatron_never_had_is_refused_by_name():
    metadata = {
        "library": "byte-level",
        "class_name": "GPTTokeniser",
        "class_path": "megatron.core.tokenizers.text.models.gpt_tokenizer",
    }
    with pytest.raises(TokenizerError, match=r"no such tokenizer class.*mean 'GPTTokenizer'"):
        MegatronTokenizer.from_pretrained(metadata_path=metadata)
