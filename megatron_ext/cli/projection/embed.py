"""Give a model another tokenizer: a HuggingFace folder with embeddings for the new vocabulary.

megatron-ext projection embed models/Qwen3-0.6B models/qwen-with-llama --tokenizer llama3_2/

Each new token starts as the mean of the old tokens that stand for it, a token that both have as it
was; all other weights stay. The shares are those of --projection, from the new vocabulary to the
old one, or equal ones over the pieces that the old tokenizer spells a new token with. Such a model
is a start: distil it from the one that it came from.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Final

from megatron_ext.cli.projection.files import note
from megatron_ext.errors import ConfigError
from megatron_ext.projection.sparse_projection import SparseProjection
from megatron_ext.tokenizers import TokenizerConfig, build_tokenizer

_MOST_PIECES: Final = 32
"""A token that the old tokenizer spells with more is a run of one character."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of the action."""
    parser.add_argument("model", type=Path, metavar="MODEL", help="HuggingFace folder")
    parser.add_argument("output", type=Path, metavar="FOLDER", help="new folder")
    parser.add_argument(
        "--tokenizer", type=Path, required=True, metavar="DIR", help="folder of the new tokenizer"
    )
    parser.add_argument(
        "--projection",
        type=Path,
        metavar="FILE",
        help="shares of old tokens in new ones: a file with the new tokenizer as its student and "
        "the old one as its teacher",
    )


def run(arguments: argparse.Namespace) -> None:
    """Write the folder and say what its rows were made of."""
    if not arguments.tokenizer.is_dir():
        raise ConfigError(
            "the new tokenizer's files are copied",
            where="--tokenizer",
            got=arguments.tokenizer,
            expected="their folder",
        )
    new, old = (
        build_tokenizer(TokenizerConfig(model=str(path)))
        for path in (arguments.tokenizer, arguments.model)
    )
    if arguments.projection is not None:
        projection = SparseProjection.load(arguments.projection, new, old, tell=note)
    else:
        projection = SparseProjection.from_tokenizers(new, old, top_k=_MOST_PIECES, decay=1.0)
    # torch takes seconds to load.
    from megatron_ext.huggingface.new_vocabulary import write_with_vocabulary

    write_with_vocabulary(
        arguments.model,
        arguments.output,
        projection=projection,
        tokenizer=new,
        tokenizer_folder=arguments.tokenizer,
    )
    exact, empty = int(projection.is_exact_row.sum()), len(projection.empty_rows)
    sys.stdout.write(
        f"{arguments.output}: {projection.shape[0]:,} tokens, {exact:,} as they were, "
        f"{projection.shape[0] - exact - empty:,} means of others, {empty:,} of all\n"
    )
