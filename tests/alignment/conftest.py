"""Real vocabularies, from the data of mistral_common."""

from functools import cache
from pathlib import Path

import mistral_common
import pytest

from megatron_ext.alignment import TokenAligner
from megatron_ext.tokenizers.libraries.sentencepiece import SentencePieceTokenizer
from megatron_ext.tokenizers.libraries.tiktoken import TiktokenTokenizer

DATA = Path(mistral_common.__file__).parent / "data"


@cache
def _tekken():
    return TiktokenTokenizer(DATA / "tekken_240911.json")


@cache
def _sentencepiece():
    return SentencePieceTokenizer(DATA / "mistral_instruct_tokenizer_240323.model.v3")


@pytest.fixture(scope="session")
def tekken():
    return _tekken()


@pytest.fixture(scope="session")
def sentencepiece():
    return _sentencepiece()


@pytest.fixture(scope="session")
def aligner(tekken, sentencepiece):
    return TokenAligner(tekken, sentencepiece)
