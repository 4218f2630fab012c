from megatron_ext.ops.vocab_kl.evaluation import VocabKLValues, evaluate_vocab_kl
from megatron_ext.ops.vocab_kl.function import vocab_kl
from megatron_ext.ops.vocab_kl.reference import vocab_kl_reference

__all__ = [
    "VocabKLValues",
    "evaluate_vocab_kl",
    "vocab_kl",
    "vocab_kl_reference",
]
