"""When the fast engine is used, and what is said when it cannot be."""

import json
import sys
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import numpy as np
import pytest
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from megatron_ext.errors import MissingDependencyError, TokenizerError
from megatron_ext.tokenizers import TokenizerConfig, build_tokenizer
from megatron_ext.tokenizers.engine import fast_encoder, flat_ids, huggingface_engine
from megatron_ext.tokenizers.engine.gigatoken_engine import building
from tests.tokenizers.engine_cases import FAST, FILLER, SLOW, adapter_of, encoder_of
from tests.tokenizers.published import EVERY_STRETCH

TEXTS = [FILLER, "", "The <s> of\n\n  it's 12345", "é中"]


@pytest.fixture(scope="module")
def adapter(tokenizer_path):
    return adapter_of(tokenizer_path("huggingface-byte-level"))


@pytest.fixture
def missing_gigatoken(monkeypatch):
    monkeypatch.setitem(sys.modules, "gigatoken", None)


def assert_falls_back(adapter, encoder) -> None:
    """``auto`` gives the library's ids and the reason; ``gigatoken`` raises the reason."""
    expected = flat_ids(adapter._encode_batch(TEXTS))
    encoder.prepare()
    for got, want in zip(encoder.encode_batch(TEXTS), expected, strict=True):
        np.testing.assert_array_equal(got, want)
    assert not encoder.is_fast


@pytest.mark.parametrize("name", SLOW)
def test_a_vocabulary_that_the_engine_lacks_stays_with_its_library(tokenizer_path, name):
    adapter = adapter_of(tokenizer_path(name))
    encoder = encoder_of(adapter)
    assert_falls_back(adapter, encoder)
    assert encoder.refusal.startswith(str(adapter._fast._where))
    assert "\n" not in encoder.refusal
    with pytest.raises(TokenizerError) as error:
        encoder_of(adapter, "gigatoken").encode_batch(TEXTS)
    assert str(error.value) == encoder.refusal


def test_a_pattern_that_the_engine_lacks_stays_with_tiktoken(tokenizer_path):
    adapter = adapter_of(tokenizer_path("rank-file"), pattern="v1")
    encoder = encoder_of(adapter)
    assert_falls_back(adapter, encoder)
    with pytest.raises(TokenizerError, match="does not have the pattern"):
        encoder_of(adapter, "gigatoken").prepare()


@pytest.mark.usefixtures("missing_gigatoken")
def test_without_gigatoken_auto_is_the_library_and_asking_for_it_says_what_to_install(adapter):
    encoder = encoder_of(adapter)
    assert_falls_back(adapter, encoder)
    with pytest.raises(MissingDependencyError, match=r'pip install "megatron-ext\[fast\]"'):
        encoder_of(adapter, "gigatoken").encode_batch(TEXTS)


def test_an_engine_of_another_vocabulary_is_refused_with_a_text_that_shows_it(adapter):
    document = json.loads(adapter._text_only.to_str())
    # The merges of the middle of the list, in the other order.
    merges = document["model"]["merges"]
    merges[200:400] = merges[200:400][::-1]
    encoder = encoder_of(adapter, build=lambda: huggingface_engine(json.dumps(document), "here"))
    assert_falls_back(adapter, encoder)
    assert "gigatoken gives other ids than the library" in str(encoder.refusal)
    assert "probes differ, such as" in str(encoder.refusal)


def _digits_apart(tokenizer: Tokenizer) -> None:
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(
                Regex(r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+"),
                "isolated",
            ),
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def _signs_apart(tokenizer: Tokenizer) -> None:
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Punctuation(), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )


def _uncut(tokenizer: Tokenizer) -> None:
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)


def _end_of_word(tokenizer: Tokenizer) -> None:
    tokenizer.model.end_of_word_suffix = "</w>"


def _lower_case(tokenizer: Tokenizer) -> None:
    tokenizer.normalizer = normalizers.Lowercase()


CHANGES = [_digits_apart, _signs_apart, _uncut, _lower_case, _end_of_word]
"""The last one and ``_uncut`` show in the ids alone."""


@pytest.mark.parametrize("change", CHANGES if EVERY_STRETCH else CHANGES[:-1])
def test_a_pipeline_that_the_engine_would_read_otherwise_is_refused(adapter, change):
    document = json.loads(adapter._text_only.to_str())
    changed = Tokenizer.from_str(json.dumps(document))
    change(changed)

    def library(texts):
        return [row.ids for row in changed.encode_batch(list(texts), add_special_tokens=False)]

    encoder = encoder_of(
        adapter, build=lambda: huggingface_engine(changed.to_str(), "here"), reference=library
    )
    encoder.prepare()
    assert not encoder.is_fast
    assert encoder.refusal is not None


def test_nothing_is_built_before_building_pays(adapter, monkeypatch):
    built = []

    def build():
        built.append(1)
        return adapter._build_engine()

    monkeypatch.setattr(fast_encoder, "_WORTH_BUILDING", 3 * len(FILLER))
    encoder = encoder_of(adapter, build=build)
    for batches in range(1, 5):
        encoder.encode_batch([FILLER])
        assert encoder.is_fast == (batches >= 3)
    assert built == [1]


def test_the_reference_never_builds(adapter, monkeypatch):
    monkeypatch.setattr(fast_encoder, "_WORTH_BUILDING", len(FILLER))
    encoder = encoder_of(adapter, "reference", build=lambda: pytest.fail("built"))
    encoder.prepare()
    encoder.encode_batch([FILLER] * 4)
    assert not encoder.is_fast
    assert encoder.refusal is None


def test_a_refused_engine_is_not_tried_again(adapter):
    tried = []

    def build():
        tried.append(1)
        raise TokenizerError("no")

    encoder = encoder_of(adapter, build=build)
    for _ in range(3):
        encoder.prepare()
        encoder.encode_batch(TEXTS)
    assert tried == [1]


@pytest.fixture(scope="module")
def prepared(adapter):
    """An encoder with its engine, and how many texts its library was given each time since."""
    asked = []

    def library(texts):
        asked.append(len(texts))
        return adapter._encode_batch(texts)

    encoder = encoder_of(adapter, reference=library)
    encoder.prepare()
    asked.clear()
    return encoder, asked


def test_a_batch_of_any_size_goes_to_the_engine(adapter, prepared):
    encoder, asked = prepared
    for texts in (["a few words"], [FILLER], ["one", "", "two"] * 9):
        ids, offsets = encoder.encode_batch(texts)
        expected = [adapter.text_to_ids(text) for text in texts]
        rows = [ids[begin:end].tolist() for begin, end in pairwise(offsets.tolist())]
        assert rows == expected
    assert asked == []


def test_a_small_batch_beside_a_large_one_has_the_same_ids(prepared):
    encoder, _ = prepared
    large = [FILLER] * 64
    expected, _ = encoder.encode_batch(large)
    small, _ = encoder.encode_batch(["a few words"])
    with ThreadPoolExecutor(4) as pool:
        larges = [pool.submit(encoder.encode_batch, large) for _ in range(4)]
        smalls = [pool.submit(encoder.encode_batch, ["a few words"]) for _ in range(400)]
    assert all(np.array_equal(call.result()[0], expected) for call in larges)
    assert all(np.array_equal(call.result()[0], small) for call in smalls)


@pytest.mark.parametrize("choice", ["auto", "reference", "gigatoken"])
def test_half_a_surrogate_pair_is_one_clear_error(adapter, choice):
    encoder = encoder_of(adapter, choice)
    with pytest.raises(TokenizerError, match="lone surrogate at character 3"):
        encoder.encode_batch([FILLER, "abc\ud800"])


def test_building_lets_a_keyboard_interrupt_through():
    with pytest.raises(KeyboardInterrupt), building("here"):
        raise KeyboardInterrupt


def test_nothing_is_said_before_the_engine_is_wanted(tokenizer_path):
    encoder = encoder_of(adapter_of(tokenizer_path(FAST[0])))
    assert encoder.refusal is None
    assert encoder.unproven is None


def test_a_tokenizer_without_the_engine_it_was_asked_for_says_why(tokenizer_path):
    model = str(tokenizer_path("huggingface-wordpiece"))
    ours = build_tokenizer(TokenizerConfig(model=model, engine="gigatoken"))
    with pytest.raises(TokenizerError, match=r"BertNormalizer.*expected no normaliser but NFC"):
        ours.text_to_ids_batch(TEXTS)


def test_a_file_of_a_decoder_alone_is_read_to_its_model():
    tokenizer = Tokenizer(models.BPE())
    tokenizer.decoder = decoders.ByteLevel()
    with pytest.raises(TokenizerError, match="gigatoken cannot build the tokenizer"):
        huggingface_engine(tokenizer.to_str(), "here")
