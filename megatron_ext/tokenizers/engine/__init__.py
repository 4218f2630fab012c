"""Fast engine for batches, used only where its ids are proven equal to the library's."""

from megatron_ext.tokenizers.engine.fast_encoder import FastEncoder
from megatron_ext.tokenizers.engine.gigatoken_engine import GigatokenEngine, flat_ids, interleave
from megatron_ext.tokenizers.engine.library_engines import (
    huggingface_engine,
    sentencepiece_engine,
    tiktoken_engine,
)

__all__ = [
    "FastEncoder",
    "GigatokenEngine",
    "flat_ids",
    "huggingface_engine",
    "interleave",
    "sentencepiece_engine",
    "tiktoken_engine",
]
