"""Tokenizers of every library, made once a session without network or shared files."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from megatron_ext.tokenizers import (
    TOKENIZER_LIBRARIES,
    MegatronTokenizer,
    MegatronTokenizerText,
    TokenizerConfig,
    build_tokenizer,
)
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


@pytest.fixture(scope="session")
def opened(tokenizer_path: Callable[[str], Path]) -> Callable[..., MegatronTokenizerText]:
    """Name in ``MAKERS``, or library without files, with options -> a tokenizer of its own."""

    def built(name: str, **options: Any) -> MegatronTokenizerText:
        if name == "null":
            options = {"vocab_size": 1000, **options}
        if name in ("null", "byte-level"):
            return MegatronTokenizer.from_pretrained(None, {"library": name}, **options)
        return MegatronTokenizer.from_pretrained(tokenizer_path(name), **options)

    return built


@pytest.fixture(scope="session")
def adapted(tokenizer_path: Callable[[str], Path]) -> Callable[..., Any]:
    """Library, name in ``MAKERS`` and options -> the library's own object, built once."""
    made: dict[str, Any] = {}

    def build(library: str, name: str, **options: Any) -> Any:
        key = f"{library} {name} {sorted(options.items())!r}"
        if key not in made:
            made[key] = TOKENIZER_LIBRARIES[library].build(tokenizer_path(name), options)
        return made[key]

    return build
