"""Write a projection file in the other format.

megatron-ext projection convert map.pt -o pair.safetensors --student DIR --teacher DIR

With the tokenizers the vocabulary sizes are checked, and the file says which pair it is for. A file
with mass in wrong places is refused: repair it instead.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import get_args

import numpy as np

from megatron_ext.cli.projection.files import (
    add_pair,
    note,
    pair_of,
    read_entries,
    with_model_names,
    write_projection,
)
from megatron_ext.errors import ProjectionError
from megatron_ext.projection.building.builder import identity
from megatron_ext.projection.history import with_step
from megatron_ext.projection.known_files.diagnosis import diagnose
from megatron_ext.projection.known_files.legacy_file import LegacyDtype
from megatron_ext.projection.known_files.loose_entries import LooseEntries
from megatron_ext.projection.known_files.operations import width_of
from megatron_ext.projection.known_files.tokenizer_pair import TokenizerPair
from megatron_ext.projection.sparse_projection import SparseProjection

_HARMLESS = ("no_strict_rows", "lost_exact_rows", "off_support", "lost_rows")
"""What a builder may have meant, and what writing the file mends."""


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
    for defect in diagnose(entries, pair):
        if defect.kind not in _HARMLESS:
            raise ProjectionError(
                "the projection would change when written",
                where=arguments.file,
                got=defect,
                fix="repair it: megatron-ext projection repair",
            )
        if defect.kind != "no_strict_rows":
            note(str(defect))
    projection = with_model_names(_projection(entries, pair), arguments)
    write_projection(projection, arguments.output, dtype=arguments.dtype)


def _projection(entries: LooseEntries, pair: TokenizerPair | None) -> SparseProjection:
    metadata = with_step(entries.metadata, "convert")
    metadata.pop("enable_scale_trick", None)
    exact = entries.row_sizes == 1 if entries.is_exact_row is None else entries.is_exact_row
    if pair is None:
        return entries.projection(
            (entries.height, width_of(entries)),
            vocab_sizes=entries.vocab_sizes,
            is_exact_row=exact,
            metadata=metadata,
        )
    same = np.zeros(entries.height, dtype=np.bool_)
    same[entries.rows[pair.is_same_token(entries)]] = True
    same[: pair.shape[0]] &= pair.retokenized.is_exact_row
    return entries.projection(
        (entries.height, max(entries.width or 0, pair.shape[1])),
        vocab_sizes=pair.shape,
        is_exact_row=exact & same,
        metadata={**metadata, **identity(pair.student, pair.teacher)},
    )
