"""Building a projection, and a model with another tokenizer by one."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Final

from megatron_ext.cli.projection.files import add_pair, note, required_pair, write_projection
from megatron_ext.errors import ConfigError
from megatron_ext.projection.builder import PROJECTION_METHODS
from megatron_ext.projection.options import PIECE_DECAY
from megatron_ext.projection.sparse_projection import SparseProjection
from megatron_ext.tokenizers import TokenizerConfig, build_tokenizer

_MOST_PIECES: Final = 32
"""A token that the old tokenizer spells with more is a run of one character."""


def add_build_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of ``build``."""
    add_pair(parser, required=True)
    parser.add_argument(
        "-o", "--output", type=Path, required=True, metavar="FILE", help=".safetensors, or .pt"
    )
    parser.add_argument(
        "--method",
        choices=tuple(PROJECTION_METHODS),
        default="retokenized",
        help="what stands for a token that the teacher lacks: nothing, the pieces it spells the "
        "token with, or the first of them (retokenized)",
    )
    parser.add_argument(
        "--top-k", type=int, default=4, metavar="K", help="most entries of a row (4)"
    )
    parser.add_argument(
        "--decay",
        type=float,
        default=PIECE_DECAY,
        metavar="X",
        help=f"what a piece weighs of the one before it ({PIECE_DECAY:g})",
    )
    parser.add_argument(
        "--reverse-pass",
        action="store_true",
        help="also spell the tokens that the student lacks with the student's",
    )
    parser.add_argument(
        "--control-similarity",
        type=float,
        metavar="X",
        help="relate control tokens without role or name in common whose names are as alike as "
        "this; when unset their rows are empty",
    )


def build(arguments: argparse.Namespace) -> None:
    """Build a projection from two tokenizers.

    megatron-ext projection build --student llama3_2/ --teacher qwen3/ -o pair.safetensors
    """
    pair = required_pair(arguments)
    projection = SparseProjection.from_tokenizers(
        pair.student,
        pair.teacher,
        method=arguments.method,
        top_k=arguments.top_k,
        decay=arguments.decay,
        reverse_pass=arguments.reverse_pass,
        control_similarity=arguments.control_similarity,
    )
    write_projection(projection, arguments.output, arguments)


def add_embed_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of ``embed``."""
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


def embed(arguments: argparse.Namespace) -> None:
    """Give a model another tokenizer: a HuggingFace folder with embeddings for the new vocabulary.

    megatron-ext projection embed models/Qwen3-0.6B models/qwen-with-llama --tokenizer llama3_2/

    Each new token starts as the mean of the old tokens that stand for it, a token that both have as
    it was; all other weights stay. The shares are those of --projection, from the new vocabulary to
    the old one, or equal ones over the pieces that the old tokenizer spells a new token with. Such
    a model is a start: distil it from the one that it came from.
    """
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
