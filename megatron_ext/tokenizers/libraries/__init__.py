"""The tokenizer libraries: one adapter each, imported when it is first used."""

from megatron_ext.tokenizers.libraries.tokenizer_libraries import TOKENIZER_LIBRARIES

__all__ = ["TOKENIZER_LIBRARIES"]
