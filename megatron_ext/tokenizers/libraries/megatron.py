"""Megatron's named tokenizers, GPT-2's and BERT's, from their vocabulary files."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

from megatron_ext.errors import TokenizerError
from megatron_ext.registry import did_you_mean
from megatron_ext.tokenizers.libraries.huggingface import HuggingFaceTokenizer
from megatron_ext.tokenizers.libraries.huggingface_file import HuggingFaceSource
from megatron_ext.tokenizers.libraries.huggingface_vocab import PathLike, named_vocab_files
from megatron_ext.tokenizers.tokenizer_files import local_files


@dataclass(frozen=True, slots=True)
class MegatronName:
    """Tokenizer of one of Megatron's names."""

    kind: Literal["GPT-2", "BERT"]
    """Format of its vocabulary."""
    hub_name: str | None
    """Name of the tokenizer on the HuggingFace hub; None where it is not there."""
    lowercase: bool | None = None
    """Whether BERT's text becomes lower case."""


_GPT2 = MegatronName("GPT-2", "gpt2")
_UNCASED = MegatronName("BERT", "bert-large-uncased", lowercase=True)
_CASED = MegatronName("BERT", "bert-large-cased", lowercase=False)

MEGATRON_NAMES: Mapping[str, MegatronName] = {
    "BertWordPieceLowerCase": _UNCASED,
    "BertWordPieceCase": _CASED,
    "GPT2BPETokenizer": _GPT2,
    "megatron-gpt-345m": _GPT2,
    "megatron-bert-345m-uncased": _UNCASED,
    "megatron-bert-345m-cased": _CASED,
    "megatron-bert-uncased": _UNCASED,
    "megatron-bert-cased": _CASED,
    "biomegatron-bert-345m-uncased": MegatronName("BERT", None, lowercase=True),
    "biomegatron-bert-345m-cased": MegatronName("BERT", None, lowercase=False),
}
"""Name -> tokenizer, as Megatron has them."""


class MegatronHFTokenizer(HuggingFaceTokenizer):
    """A tokenizer that Megatron has by name; otherwise a ``HuggingFaceTokenizer``.

    Args:
        path: A name in ``MEGATRON_NAMES``, whose vocabulary comes from ``vocab_file`` and
            ``merges_file``, and without them from the HuggingFace hub; or a file or a directory.

    Raises:
        TokenizerError: As for ``HuggingFaceTokenizer``, or the files do not fit the name, or
            ``path`` is neither a name nor there.
    """

    library: ClassVar[str] = "megatron"

    def _open(
        self, path: PathLike, vocab_file: PathLike | None, merges_file: PathLike | None
    ) -> HuggingFaceSource:
        name = os.fspath(path)
        named = MEGATRON_NAMES.get(name)
        if named is not None:
            return _open_by_name(name, named, vocab_file, merges_file)
        if vocab_file is None and not Path(path).exists():
            raise TokenizerError(
                "this is neither a tokenizer of Megatron's nor a file",
                expected=f"a path, or one of {', '.join(MEGATRON_NAMES)}",
                fix=did_you_mean(name, list(MEGATRON_NAMES)),
                where=name,
            )
        return super()._open(path, vocab_file, merges_file)


def _open_by_name(
    name: str, named: MegatronName, vocab_file: PathLike | None, merges_file: PathLike | None
) -> HuggingFaceSource:
    needed = "vocab_file and merges_file" if named.kind == "GPT-2" else "vocab_file"
    given = {"vocab_file": vocab_file, "merges_file": merges_file}
    got = [option for option, file in given.items() if file is not None]
    if got and " and ".join(got) != needed:
        raise TokenizerError(
            f"{name} is read from {needed}", got=", ".join(got), where=vocab_file or merges_file
        )
    # Other files in their folder belong to another tokenizer.
    source = named_vocab_files(vocab_file, merges_file, None, lowercase=named.lowercase)
    if source is not None:
        return source
    return _from_the_hub(name, named, needed)


def _from_the_hub(name: str, named: MegatronName, needed: str) -> HuggingFaceSource:
    fix = f"pass {needed} (--vocab-file{', --merge-file' if named.kind == 'GPT-2' else ''})"
    if named.hub_name is None:
        raise TokenizerError(f"{name} needs its vocabulary", fix=fix)
    try:
        folder = local_files(named.hub_name)
    except TokenizerError as error:
        raise TokenizerError(f"{name} needs its vocabulary", got=error, fix=fix) from error
    return HuggingFaceSource(folder / "tokenizer.json", folder)
