"""The tiny run's two tokenizers, and text that they cut differently."""

from functools import cache

from megatron_ext.tokenizers import TokenizerConfig, build_tokenizer
from tests.training.tiny_run import SENTENCES, vocabulary

DOCUMENTS = ["".join(SENTENCES[(i + k) % 5] for k in range(1 + i % 4)) for i in range(7)]


@cache
def student_tokenizer():
    """Tekken."""
    return build_tokenizer(TokenizerConfig(model=vocabulary("tekken_240911.json")))


@cache
def teacher_tokenizer():
    """SentencePiece, which puts a space before the text."""
    return build_tokenizer(
        TokenizerConfig(model=vocabulary("mistral_instruct_tokenizer_240323.model.v3"))
    )
