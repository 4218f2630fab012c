"""Which library reads what lies at a path."""

from __future__ import annotations

import os

from megatron_ext.tokenizers.libraries.huggingface_vocab import vocab_files_at
from megatron_ext.tokenizers.tokenizer_files import FileLibrary, file_kind


def library_at(path: str | os.PathLike[str]) -> FileLibrary:
    """The library of a tokenizer file, of the one in a directory, or of its vocabulary files.

    ``vocab.json`` with ``merges.txt`` and ``vocab.txt``, which Megatron leaves in a checkpoint, are
    the HuggingFace library's.

    Raises:
        TokenizerError: There is none, or it is not a recognised tokenizer file.
    """
    return "huggingface" if vocab_files_at(path) is not None else file_kind(path).library
