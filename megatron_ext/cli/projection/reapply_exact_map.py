"""Map every token that both vocabularies have to itself alone, in a projection that is there.

python -m megatron_ext.cli.projection.reapply_exact_map \\
    --student-model DIR --teacher-model DIR --initial-projection-path map.pt

Writes map_exact_map_remapped.pt beside the file. Flags are those of the tool of this name in NeMo
RL, but that both models must be named; tokens are compared by their bytes.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from megatron_ext.cli.main import main
from megatron_ext.cli.projection.files import (
    add_pair,
    read_entries,
    required_pair,
    with_model_names,
    write_projection,
)
from megatron_ext.cli.projection.multitoken_flags import DEFAULTS, add_multitoken_flags
from megatron_ext.cli.projection.tool_files import DATA_FOLDER, note_inert, with_suffix
from megatron_ext.projection.known_files.operations import reapply_exact_map

_INERT = {
    "--num-examples": 0,
    "--enable/disable-scale-trick": False,
    "--enable/disable-reverse-pass": True,
    "--enable-exact-match": False,
    "--use-raw-tokens": False,
    "--enable/disable-special-token-mapping": True,
    "--use-canonicalization": False,
    "--tokens-to-cut": DEFAULTS.tokens_to_cut,
    "--top-k": DEFAULTS.top_k,
    "--special-token-similarity-threshold": DEFAULTS.special_token_similarity_threshold,
    "--special-token-top-k": None,
    "--output-dir": DATA_FOLDER,
    "--output-filename": None,
}
"""Flags that the original tool shares with the first step and does not use; bytes decide here."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of the tool."""
    add_pair(parser, required=True)
    add_multitoken_flags(parser, needs_initial=True)


def run(arguments: argparse.Namespace) -> None:
    """Map them and write the file."""
    reapply(arguments)


def reapply(arguments: argparse.Namespace) -> Path:
    """The file that is written."""
    note_inert(arguments, _INERT, "does nothing here")
    pair = required_pair(arguments)
    projection = reapply_exact_map(read_entries(arguments.initial_projection_path, pair), pair)
    path = with_suffix(arguments.initial_projection_path, "_exact_map_remapped")
    write_projection(with_model_names(projection, arguments), path)
    return path


if __name__ == "__main__":
    main(["projection", "reapply-exact-map", *sys.argv[1:]])
