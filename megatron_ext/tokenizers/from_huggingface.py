"""Tokenizers of this package from objects of transformers and tokenizers that are in memory."""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

from megatron_ext.conversation.chat_output import refuse_foreign
from megatron_ext.errors import TokenizerError
from megatron_ext.tokenizers.megatron_tokenizer import MegatronTokenizer
from megatron_ext.tokenizers.text_tokenizer import MegatronTokenizerText


def from_huggingface(tokenizer: Any, **options: Any) -> MegatronTokenizerText:
    """The tokenizer of this package with the vocabulary of a HuggingFace tokenizer in memory.

    Ids, special tokens and chat template are the object's at this moment, changes made since it
    was loaded included. What the object was told of truncation and padding is not taken over, and
    a text gets no BOS or EOS unless ``include_special_tokens`` is given.

    Its files are written to a folder that lives as long as this process: ``save_pretrained`` keeps
    the tokenizer, as does a checkpoint of a run.

    Args:
        tokenizer: A ``PreTrainedTokenizerFast`` of transformers, or a ``Tokenizer`` of tokenizers.
        options: Options of ``MegatronTokenizer.from_pretrained``, such as ``prompt_format``.

    Raises:
        TokenizerError: It is neither, such as a tokenizer written in Python, or an option or a
            part of it is unusable.
    """
    folder = Path(tempfile.mkdtemp(dir=_process_folder()))
    if hasattr(tokenizer, "backend_tokenizer"):
        tokenizer.save_pretrained(folder)
        vocabulary: dict[str, int] = tokenizer.get_vocab()
    elif hasattr(tokenizer, "to_str") and hasattr(tokenizer, "get_vocab"):
        (folder / "tokenizer.json").write_text(tokenizer.to_str(), encoding="utf-8")
        vocabulary = tokenizer.get_vocab()
    else:
        kind = type(tokenizer)
        raise TokenizerError(
            "this is not a fast tokenizer of HuggingFace",
            got=f"{kind.__module__.partition('.')[0]}.{kind.__qualname__}",
            expected="a PreTrainedTokenizerFast or a tokenizers.Tokenizer",
            fix="name its file: MegatronTokenizer.from_pretrained(path)",
        )
    made = MegatronTokenizer.from_pretrained(folder, {"library": "huggingface"}, **options)
    for name, token_id in vocabulary.items():
        if token_id >= made.vocab_size or made.id_to_token(token_id) != name:
            raise TokenizerError(
                "the tokenizer in memory has a token that its files do not have",
                got=f"{name!r} with the id {token_id}",
                fix="add it with add_special_tokens of the tokenizer made here",
            )
    return made


def as_tokenizer(tokenizer: Any) -> MegatronTokenizerText:
    """``tokenizer`` itself if it is of this package, else what ``from_huggingface`` makes of it.

    Raises:
        TokenizerError: It is of neither.
    """
    if hasattr(tokenizer, "backend_tokenizer"):
        return from_huggingface(tokenizer)
    refuse_foreign(tokenizer, "encode_with_byte_ends")
    of_this_package: MegatronTokenizerText = tokenizer
    return of_this_package


@cache
def _process_folder() -> str:
    """A folder for the files of this process's tokenizers; the process removes it at its end."""
    folder = tempfile.mkdtemp(prefix="megatron_ext-")
    atexit.register(_remove, folder, os.getpid())
    return folder


def _remove(folder: str, owner: int) -> None:
    # A forked worker has the function too, and must leave its parent's files alone.
    if os.getpid() == owner:
        shutil.rmtree(folder, ignore_errors=True)
