"""The tokenizer that Megatron-LM saves inside a checkpoint."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

from megatron_ext.errors import TokenizerError
from megatron_ext.tokenizers.text_tokenizer import MegatronTokenizerText


def with_whole_tokenizers(save_assets: Callable[..., Any]) -> Callable[..., Any]:
    """``save_tokenizer_assets`` that saves all that rebuilds one of our tokenizers.

    The original goes by ``tokenizer_type`` and knows the files of some types. It stays for
    checkpoints in an object store, which are no folders here.
    """

    @wraps(save_assets)
    def save(tokenizer: Any, config: Any, checkpoint_path: Any) -> Any:
        if not isinstance(tokenizer, MegatronTokenizerText) or "://" in str(checkpoint_path):
            return save_assets(tokenizer, config, checkpoint_path)
        if os.environ.get("RANK", "0") != "0":
            return None
        try:
            tokenizer.save_pretrained(Path(checkpoint_path) / "tokenizer", overwrite=True)
        except TokenizerError as error:
            # The checkpoint itself is complete: a run does not end for its tokenizer.
            warnings.warn(f"the checkpoint has no tokenizer: {error}", stacklevel=2)
        return None

    return save
