"""Tokenizers of every library, made once a session without network or shared files."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from megatron_ext.tokenizers import MegatronTokenizerText, TokenizerConfig, build_tokenizer
from tests.tokenizers.tokenizer_files import MAKERS


@pytest.fixture(scope="session")
def tokenizer_path(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Name in ``MAKERS`` -> a tokenizer file or directory."""

    @cache
    def path(name: str) -> Path:
        return MAKERS[name](tmp_path_factory.mktemp(name))

    return path


@pytest.fixture(scope="session")
def tokenizer(tokenizer_path: Callable[[str], Path]) -> Callable[[str], MegatronTokenizerText]:
    """Name in ``MAKERS`` -> the tokenizer, built from its path alone."""

    @cache
    def built(name: str) -> MegatronTokenizerText:
        return build_tokenizer(TokenizerConfig(model=str(tokenizer_path(name))))

    return built
