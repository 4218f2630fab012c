"""Every tokenizer flag, of ours and of Megatron's releases, on any parser."""

import argparse
from dataclasses import fields

import pytest

from megatron_ext.errors import ConfigError
from megatron_ext.tokenizers import TokenizerConfig
from megatron_ext.tokenizers.legacy_types import LEGACY_TYPES
from megatron_ext.training.configuration.tokenizer_arguments import (
    OLD_FLAGS,
    add_tokenizer_arguments,
    tokenizer_config_from_arguments,
    tokenizer_flags,
)

FLAGS_OF_016 = """
    --vocab-size 9 --padded-vocab-size 9 --vocab-file f --merge-file f --vocab-extra-ids 1
    --tokenizer-type TikTokenizer --tokenizer-model m --tokenizer-metadata f
    --tokenizer-special-tokens a b --legacy-tokenizer --tiktoken-pattern v1
    --tiktoken-num-special-tokens 9 --tiktoken-special-tokens a b --tokenizer-sentencepiece-legacy
    --tokenizer-hf-use-fast --tokenizer-hf-include-special-tokens --trust-remote-code
    --sft-tokenizer-prompt-format default
"""
FLAGS_OF_MAIN = """
    --vocab-size 9 --padded-vocab-size 9 --no-pad-vocab-size --disable-pad-vocab-size
    --vocab-file f --merge-file f --vocab-extra-ids 1 --tokenizer-type TikTokenizer
    --tokenizer-model m --tokenizer-metadata f --tokenizer-special-tokens a b --tiktoken-pattern v1
    --tiktoken-num-special-tokens 9 --tokenizer-sentencepiece-legacy
    --no-tokenizer-sentencepiece-ignore-extra-whitespaces
    --disable-tokenizer-sentencepiece-ignore-extra-whitespaces --tokenizer-hf-no-use-fast
    --tokenizer-hf-no-include-special-tokens --trust-remote-code --null-tokenizer-eod-id 0
    --null-tokenizer-pad-id -1 --chat-template t --use-gigatoken
    --sft-tokenizer-prompt-format default
"""
FLAGS_OF_THE_MULTIMODAL_EXAMPLE = """
    --special-tokens <image> <img> --tokenizer-prompt-format qwen2p5 --image-tag-type nvlm
    --force-system-message
"""


def parsed(*words):
    parser = argparse.ArgumentParser(allow_abbrev=False, exit_on_error=False)
    add_tokenizer_arguments(parser)
    return parser.parse_args(words)


def config(*words):
    return tokenizer_config_from_arguments(parsed(*words))


@pytest.mark.parametrize(
    "flags",
    [FLAGS_OF_016, FLAGS_OF_MAIN, FLAGS_OF_THE_MULTIMODAL_EXAMPLE],
    ids=["0.16", "main", "multimodal"],
)
def test_the_flags_of_a_release_are_all_there(flags):
    parsed(*flags.split())


@pytest.mark.parametrize(
    ("flag", "attribute"),
    [
        ("--tokenizer-metadata", "tokenizer_metadata"),
        ("--tokenizer-special-tokens", "tokenizer_special_tokens"),
        ("--special-tokens", "special_tokens"),
        ("--tiktoken-special-tokens", "tiktoken_special_tokens"),
        ("--sft-tokenizer-prompt-format", "sft_tokenizer_prompt_format"),
        ("--merge-file", "merge_file"),
        ("--chat-template", "chat_template"),
    ],
)
def test_a_flag_sets_the_attribute_that_megatron_reads(flag, attribute):
    value = getattr(parsed(flag, "x"), attribute)
    assert value in ("x", ["x"])


def test_what_is_not_said_leaves_no_attribute():
    assert vars(parsed()) == {}
    assert config() == TokenizerConfig()


def test_every_field_has_a_flag_and_every_flag_says_what_it_is():
    assert [flag.keys[-1] for flag in tokenizer_flags()] == [
        f.name for f in fields(TokenizerConfig)
    ]
    helps = [flag.help for flag in tokenizer_flags()] + [flag.help for flag in OLD_FLAGS]
    assert [text for text in helps if not text.endswith(".")] == []


def test_the_help_lists_every_flag_and_every_old_type():
    parser = argparse.ArgumentParser()
    add_tokenizer_arguments(parser)
    text = parser.format_help()
    names = [f.name for f in tokenizer_flags()] + [name for f in OLD_FLAGS for name in f.names]
    assert [name for name in [*names, *LEGACY_TYPES] if name not in text] == []


def test_new_flags_become_the_configuration():
    words = """
        --tokenizer-library sentencepiece --tokenizer-model m.model --tokenizer-mode sft
        --tokenizer-prompt-format file:own.jinja --tokenizer-engine reference
        --tokenizer-parse-special-tokens --no-tokenizer-sentencepiece-ignore-extra-whitespaces
        --vocab-extra-ids 3
    """
    assert config(*words.split()) == TokenizerConfig(
        library="sentencepiece",
        model="m.model",
        mode="sft",
        prompt_format="file:own.jinja",
        engine="reference",
        parse_special_tokens=True,
        sentencepiece_ignore_extra_whitespaces=False,
        vocab_extra_ids=3,
    )


@pytest.mark.parametrize(
    ("words", "field", "value"),
    [
        ("--tokenizer-hf-include-special-tokens", "hf_include_special_tokens", True),
        ("--no-tokenizer-hf-include-special-tokens", "hf_include_special_tokens", False),
        ("--tokenizer-hf-no-include-special-tokens", "hf_include_special_tokens", False),
        ("--tokenizer-hf-no-use-fast", "hf_use_fast", False),
        ("--trust-remote-code", "trust_remote_code", True),
        ("--no-trust-remote-code", "trust_remote_code", False),
        ("--special-tokens <image>", "special_tokens", ("<image>",)),
        ("--special-tokens", "special_tokens", ()),
        ("--use-gigatoken", "engine", "gigatoken"),
    ],
)
def test_every_spelling_and_polarity_is_read(words, field, value):
    assert getattr(config("--tokenizer-library", "huggingface", *words.split()), field) == value


@pytest.mark.parametrize("name", LEGACY_TYPES)
def test_every_old_type_is_read(name):
    legacy = LEGACY_TYPES[name]
    words = ["--tokenizer-type", name, "--tokenizer-prompt-format", "chatml"]
    got = config(*words)
    assert (got.library, got.mode, got.model) == (legacy.library, legacy.mode, legacy.model)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            "--tokenizer-hf-include-special-tokens --tokenizer-hf-no-include-special-tokens",
            "--tokenizer-hf-include-special-tokens and --tokenizer-hf-no-include-special-tokens",
        ),
        (
            "--tokenizer-hf-use-fast --tokenizer-hf-no-use-fast",
            "--tokenizer-hf-use-fast and --tokenizer-hf-no-use-fast",
        ),
        (
            "--tokenizer-type NullTokenizer --tokenizer-library tiktoken",
            "--tokenizer-library tiktoken and --tokenizer-type NullTokenizer",
        ),
        ("--tokenizer-engine reference --use-gigatoken", "--tokenizer-engine reference and --use"),
        (
            "--tokenizer-library huggingface --tiktoken-pattern v1",
            "--tiktoken-pattern: the flag is for the tiktoken library; got library huggingface",
        ),
        (
            "--tokenizer-type Llama2Tokenizer --null-tokenizer-pad-id -1",
            "--null-tokenizer-pad-id: the flag is for the null library",
        ),
        ("--legacy-tokenizer", "--legacy-tokenizer: nothing here tokenizes as Megatron-LM did"),
        ("--tokenizer-library null --vocab-size 0", "vocab_size: the value is too small; got 0"),
    ],
)
def test_a_contradiction_is_one_clear_line(words, message):
    with pytest.raises(ConfigError) as raised:
        config(*words.split())
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)


def test_both_ways_of_one_switch_are_refused():
    with pytest.raises(argparse.ArgumentError, match="not allowed with argument"):
        parsed("--trust-remote-code", "--no-trust-remote-code")


def test_the_namespace_is_left_as_it_was():
    args = parsed("--tokenizer-mode", "sft", "--sft-tokenizer-prompt-format", "x")
    before = dict(vars(args))
    tokenizer_config_from_arguments(args)
    assert vars(args) == before


def test_flags_that_a_parser_has_keep_their_attribute_and_default():
    parser = argparse.ArgumentParser(exit_on_error=False)
    parser.add_argument("--tokenizer-metadata", dest="metadata_path", default="its own")
    parser.add_argument("--vocab-size", type=int, default=7)
    add_tokenizer_arguments(parser)
    args = parser.parse_args(["--tokenizer-model", "m"])
    assert (args.metadata_path, args.vocab_size, args.tokenizer_model) == ("its own", 7, "m")
    assert tokenizer_config_from_arguments(args).metadata == "its own"


def test_a_flag_that_a_parser_has_takes_our_values_too():
    parser = argparse.ArgumentParser(exit_on_error=False)
    parser.add_argument("--tokenizer-prompt-format", choices=["mistral", "llama3"])
    parser.add_argument("--tiktoken-pattern", choices=["v1", "v2"], default=None)
    add_tokenizer_arguments(parser)
    args = parser.parse_args(["--tokenizer-prompt-format", "auto", "--tiktoken-pattern", r"\S+"])
    assert (args.tokenizer_prompt_format, args.tiktoken_pattern) == ("auto", r"\S+")


def test_a_name_that_is_taken_can_be_an_error():
    parser = argparse.ArgumentParser(exit_on_error=False)
    parser.add_argument("--merge-file")
    with pytest.raises(argparse.ArgumentError, match="conflicting option string"):
        add_tokenizer_arguments(parser, existing="error")
