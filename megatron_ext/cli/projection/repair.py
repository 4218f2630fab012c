"""Mend a projection file, and say what was wrong and what mass moved.

megatron-ext projection repair map.pt -o mended.pt --student llama3_2/ --teacher qwen3/

Without the tokenizers fillers go, repeated columns are added up and rows sum to 1. With them,
padding and tokens that have nothing to do with each other go too, exact rows are restored, and so
are pieces that a row has lost.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import get_args

from megatron_ext.cli.projection.files import (
    add_pair,
    defect_lines,
    pair_of,
    read_entries,
    with_model_names,
    write_projection,
)
from megatron_ext.projection.known_files.legacy_file import LegacyDtype
from megatron_ext.projection.known_files.repair import Repair, repair


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of the action."""
    parser.add_argument("file", type=Path, metavar="FILE", help=".pt, or .safetensors of ours")
    parser.add_argument(
        "-o", "--output", type=Path, required=True, metavar="FILE", help=".safetensors, or .pt"
    )
    add_pair(parser, required=False)
    parser.add_argument(
        "--keep-off-support",
        action="store_true",
        help="leave tokens that share no bytes where they are, as in a projection from embeddings",
    )
    parser.add_argument(
        "--dtype",
        choices=get_args(LegacyDtype),
        default="float32",
        help="of the likelihoods of a .pt file (float32)",
    )
    parser.add_argument("--json", action="store_true", help="print the changes as JSON")


def run(arguments: argparse.Namespace) -> None:
    """Mend the file and write it."""
    pair = pair_of(arguments)
    mended = repair(
        read_entries(arguments.file, pair),
        pair,
        off_support="keep" if arguments.keep_off_support else "drop",
    )
    if arguments.json:
        sys.stdout.write(json.dumps(mended.as_row(), ensure_ascii=False) + "\n")
    else:
        sys.stdout.writelines(_lines(mended))
    write_projection(
        with_model_names(mended.projection, arguments), arguments.output, dtype=arguments.dtype
    )


def _lines(mended: Repair) -> list[str]:
    if not mended.defects:
        return ["nothing to mend\n"]
    changed = mended.moved > 0
    return [
        "mended\n",
        *defect_lines(mended.defects),
        f"moved {mended.moved.sum():,.1f} rows' mass in {int(changed.sum()):,} rows, "
        f"{mended.moved.sum() / max(changed.sum(), 1):.1%} of each\n",
        f"pieces restored in {len(mended.restored_rows):,} rows\n",
    ]
