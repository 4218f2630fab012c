from megatron_ext.ops.vocab_kl.function import (
    VocabKLValues,
    evaluate_vocab_kl,
    vocab_kl,
    vocab_kl_reference,
)

__all__ = [
    "VocabKLValues",
    "evaluate_vocab_kl",
    "vocab_kl",
    "vocab_kl_reference",
]
