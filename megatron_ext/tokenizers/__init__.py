"""Tokenizers of every library behind one interface, related by the bytes of their tokens."""

from megatron_ext.tokenizers.base import (
    ByteTokenizer,
    MegatronTokenizerBase,
    MegatronTokenizerTextAbstract,
)
from megatron_ext.tokenizers.build import build_tokenizer, padded_vocab_size
from megatron_ext.tokenizers.config import TokenizerConfig
from megatron_ext.tokenizers.from_huggingface import from_huggingface
from megatron_ext.tokenizers.libraries import TOKENIZER_LIBRARIES
from megatron_ext.tokenizers.megatron_core_abc import register_with_megatron_core
from megatron_ext.tokenizers.megatron_tokenizer import (
    BertTokenizer,
    DefaultTokenizerText,
    DefaultTokenizerVision,
    GPTTokenizer,
    MambaTokenizer,
    MegatronTokenizer,
    T5Tokenizer,
)
from megatron_ext.tokenizers.text_tokenizer import MegatronTokenizerText
from megatron_ext.tokenizers.token_bytes import TokenBytes
from megatron_ext.tokenizers.vision_tokenizer import MegatronTokenizerVision

# Megatron-LM's names.
TEXT_LIBRARIES = TOKENIZER_LIBRARIES
VISION_LIBRARIES = TOKENIZER_LIBRARIES
MegatronMultimodalTokenizer = MegatronTokenizerVision

__all__ = [
    "TEXT_LIBRARIES",
    "TOKENIZER_LIBRARIES",
    "VISION_LIBRARIES",
    "BertTokenizer",
    "ByteTokenizer",
    "DefaultTokenizerText",
    "DefaultTokenizerVision",
    "GPTTokenizer",
    "MambaTokenizer",
    "MegatronMultimodalTokenizer",
    "MegatronTokenizer",
    "MegatronTokenizerBase",
    "MegatronTokenizerText",
    "MegatronTokenizerTextAbstract",
    "MegatronTokenizerVision",
    "T5Tokenizer",
    "TokenBytes",
    "TokenizerConfig",
    "build_tokenizer",
    "from_huggingface",
    "padded_vocab_size",
    "register_with_megatron_core",
]
