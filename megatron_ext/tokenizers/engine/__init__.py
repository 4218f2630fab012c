"""The fast engine behind batches, used only where its ids are proven to be the library's."""

from megatron_ext.tokenizers.engine.fast_encoder import FastEncoder
from megatron_ext.tokenizers.engine.flat_ids import flat_ids, interleave
from megatron_ext.tokenizers.engine.gigatoken_engine import GigatokenEngine
from megatron_ext.tokenizers.engine.huggingface_engine import huggingface_engine
from megatron_ext.tokenizers.engine.sentencepiece_engine import sentencepiece_engine
from megatron_ext.tokenizers.engine.tiktoken_engine import tiktoken_engine

__all__ = [
    "FastEncoder",
    "GigatokenEngine",
    "flat_ids",
    "huggingface_engine",
    "interleave",
    "sentencepiece_engine",
    "tiktoken_engine",
]
