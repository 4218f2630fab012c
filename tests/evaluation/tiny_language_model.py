"""A tiny HuggingFace model whose vocabulary is its tokenizer's, and prompts for it."""

import torch

from tests.huggingface.tiny_models import SIZES, save_tokenizer

PROMPTS = [
    "the theory of",
    "then there was the other thing, and the other theory of the thing",
    "a",
    "the thing of the other",
    "there",
]

PAIRS = [
    ("the theory of", " the other"),
    ("", "then there"),
    ("the other thing ", "is the theory"),
    ("there", "of"),
    ("then the thing " * 12, "there"),
]
"""Contexts and continuations; the last is longer than some models read."""


def save_tiny_model(folder, *, seed=5, **tokenizer):
    """Random weights that are large enough to prefer some tokens."""
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    save_tokenizer(folder, **tokenizer)
    vocab_size = len(AutoTokenizer.from_pretrained(folder))
    sizes = {**SIZES, "vocab_size": vocab_size, "max_position_embeddings": 96}
    torch.manual_seed(seed)
    model = LlamaForCausalLM(LlamaConfig(**sizes, tie_word_embeddings=False))
    model.save_pretrained(folder)
    return folder
