"""Build a projection from two tokenizers.

megatron-ext projection build --student llama3_2/ --teacher qwen3/ -o pair.safetensors
"""

from __future__ import annotations

import argparse
from pathlib import Path

from megatron_ext.cli.projection.files import (
    add_pair,
    required_pair,
    with_model_names,
    write_projection,
)
from megatron_ext.projection.building.builder import PROJECTION_METHODS
from megatron_ext.projection.building.options import PIECE_DECAY
from megatron_ext.projection.sparse_projection import SparseProjection


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of the action."""
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


def run(arguments: argparse.Namespace) -> None:
    """Build it and write it."""
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
    write_projection(with_model_names(projection, arguments), arguments.output)
