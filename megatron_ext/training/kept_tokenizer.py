"""The tokenizer of a checkpoint, as files that transformers reads."""

from __future__ import annotations

import filecmp
from functools import cached_property
from pathlib import Path
from typing import Final

from megatron_ext.errors import TokenizerError
from megatron_ext.huggingface.checkpoint_files import TOKENIZER_FILES, kept_folder
from megatron_ext.tokenizers import (
    MegatronTokenizer,
    MegatronTokenizerText,
    TokenizerConfig,
    build_tokenizer,
)
from megatron_ext.tokenizers.assets import file_names
from megatron_ext.training.run_folder import TOKENIZER_FOLDER

_TEMPLATE: Final = "chat_template.jinja"


class KeptTokenizer:
    """What a checkpoint keeps of its tokenizer, twice where it came from HuggingFace.

    Args:
        checkpoint: One iteration's folder.
    """

    def __init__(self, checkpoint: Path) -> None:
        self._checkpoint = checkpoint

    @cached_property
    def tokenizer(self) -> MegatronTokenizerText | None:
        """It; None where the checkpoint keeps none.

        Raises:
            TokenizerError: What is kept is not whole.
        """
        folder = self._checkpoint / TOKENIZER_FOLDER
        return MegatronTokenizer.from_pretrained(folder) if folder.is_dir() else None

    @property
    def vocab_size(self) -> int | None:
        """Its ids."""
        return None if self.tokenizer is None else self.tokenizer.vocab_size

    @cached_property
    def is_of_huggingface(self) -> bool:
        """Whether the files of the HuggingFace folder that is kept are of this tokenizer."""
        kept = kept_folder(self._checkpoint)
        if kept is None or not any((kept / name).is_file() for name in TOKENIZER_FILES):
            return False
        if self.tokenizer is None:
            return True
        try:
            theirs = build_tokenizer(TokenizerConfig(model=str(kept)))
        except TokenizerError:
            # Of a library that this folder does not name, as files of tiktoken.
            return self._has_files_in(kept)
        is_same_template = theirs.chat_template == self.tokenizer.chat_template
        return is_same_template and theirs.fingerprint() == self.tokenizer.fingerprint()

    def _has_files_in(self, folder: Path) -> bool:
        """Whether every file of the tokenizer is in a folder, by whatever name."""
        assert self.tokenizer is not None
        own = list(file_names(self.tokenizer))
        others = [other for other in folder.iterdir() if other.is_file()]
        return bool(own) and all(
            any(filecmp.cmp(file, other, shallow=False) for other in others) for file in own
        )

    def files(self) -> dict[str, bytes]:
        """Its own files by the names that transformers knows, with its chat template."""
        if self.tokenizer is None:
            return {}
        names = file_names(self.tokenizer)
        files = {name: file.read_bytes() for file, name in names.items() if name in TOKENIZER_FILES}
        template = self.tokenizer.chat_template
        if template is not None:
            files[_TEMPLATE] = template.encode()
        return files
