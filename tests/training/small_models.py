"""Two small tokenizers of HuggingFace, and models of transformers for them."""

from functools import cache

import torch

from tests.tokenizers.tokenizer_files import byte_level_bpe

TEXTS = [
    "The quick brown fox jumps over the lazy dog.",
    "Le café coûte 2,50 € à la gare.",
    "Numbers: 1, 22, 333, 4444 and 55555.",
    "def add(a, b):\n    return a + b\n",
    "人工智能 learns tokens.",
    "x",
]


@cache
def huggingface_tokenizer(vocab_size=330, end="<|endoftext|>"):
    """A byte-level BPE trained on ``TEXTS``, as a fast tokenizer of transformers."""
    from transformers import PreTrainedTokenizerFast

    tokenizer = byte_level_bpe(TEXTS, vocab_size, [end])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=end)


@cache
def pair():
    """A student's tokenizer, and a teacher's with fewer merges."""
    from megatron_ext import from_huggingface

    return from_huggingface(huggingface_tokenizer()), from_huggingface(huggingface_tokenizer(290))


def model(tokenizer, *, seed=0, extra_rows=0):
    """A Llama of one layer with random weights, in fp32."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=tokenizer.vocab_size + extra_rows,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=1,
            max_position_embeddings=128,
        )
    )
