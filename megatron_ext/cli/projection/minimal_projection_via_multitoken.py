"""Build a projection by spelling the tokens of each side with the other's.

python -m megatron_ext.cli.projection.minimal_projection_via_multitoken \\
    --student-model llama3_2/ --teacher-model qwen3/

Flags, defaults and file names are those of the tool of this name in NeMo RL, but that no filler
column is written: --enable-scale-trick is accepted, says so and does nothing. Only the tokenizers
are read, by their bytes.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np

from megatron_ext.cli.main import main
from megatron_ext.cli.projection.files import (
    add_pair,
    read_entries,
    required_pair,
    with_model_names,
    write_projection,
)
from megatron_ext.cli.projection.multitoken_flags import add_multitoken_flags, options_of
from megatron_ext.cli.projection.tool_files import made_folder, prepared_name
from megatron_ext.projection.known_files.multitoken import multitoken_projection
from megatron_ext.projection.known_files.tokenizer_pair import TokenizerPair
from megatron_ext.projection.projection_matrix import ProjectionMatrix


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of the tool."""
    add_pair(parser, required=True)
    add_multitoken_flags(parser, needs_initial=False)


def run(arguments: argparse.Namespace) -> None:
    """Build it and write it."""
    build(arguments)


def build(arguments: argparse.Namespace) -> Path:
    """The file that is written."""
    options = options_of(arguments)
    initial = arguments.initial_projection_path
    pair = required_pair(arguments)
    entries = None if initial is None else read_entries(initial, pair)
    projection = multitoken_projection(pair, options, entries)
    sys.stdout.writelines(_examples(projection, pair, arguments.num_examples))
    stem = arguments.output_filename or prepared_name(
        arguments.student, arguments.teacher, options.top_k
    )
    ending = "_special" if options.special_token_mapping else ""
    path = made_folder(arguments.output_dir) / f"{stem.removesuffix('.pt')}{ending}.pt"
    write_projection(with_model_names(projection, arguments), path)
    return path


def _examples(projection: ProjectionMatrix, pair: TokenizerPair, count: int) -> list[str]:
    """The first rows of several entries, a line each."""
    lines = []
    for row in np.flatnonzero(np.diff(projection.indptr) > 1)[:count].tolist():
        entries = slice(*projection.indptr[row : row + 2])
        shares = sorted(
            zip(
                projection.values[entries].tolist(),
                projection.indices[entries].tolist(),
                strict=True,
            ),
            reverse=True,
        )
        pieces = ", ".join(f"{pair.teacher.id_to_token(i)!r} {share:.4f}" for share, i in shares)
        lines.append(f"{row} {pair.student.id_to_token(row)!r}: {pieces}\n")
    return lines


if __name__ == "__main__":
    main(["projection", "minimal-projection-via-multitoken", *sys.argv[1:]])
