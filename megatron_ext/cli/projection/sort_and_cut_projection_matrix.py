"""Keep the largest entries of each row of a projection.

python -m megatron_ext.cli.projection.sort_and_cut_projection_matrix \\
    --initial-projection-path map.pt --top_k 4

Writes map_top_4_sorted.pt beside the file. Flags are those of the tool of this name in NeMo RL, but
that a filler column (the scale trick) is left out and not carried over, unless --preserve_last asks
for it.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from megatron_ext.cli.main import main
from megatron_ext.cli.projection.files import note, read_entries, write_projection
from megatron_ext.cli.projection.tool_files import with_suffix
from megatron_ext.projection.known_files.operations import sort_and_cut


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of the tool."""
    parser.add_argument("--initial-projection-path", type=Path, required=True, metavar="FILE")
    parser.add_argument(
        "--top_k", type=int, required=True, metavar="K", help="most entries of a row"
    )
    parser.add_argument(
        "--output_path",
        type=Path,
        metavar="FILE",
        help="by default NAME_top_K_sorted.pt, or NAME_top_K_sorted_preservelast.pt",
    )
    parser.add_argument(
        "--preserve_last",
        action=argparse.BooleanOptionalAction,
        default=False,
        help="keep the last slot of each row whatever it holds",
    )
    parser.add_argument("-q", "--quiet", action="store_true", help="say nothing but errors")


def run(arguments: argparse.Namespace) -> None:
    """Cut and write it."""
    cut(arguments)


def cut(arguments: argparse.Namespace) -> Path:
    """The file that is written."""
    entries = read_entries(arguments.initial_projection_path)
    result = sort_and_cut(entries, arguments.top_k, preserve_last=arguments.preserve_last)
    if result.filler_rows and not arguments.quiet:
        share = result.filler_mass / result.filler_rows
        note(f"left out a filler: {share:.1%} of the mass of {result.filler_rows:,} rows")
    if result.cut_mass and not arguments.quiet:
        note(f"cut entries of {result.cut_mass:,.1f} rows' mass")
    preserved = "_preservelast" if arguments.preserve_last else ""
    path = arguments.output_path or with_suffix(
        arguments.initial_projection_path, f"_top_{arguments.top_k}_sorted{preserved}"
    )
    write_projection(
        result.projection, path, slot_count=max(arguments.top_k, 2), quiet=arguments.quiet
    )
    return Path(path)


if __name__ == "__main__":
    main(["projection", "sort-and-cut-projection-matrix", *sys.argv[1:]])
