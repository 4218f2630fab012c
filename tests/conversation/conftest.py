"""Tokenizers of every library, made once a session without network or shared files."""

from collections.abc import Callable
from functools import cache

import pytest

from megatron_ext.conversation import ConversationTokenizer
from tests.conversation.library_tokenizers import library_tokenizer


@pytest.fixture(scope="session")
def tokenizer_of(
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[[str], ConversationTokenizer]:
    """Name in ``LIBRARIES`` -> a tokenizer."""
    return cache(lambda library: library_tokenizer(library, tmp_path_factory.mktemp(library)))
