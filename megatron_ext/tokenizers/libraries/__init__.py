"""Adapters of the tokenizer libraries, one for each."""

from megatron_ext.tokenizers.libraries.tokenizer_libraries import (
    TOKENIZER_LIBRARIES,
    LibraryName,
    TokenizerLibrary,
    library_of,
)

__all__ = ["TOKENIZER_LIBRARIES", "LibraryName", "TokenizerLibrary", "library_of"]
