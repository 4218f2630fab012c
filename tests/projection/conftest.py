"""Real vocabularies, from the data of mistral_common."""

from tests.alignment.conftest import sentencepiece, tekken

__all__ = ["sentencepiece", "tekken"]
