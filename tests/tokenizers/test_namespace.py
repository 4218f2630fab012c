"""What Megatron's parsed flags mean: every old type, in every release that parsed it."""

import argparse
import re
import warnings
from argparse import Namespace
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from megatron_ext.errors import ConfigError
from megatron_ext.tokenizers import TokenizerConfig, build_tokenizer, namespace
from megatron_ext.tokenizers.legacy_types import LEGACY_TYPES
from megatron_ext.tokenizers.namespace import config_from_namespace
from megatron_ext.training.configuration.tokenizer_arguments import add_tokenizer_arguments
from tests.tokenizers.tokenizer_files import MAKERS

COMMON: dict[str, Any] = {
    "vocab_size": None,
    "padded_vocab_size": None,
    "vocab_file": None,
    "merge_file": None,
    "vocab_extra_ids": 0,
    "tokenizer_type": None,
    "tokenizer_model": None,
    "tiktoken_pattern": None,
    "tiktoken_num_special_tokens": 1000,
    "tokenizer_sentencepiece_legacy": False,
    "trust_remote_code": False,
    "sft": False,
    "sft_tokenizer_prompt_format": "nemotron-h-aligned",
    "make_vocab_size_divisible_by": 128,
    "tensor_model_parallel_size": 1,
    "rank": 0,
}
BEFORE_018: dict[str, Any] = {
    "tokenizer_metadata": None,
    "tokenizer_special_tokens": None,
    "tiktoken_special_tokens": None,
}
RELEASES: dict[str, dict[str, Any]] = {
    "0.16": {
        **BEFORE_018,
        "legacy_tokenizer": False,
        "tokenizer_hf_use_fast": False,
        "tokenizer_hf_include_special_tokens": False,
    },
    "0.17": {
        **BEFORE_018,
        "tokenizer_hf_use_fast": True,
        "tokenizer_hf_include_special_tokens": True,
        "tokenizer_hf_no_use_fast": False,
        "tokenizer_hf_no_include_special_tokens": False,
    },
    "main": {
        "pad_vocab_size": True,
        "metadata_path": None,
        "special_tokens": None,
        "tokenizer_sentencepiece_ignore_extra_whitespaces": True,
        "tokenizer_hf_no_use_fast": False,
        "tokenizer_hf_no_include_special_tokens": False,
        "null_tokenizer_eod_id": None,
        "null_tokenizer_pad_id": -1,
        "chat_template": None,
        "use_gigatoken": False,
    },
}
"""What each release's parser puts into a namespace when no tokenizer flag is given."""

MULTIMODAL: dict[str, Any] = {
    "tokenizer_prompt_format": "qwen2p5",
    "special_tokens": ["<image>", "<img>"],
    "image_tag_type": "internvl",
    "force_system_message": True,
}
"""What the multimodal example adds, with values."""

IMAGES: dict[str, Any] = {
    "mode": "multimodal",
    "prompt_format": "qwen2p5",
    "special_tokens": ("<image>", "<img>"),
    "image_tag_type": "internvl",
    "force_system_message": True,
}
PARSES: dict[str, Any] = {"parse_special_tokens": True}
AROUND = {**PARSES, "hf_include_special_tokens": {"0.16": False, "0.17": True, "main": True}}
EOD = {"0.16": True, "0.17": True, "main": False}
VOCAB = {"vocab_file": "vocab.txt"}
BPE = {"vocab_file": "vocab.json", "merge_file": "merges.txt"}
SPM = {"library": "sentencepiece", "model": "m.model"}
TIKTOKEN = {"tiktoken_pattern": "v1", "vocab_size": 500, "tiktoken_num_special_tokens": 50}

CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "BertWordPieceLowerCase": (VOCAB, {"library": "megatron", **VOCAB, **AROUND}),
    "BertWordPieceCase": (
        VOCAB,
        {"library": "megatron", "vocab_extra_ids": 100, **VOCAB, **AROUND},
    ),
    "GPT2BPETokenizer": (
        {**BPE, "tokenizer_model": "ignored"},
        {"library": "megatron", **BPE, **AROUND},
    ),
    "SentencePieceTokenizer": (
        {"tokenizer_model": "m.model", "tokenizer_sentencepiece_legacy": True},
        {**SPM, "sentencepiece_legacy": True},
    ),
    "GPTSentencePieceTokenizer": ({"tokenizer_model": "m.model", "vocab_size": 9}, SPM),
    "Llama2Tokenizer": ({"tokenizer_model": "m.model"}, SPM),
    "TikTokenizer": (
        {"tokenizer_model": "t.json", **TIKTOKEN},
        {"library": "tiktoken", "model": "t.json", **TIKTOKEN, **PARSES},
    ),
    "HuggingFaceTokenizer": (
        {"tokenizer_model": "h", "vocab_size": 9},
        {"library": "huggingface", "model": "h", **AROUND},
    ),
    "MultimodalTokenizer": (
        {"tokenizer_model": "h", **MULTIMODAL},
        {"library": "huggingface", "model": "h", **IMAGES},
    ),
    "SFTTokenizer": (
        {"tokenizer_model": "h"},
        {
            **{"library": "huggingface", "model": "h", "mode": "sft"},
            "prompt_format": "nemotron-h-aligned",
        },
    ),
    "NullTokenizer": (
        {"vocab_size": 100},
        {"library": "null", "vocab_size": 100, "null_add_eod": EOD},
    ),
    "NullMultimodalTokenizer": (
        {"vocab_size": 100},
        {"library": "null", "mode": "multimodal", "vocab_size": 100, "null_add_eod": True},
    ),
}
"""Old type -> flags, and the fields that they mean; a mapping has a value for each release."""


def parsed(release: str, **given: Any) -> Namespace:
    """A namespace of a release."""
    return Namespace(**{**COMMON, **RELEASES[release], **given})


@pytest.fixture(autouse=True)
def _never_warned() -> Iterator[None]:
    namespace._warn_once.cache_clear()
    yield
    namespace._warn_once.cache_clear()


def test_the_table_holds_every_old_type() -> None:
    assert CASES.keys() == LEGACY_TYPES.keys()


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize("name", CASES)
def test_an_old_type_means_what_it_meant_in_the_release(name: str, release: str) -> None:
    given, expected = CASES[name]
    fields = {k: v[release] if isinstance(v, dict) else v for k, v in expected.items()}
    if fields["library"] == "megatron":
        fields["model"] = name
    args = parsed(release, tokenizer_type=name, **given)
    before = dict(vars(args))
    assert config_from_namespace(args) == TokenizerConfig(**fields)
    assert vars(args) == before


@pytest.mark.parametrize("release", RELEASES)
def test_new_flags_mean_the_same_in_every_release(release: str) -> None:
    args = parsed(release, tokenizer_library="null", vocab_size=7, null_tokenizer_eod_id=3)
    assert config_from_namespace(args) == TokenizerConfig(
        library="null", vocab_size=7, null_eod_id=3
    )


@pytest.mark.parametrize("release", RELEASES)
def test_what_a_parser_put_in_unasked_is_no_option(release: str) -> None:
    """Nobody said how many special tokens there are: no library may stumble over it."""
    config = config_from_namespace(parsed(release, tokenizer_model="anything"))
    assert (config.library, config.tiktoken_num_special_tokens, config.null_pad_id) == (
        None,
        None,
        None,
    )


@pytest.mark.parametrize("name", CASES)
def test_an_old_type_warns_once_and_names_the_new_flags(name: str) -> None:
    args = parsed("main", tokenizer_type=name, **CASES[name][0])
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        config_from_namespace(args)
        config_from_namespace(args)
    assert [warning.category for warning in warned] == [FutureWarning]
    assert LEGACY_TYPES[name].flags in str(warned[0].message)


OF_TYPE: dict[str, str] = {
    "BertWordPieceLowerCase": "--vocab-file {folder}/vocab.txt",
    "BertWordPieceCase": "--vocab-file {folder}/vocab.txt",
    "GPT2BPETokenizer": "--vocab-file {folder}/vocab.json --merge-file {folder}/merges.txt",
    "SentencePieceTokenizer": "--tokenizer-model {sentencepiece-v1}",
    "GPTSentencePieceTokenizer": "--tokenizer-model {sentencepiece-v3}",
    "Llama2Tokenizer": "--tokenizer-model {sentencepiece-nfkc-bytes}",
    "TikTokenizer": "--tokenizer-model {json-rank-list} --tiktoken-num-special-tokens 20",
    "HuggingFaceTokenizer": "--tokenizer-model {huggingface-metaspace}",
    "MultimodalTokenizer": "--tokenizer-model {huggingface-metaspace} "
    "--tokenizer-prompt-format identity --special-tokens <image> <img> --image-tag-type internvl",
    "SFTTokenizer": "--tokenizer-model {huggingface-metaspace} --tokenizer-prompt-format identity",
    "NullTokenizer": "--vocab-size 100",
    "NullMultimodalTokenizer": "--vocab-size 100",
}
"""What else a command line says: it stays when the type goes."""


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize("name", LEGACY_TYPES)
def test_the_flags_that_the_warning_names_give_the_same_tokenizer(
    name: str, release: str, tokenizer_path: Callable[[str], Path], tmp_path: Path
) -> None:
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "1", "2"]
    (tmp_path / "vocab.txt").write_text("\n".join(words), encoding="utf-8")
    (tmp_path / "vocab.json").write_text('{"1": 0, "2": 1, "<|endoftext|>": 2}', encoding="utf-8")
    (tmp_path / "merges.txt").write_text("#version: 0.2\n", encoding="utf-8")
    rest = OF_TYPE[name].replace("{folder}", str(tmp_path))
    for maker in MAKERS:
        if f"{{{maker}}}" in rest:
            rest = rest.replace(f"{{{maker}}}", str(tokenizer_path(maker)))
    parser = argparse.ArgumentParser(allow_abbrev=False)
    add_tokenizer_arguments(parser)
    args = parsed(release, **{**vars(parser.parse_args(rest.split())), "tokenizer_type": name})
    with pytest.warns(FutureWarning, match="is an old name: use") as warned:
        by_type = build_tokenizer(args)
    flags = re.search(r"use (.*?)\.( With|$)", str(warned[0].message))
    by_flags = build_tokenizer(parser.parse_args([*flags[1].split(), *rest.split()]))
    assert by_flags.fingerprint() == by_type.fingerprint()
    assert by_flags.special_tokens_dict == by_type.special_tokens_dict
    assert by_flags.additional_special_tokens_ids == by_type.additional_special_tokens_ids
    for text in ("1 2", " 2  1 ", *(["Naïve café, 12 345."] if by_type.library != "null" else [])):
        assert by_flags.tokenize(text) == by_type.tokenize(text)


def test_only_the_first_process_of_a_run_warns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "3")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        config_from_namespace(parsed("main", tokenizer_type="Llama2Tokenizer"))


def test_new_flags_and_an_implied_type_warn_of_nothing() -> None:
    args = parsed(
        "main",
        tokenizer_library="huggingface",
        tokenizer_type="HuggingFaceTokenizer",
        tokenizer_type_implied=True,
        tokenizer_model="h",
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        config = config_from_namespace(args)
    assert config == TokenizerConfig(library="huggingface", model="h")


def test_an_implied_type_contradicts_nothing() -> None:
    args = parsed(
        "main",
        tokenizer_library="sentencepiece",
        tokenizer_mode="sft",
        tokenizer_type="SFTTokenizer",
        tokenizer_type_implied=True,
    )
    assert config_from_namespace(args).library == "sentencepiece"


def test_a_type_and_the_same_library_agree() -> None:
    args = parsed("main", tokenizer_type="TikTokenizer", tokenizer_library="tiktoken")
    assert config_from_namespace(args).library == "tiktoken"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"tokenizer_type": "TikTokenizer", "tokenizer_library": "huggingface"},
            r"--tokenizer-library: .*--tokenizer-library huggingface and --tokenizer-type TikToken"
            r".*--tokenizer-library tiktoken.*leave --tokenizer-type out",
        ),
        (
            {"tokenizer_type": "SFTTokenizer", "tokenizer_mode": "multimodal"},
            r"--tokenizer-mode: .*--tokenizer-mode multimodal and --tokenizer-type SFTTokenizer",
        ),
        (
            {"tokenizer_type": "HuggingFaceTokeniser"},
            r"--tokenizer-type: unknown.*did you mean 'HuggingFaceTokenizer'",
        ),
        (
            {"tokenizer_engine": "reference", "use_gigatoken": True},
            r"--tokenizer-engine: .*--tokenizer-engine reference and --use-gigatoken",
        ),
        ({"tokenizer_library": "spm"}, r"library: unknown value; got 'spm'"),
        ({"tokenizer_library": "tiktoken", "vocab_size": 0}, r"vocab_size: .*got 0"),
    ],
    ids=["library", "mode", "type", "engine", "unknown-library", "value"],
)
def test_a_contradiction_is_one_clear_line(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as raised:
        config_from_namespace(parsed("main", **given))
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("release", "given", "included"),
    [
        ("0.16", {}, False),
        ("0.16", {"tokenizer_hf_include_special_tokens": True}, True),
        ("0.16", {"tokenizer_hf_no_include_special_tokens": True}, False),
        ("0.17", {}, True),
        ("0.17", {"tokenizer_hf_no_include_special_tokens": True}, False),
        ("main", {}, True),
        ("main", {"tokenizer_hf_no_include_special_tokens": True}, False),
        ("main", {"tokenizer_hf_include_special_tokens": True}, True),
        ("main", {"tokenizer_hf_include_special_tokens": False}, False),
    ],
)
def test_both_polarities_are_read_in_every_release(
    release: str, given: dict[str, Any], included: bool
) -> None:
    args = parsed(release, tokenizer_type="HuggingFaceTokenizer", **given)
    assert config_from_namespace(args).hf_include_special_tokens is included


@pytest.mark.parametrize(
    ("name", "engine"),
    [("HuggingFaceTokenizer", "gigatoken"), ("Llama2Tokenizer", "auto"), ("TikTokenizer", "auto")],
)
def test_the_old_engine_flag_was_for_some_types_only(name: str, engine: str) -> None:
    args = parsed("main", tokenizer_type=name, use_gigatoken=True)
    assert config_from_namespace(args).engine == engine


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"tokenizer_special_tokens": ["<a>"], "special_tokens": ["<b>"]}, ("<a>",)),
        ({"special_tokens": ["<b>"]}, ("<b>",)),
        ({"tiktoken_special_tokens": ["<c>"]}, ("<c>",)),
        ({"special_tokens": []}, ()),
    ],
)
def test_special_tokens_have_three_names(given: dict[str, Any], expected: tuple[str, ...]) -> None:
    assert config_from_namespace(Namespace(**given)).special_tokens == expected


def test_a_prompt_format_given_for_sft_wins_over_the_default_of_the_old_flag() -> None:
    args = parsed("main", tokenizer_type="SFTTokenizer", tokenizer_prompt_format="default")
    assert config_from_namespace(args).prompt_format == "default"


def test_an_id_of_zero_is_an_id() -> None:
    args = parsed(
        "main",
        tokenizer_type="NullTokenizer",
        vocab_size=5,
        null_tokenizer_eod_id=0,
        null_tokenizer_pad_id=0,
    )
    config = config_from_namespace(args)
    assert (config.null_eod_id, config.null_pad_id) == (0, 0)
    tokenizer = build_tokenizer(args)
    assert (tokenizer.eod, tokenizer.pad) == (0, 0)


@pytest.mark.parametrize(
    ("release", "size", "eod"), [("0.16", 101, 100), ("0.17", 101, 100), ("main", 100, 99)]
)
def test_a_namespace_builds_the_tokenizer_of_its_release(release: str, size: int, eod: int) -> None:
    args = parsed(release, tokenizer_type="NullTokenizer", vocab_size=100)
    before = dict(vars(args))
    tokenizer = build_tokenizer(args)
    # 0.16.1's and main's builders write padded_vocab_size into it.
    assert vars(args) == before
    assert (tokenizer.vocab_size, tokenizer.eod) == (size, eod)
    assert tokenizer.tokenize("3 14 15") == [3, 14, 15]


def test_overrides_win_over_the_namespace(tokenizer_path: Callable[[str], Path]) -> None:
    file = str(tokenizer_path("sentencepiece-v1"))
    args = parsed("main", tokenizer_type="NullTokenizer", vocab_size=100)
    built = build_tokenizer(args, library="sentencepiece", model=file, vocab_size=None)
    assert built.tokenize("hello") == build_tokenizer(TokenizerConfig(model=file)).tokenize("hello")


@pytest.mark.parametrize("release", ["0.16", "main"])
def test_a_model_alone_is_recognised(release: str, tokenizer_path: Callable[[str], Path]) -> None:
    args = parsed(release, tokenizer_model=str(tokenizer_path("sentencepiece-v1")))
    assert build_tokenizer(args).library == "sentencepiece"


def test_special_tokens_are_included_where_the_release_did(
    tokenizer_path: Callable[[str], Path],
) -> None:
    model = str(tokenizer_path("huggingface-metaspace"))
    ids = {
        release: build_tokenizer(
            parsed(release, tokenizer_type="HuggingFaceTokenizer", tokenizer_model=model)
        ).tokenize("hello")
        for release in RELEASES
    }
    assert ids["main"] == ids["0.17"] == [1, *ids["0.16"], 2]


@dataclass(kw_only=True)
class BareConfig:
    """The fields of main's ``TokenizerConfig``: nothing of a model, such as a divisor."""

    vocab_size: int | None = None
    padded_vocab_size: int | None = None
    pad_vocab_size: bool = True
    vocab_file: str | None = None
    merge_file: str | None = None
    vocab_extra_ids: int = 0
    tokenizer_type: str | None = None
    tokenizer_model: str | None = None
    metadata_path: str | None = None
    special_tokens: list[str] | None = None
    tiktoken_pattern: str | None = None
    tiktoken_num_special_tokens: int = 1000
    tokenizer_sentencepiece_legacy: bool = False
    tokenizer_sentencepiece_ignore_extra_whitespaces: bool = True
    tokenizer_hf_no_use_fast: bool = False
    tokenizer_hf_no_include_special_tokens: bool = False
    trust_remote_code: bool = False
    null_tokenizer_eod_id: int | None = None
    null_tokenizer_pad_id: int = -1
    chat_template: str | None = None
    use_gigatoken: bool | None = False


def test_a_bare_configuration_builds_though_it_knows_no_divisor(
    tokenizer_path: Callable[[str], Path],
) -> None:
    config = BareConfig(
        tokenizer_type="TikTokenizer",
        tokenizer_model=str(tokenizer_path("json-rank-list")),
        vocab_size=600,
        tiktoken_num_special_tokens=20,
    )
    tokenizer = build_tokenizer(config)
    assert tokenizer.vocab_size == 600
    assert tokenizer.detokenize(tokenizer.tokenize("naïve")) == "naïve"
    assert config.padded_vocab_size is None


@pytest.mark.parametrize("release", RELEASES)
def test_an_old_type_reads_special_tokens_in_text_until_it_is_told_not_to(
    release: str, tokenizer_path: Callable[[str], Path]
) -> None:
    model = str(tokenizer_path("json-rank-list"))
    text = "the <s> parser"
    given = {"tokenizer_type": "TikTokenizer", "tokenizer_model": model, "vocab_size": None}
    old = build_tokenizer(parsed(release, **given, tiktoken_num_special_tokens=32))
    told = build_tokenizer(
        parsed(
            release, **given, tiktoken_num_special_tokens=32, tokenizer_parse_special_tokens=False
        )
    )
    assert old.bos_id in old.tokenize(text)
    assert told.bos_id not in told.tokenize(text)
    assert old.tokenize("the parser") == told.tokenize("the parser")
