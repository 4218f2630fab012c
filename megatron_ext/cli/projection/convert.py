"""Write a projection file in the other format.

megatron-ext projection convert map.pt -o pair.safetensors --student DIR --teacher DIR

With the tokenizers the vocabulary sizes are checked, and the file says which pair it is for. A file
with mass in wrong places is refused: build a projection from the tokenizers instead.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import get_args

from megatron_ext.cli.projection.files import (
    add_pair,
    note,
    pair_of,
    read_entries,
    with_model_names,
    write_projection,
)
from megatron_ext.projection.history import with_step
from megatron_ext.projection.known_files.legacy_file import LegacyDtype
from megatron_ext.projection.known_files.sound_projection import sound_projection


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of the action."""
    parser.add_argument("file", type=Path, metavar="FILE", help=".pt, or .safetensors of ours")
    parser.add_argument(
        "-o", "--output", type=Path, required=True, metavar="FILE", help=".safetensors, or .pt"
    )
    add_pair(parser, required=False)
    parser.add_argument(
        "--dtype",
        choices=get_args(LegacyDtype),
        default="float32",
        help="of the likelihoods of a .pt file (float32)",
    )


def run(arguments: argparse.Namespace) -> None:
    """Check the file and write it."""
    pair = pair_of(arguments)
    entries = read_entries(arguments.file, pair)
    projection = sound_projection(
        entries,
        pair,
        where=arguments.file,
        tell=note,
        metadata=with_step(entries.metadata, "convert"),
    )
    write_projection(
        with_model_names(projection, arguments), arguments.output, dtype=arguments.dtype
    )
