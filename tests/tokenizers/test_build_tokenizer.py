"""A configuration becomes a tokenizer at once, or an error that names the field."""

import pytest

from megatron_ext.errors import ConfigError, TokenizerError
from megatron_ext.tokenizers import TokenizerConfig, build_tokenizer, padded_vocab_size
from tests.fork_server import run_python


def test_the_library_is_told_from_the_file_when_unset(tokenizer_path):
    for name, library in (
        ("sentencepiece-v1", "sentencepiece"),
        ("json-rank-list", "tiktoken"),
        ("huggingface-nfc", "huggingface"),
    ):
        path = str(tokenizer_path(name))
        inferred = build_tokenizer(TokenizerConfig(model=path))
        named = build_tokenizer(TokenizerConfig(model=path, library=library))
        assert inferred.library == named.library == library
        assert inferred.unique_identifiers == named.unique_identifiers


def test_tiktoken_options_reach_the_vocabulary(tokenizer_path):
    ours = build_tokenizer(
        TokenizerConfig(
            model=str(tokenizer_path("json-rank-list")),
            tiktoken_pattern="v1",
            tiktoken_num_special_tokens=10,
            vocab_size=300,
        )
    )
    assert ours.vocab_size == 300
    assert ours.token_to_id("<SPECIAL_9>") == 9
    assert ours.token_bytes(10) == b"\x00"
    assert ours.unique_identifiers["pattern"] == "v1"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"library": "spm"}, r"library: .*got 'spm'.*huggingface, sentencepiece, tiktoken"),
        ({"mode": "multimodal"}, r"prompt_format: .*needs a prompt format"),
        ({"mode": "speech"}, r"mode: .*text, sft, multimodal"),
        ({"engine": "rust"}, r"engine: .*auto, reference, gigatoken"),
        ({"vocab_size": 0}, r"vocab_size: .*got 0"),
        ({"tiktoken_num_special_tokens": -1}, r"tiktoken_num_special_tokens: .*got -1"),
        ({"library": "sentencepiece", "vocab_size": 9}, r"vocab_size: .*tiktoken or byte-level"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_a_field_that_cannot_be_used_is_named(fields, message):
    with pytest.raises(ConfigError, match=message):
        TokenizerConfig(**fields)


def test_a_tiktoken_option_for_a_file_of_another_library_is_refused(tokenizer_path):
    config = TokenizerConfig(model=str(tokenizer_path("sentencepiece-v1")), vocab_size=300)
    with pytest.raises(ConfigError, match=r"vocab_size: .*tiktoken or .*; got library sentencep"):
        build_tokenizer(config)


def test_a_configuration_without_a_model_is_refused():
    with pytest.raises(ConfigError, match="model: no tokenizer is named"):
        build_tokenizer(TokenizerConfig())


def test_a_model_that_does_not_exist_is_named(tmp_path):
    with pytest.raises(TokenizerError, match="absent"):
        build_tokenizer(TokenizerConfig(model=str(tmp_path / "absent")))


@pytest.mark.parametrize(
    ("vocab_size", "divisor", "tp", "padded"),
    [(50257, 128, 1, 50304), (50257, 128, 8, 51200), (128, 128, 1, 128), (1, 1, 1, 1)],
)
def test_a_vocabulary_is_padded_to_a_multiple_of_the_divisor_on_every_rank(
    vocab_size, divisor, tp, padded
):
    assert padded == padded_vocab_size(
        vocab_size, make_vocab_size_divisible_by=divisor, tensor_model_parallel_size=tp
    )


def test_a_size_that_is_not_positive_is_named():
    with pytest.raises(ConfigError, match=r"tensor_model_parallel_size: .*got 0"):
        padded_vocab_size(10, make_vocab_size_divisible_by=1, tensor_model_parallel_size=0)


def test_the_mode_sft_keeps_the_prompt_format_of_a_saved_tokenizer(tokenizer_path, tmp_path):
    model = str(tokenizer_path("sentencepiece-v3"))
    first = build_tokenizer(TokenizerConfig(model=model, mode="sft", prompt_format="identity"))
    first.save_pretrained(tmp_path / "saved")
    again = build_tokenizer(TokenizerConfig(model=str(tmp_path / "saved"), mode="sft"))
    assert again.prompt_format == "identity"
    other = TokenizerConfig(model=str(tmp_path / "saved"), mode="sft", prompt_format="mistral")
    assert build_tokenizer(other).prompt_format == "mistral"


PROGRAM = """
import sys
from megatron_ext.tokenizers import TokenizerConfig, build_tokenizer
libraries = {"tokenizers", "sentencepiece", "tiktoken"} & sys.modules.keys()
tokenizer = build_tokenizer(TokenizerConfig(model=sys.argv[1]))
ids = tokenizer.tokenize("the parser ends here")
assert tokenizer.detokenize(ids).strip() == "the parser ends here"
heavy = {"torch", "triton", "transformers", "megatron.core", "gigatoken", "awkward", "jinja2"}
found = {*heavy, *sys.argv[2:]} & sys.modules.keys()
# Of Megatron's main the module of the one for images imports LLaVA's, and torch with it.
config = TokenizerConfig(model=sys.argv[1], mode="multimodal", prompt_format="identity")
images = build_tokenizer(config)
assert images.tokenize("<image>")[-1] == images.image_token_id
print(*sorted(libraries | found | {"torch", "megatron.core", "transformers"} & sys.modules.keys()))
"""
OTHERS = {
    "sentencepiece-v1": {"tiktoken", "tokenizers"},
    "tekken": {"sentencepiece", "tokenizers"},
    "huggingface-byte-level": {"sentencepiece", "tiktoken"},
}


@pytest.mark.parametrize("name", OTHERS)
def test_constructing_a_tokenizer_imports_its_own_library_and_nothing_heavy(tokenizer_path, name):
    assert run_python(PROGRAM, tokenizer_path(name), *OTHERS[name]).stdout.strip() == ""
