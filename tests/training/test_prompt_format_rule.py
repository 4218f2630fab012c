"""Which prompt format a tokenizer has is one rule, whatever reads the flags.

What the user named in the new flag, else in the old one; else the old type's own; else, in the mode
sft, the tokenizer's own template.
"""

import argparse
import json
import warnings

import pytest
from megatron.core.datasets.indexed_dataset import IndexedDataset
from tokenizers import Tokenizer

from megatron_ext.cli.main import main
from megatron_ext.errors import ConfigError
from megatron_ext.megatron_lm.arguments import with_our_flags
from megatron_ext.tokenizers import (
    MegatronTokenizer,
    TokenizerConfig,
    build_tokenizer,
    legacy_types,
    namespace,
)
from megatron_ext.tokenizers.namespace import config_from_namespace
from megatron_ext.training.configuration.arguments import (
    add_config_arguments,
    config_from_arguments,
)
from megatron_ext.training.configuration.tokenizer_arguments import (
    add_tokenizer_arguments,
    tokenizer_config_from_arguments,
)
from tests.tokenizers.tokenizer_files import byte_level
from tests.training.release_parser import RELEASES, release_parser

CHAT = [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}]
OWN = "{% for m in messages %}{{ m.role }} says {{ m.content }}.{% endfor %}"
MEGATRONS = "nemotron-h-aligned"

SFT = "--tokenizer-library huggingface --tokenizer-mode sft"
OLD = "--tokenizer-type SFTTokenizer"
NEW_FORMAT, OLD_FORMAT = "--tokenizer-prompt-format", "--sft-tokenizer-prompt-format"
RULE = {
    SFT: "auto",
    f"{SFT} {NEW_FORMAT} identity": "identity",
    f"{SFT} {OLD_FORMAT} identity": "identity",
    # What was typed counts, though it is what Megatron's parser has by default.
    f"{SFT} {OLD_FORMAT} {MEGATRONS}": MEGATRONS,
    OLD: MEGATRONS,
    f"{OLD} {OLD_FORMAT} identity": "identity",
    f"{OLD} {NEW_FORMAT} identity": "identity",
}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A tokenizer with a template of its own, and with the tokens of Megatron's default format."""
    folder = byte_level(tmp_path_factory.mktemp("model"))
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_special_tokens([f"<SPECIAL_{number}>" for number in (10, 11, 233)])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(OWN)
    return folder


@pytest.fixture(autouse=True)
def _never_warned():
    namespace._warn_once.cache_clear()
    legacy_types._warn_once.cache_clear()


def release(tag):
    """A release's parser, with what it takes for the prompt format where nobody says one."""
    parser = release_parser(tag)
    parser.set_defaults(sft_tokenizer_prompt_format=MEGATRONS)
    return parser


def own(parser):
    add_tokenizer_arguments(parser)
    return parser


def run(parser):
    """As ``megatron-ext run`` has it."""
    return with_our_flags(lambda parser: parser)(parser)


PARSERS = {
    "ours": lambda: own(argparse.ArgumentParser()),
    "ours-twice": lambda: own(own(argparse.ArgumentParser())),
    **{f"{tag}-with-our-flags": lambda tag=tag: own(release(tag)) for tag in RELEASES},
    **{f"{tag}-under-run": lambda tag=tag: run(release(tag)) for tag in RELEASES},
    "under-run-with-our-flags": lambda: own(run(release(RELEASES[0]))),
}


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("words", RULE)
@pytest.mark.parametrize("name", PARSERS)
def test_flags_have_one_meaning_in_every_parser(model, name, words):
    parser = PARSERS[name]()
    for _ in range(2):
        args = parser.parse_args([*words.split(), "--tokenizer-model", str(model)])
        assert build_tokenizer(args).prompt_format == RULE[words]
        if name.startswith("ours"):
            config = tokenizer_config_from_arguments(args)
            assert build_tokenizer(config).prompt_format == RULE[words]


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("words", [SFT, f"{SFT} {OLD_FORMAT} identity", OLD])
def test_the_verbs_follow_the_rule(model, tmp_path, capsys, words):
    chat = tmp_path / "chat.jsonl"
    chat.write_text(json.dumps({"messages": CHAT}) + "\n")
    flags = [*words.split(), "--tokenizer-model", str(model)]
    main(["inspect", "--conversation", str(chat), *flags])
    assert f"prompt format {RULE[words]}" in capsys.readouterr().out
    main(["tokenize", "--input", str(chat), "--output-prefix", str(tmp_path / "a"), *flags])
    dataset = IndexedDataset(str(tmp_path / "a_messages_document"))
    expected = build_tokenizer(TokenizerConfig(model=str(model), prompt_format=RULE[words]))
    assert dataset[0].tolist() == expected.tokenize_conversation(CHAT, False, False).tolist()


@pytest.mark.parametrize("words", [SFT, f"{SFT} {NEW_FORMAT} identity"])
def test_a_run_of_distill_follows_the_rule(model, words):
    parser = argparse.ArgumentParser()
    add_config_arguments(parser)
    student = "--num-layers 2 --hidden-size 8 --num-attention-heads 2 --seq-length 8"
    others = "--train-iters 1 --run-dir run --data-train a.jsonl --loss-objective next_token"
    flags = f"{student} {others} {words}".split()
    args = parser.parse_args([*flags, "--tokenizer-model", str(model)])
    assert build_tokenizer(config_from_arguments(args).tokenizer).prompt_format == RULE[words]


@pytest.mark.parametrize(
    ("metadata", "given", "expected"),
    [
        ({"library": "sft"}, None, "auto"),
        ({"library": "huggingface", "mode": "sft"}, None, "auto"),
        ({"library": "sft", "prompt_format": "identity"}, None, "identity"),
        ({"library": "sft", "prompt_format": MEGATRONS}, "identity", "identity"),
        ({"library": "huggingface"}, None, None),
    ],
)
def test_metadata_follow_the_rule(model, metadata, given, expected):
    tokenizer = MegatronTokenizer.from_pretrained(model, metadata, prompt_format=given)
    assert tokenizer.prompt_format == expected


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"tokenizer_mode": "sft", "sft_tokenizer_prompt_format": "identity"}, "identity"),
        ({"tokenizer_type": "SFTTokenizer"}, MEGATRONS),
        # A namespace of Megatron's own parser, whose default nobody said, and a mode besides.
        ({"tokenizer_mode": "sft", "sft": True, "sft_tokenizer_prompt_format": MEGATRONS}, "auto"),
        (
            {"tokenizer_mode": "sft", "sft": True, "sft_tokenizer_prompt_format": "identity"},
            "identity",
        ),
    ],
)
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_a_namespace_of_one_s_own_follows_the_rule(model, given, expected):
    args = argparse.Namespace(tokenizer_model=str(model), **given)
    assert build_tokenizer(args).prompt_format == expected


def test_a_tokenizer_without_a_template_is_refused_with_the_formats_that_fit(tmp_path):
    folder = byte_level(tmp_path)
    with pytest.raises(ConfigError, match=r"no chat template of its own; .*: identity or file:PA"):
        build_tokenizer(TokenizerConfig(model=str(folder), mode="sft"))
    tokenizer = MegatronTokenizer.from_pretrained(folder, {"library": "sft"})
    assert tokenizer.text_to_ids("a")
    with pytest.raises(ConfigError, match=r"prompt_format: the tokenizer has no prompt format"):
        tokenizer.tokenize_conversation(CHAT, False, False)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (f"{SFT} {OLD_FORMAT} x", f"{OLD_FORMAT} is an old name: use {NEW_FORMAT} x."),
        (
            f"{OLD} {OLD_FORMAT} x",
            f"{OLD} and {OLD_FORMAT} are old names: use {SFT} {NEW_FORMAT} x.",
        ),
        (OLD, f"{OLD} is an old name: use {SFT} {NEW_FORMAT} {MEGATRONS}."),
    ],
)
@pytest.mark.parametrize("name", PARSERS)
def test_old_flags_warn_once_and_name_the_new_ones(name, words, message):
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        for _ in range(2):
            config_from_namespace(PARSERS[name]().parse_args(words.split()))
    assert [str(warning.message) for warning in warned] == [message]


@pytest.mark.parametrize("name", PARSERS)
def test_two_formats_that_differ_are_a_contradiction(name):
    words = f"{SFT} {NEW_FORMAT} identity {OLD_FORMAT} {MEGATRONS}"
    with pytest.raises(ConfigError, match=f"{NEW_FORMAT} identity and {OLD_FORMAT} {MEGATRONS}"):
        config_from_namespace(PARSERS[name]().parse_args(words.split()))
