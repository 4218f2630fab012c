"""The flags that ``minimal_projection_via_multitoken`` and ``reapply_exact_map`` have in common."""

from __future__ import annotations

import argparse
from pathlib import Path

from megatron_ext.cli.projection.files import note
from megatron_ext.cli.projection.tool_files import BYTES_DECIDE, DATA_FOLDER, NO_SCALE_TRICK
from megatron_ext.projection.known_files.multitoken import MultitokenOptions

DEFAULTS = MultitokenOptions()


def add_multitoken_flags(parser: argparse.ArgumentParser, *, needs_initial: bool) -> None:
    """Every flag of the first tool but the models."""
    parser.add_argument("--num-examples", type=int, default=0, metavar="N", help="rows to print")
    _add_switch(
        parser,
        "scale-trick",
        default=False,
        help="accepted; no mass is ever put on a column that stands for nothing",
    )
    _add_switch(
        parser, "reverse-pass", default=True, help="also spell the teacher's tokens (default)"
    )
    _add_switch(
        parser,
        "special-token-mapping",
        default=True,
        help="relate control tokens whose names are alike (default)",
    )
    for flag in ("--enable-exact-match", "--use-raw-tokens", "--use-canonicalization"):
        parser.add_argument(
            flag, action="store_true", help="accepted; tokens of equal bytes are always exact"
        )
    parser.add_argument(
        "--tokens-to-cut",
        type=int,
        default=DEFAULTS.tokens_to_cut,
        metavar="N",
        help=f"most pieces of a spelling ({DEFAULTS.tokens_to_cut})",
    )
    parser.add_argument(
        "--top-k",
        type=int,
        default=DEFAULTS.top_k,
        metavar="K",
        help=f"most entries of a row ({DEFAULTS.top_k})",
    )
    parser.add_argument(
        "--special-token-similarity-threshold",
        type=float,
        default=DEFAULTS.special_token_similarity_threshold,
        metavar="X",
        help="least similarity of the names of two control tokens "
        f"({DEFAULTS.special_token_similarity_threshold:g})",
    )
    parser.add_argument(
        "--special-token-top-k",
        type=int,
        metavar="K",
        help="most entries of a control token (--top-k)",
    )
    parser.add_argument(
        "--initial-projection-path",
        type=Path,
        required=needs_initial,
        metavar="FILE",
        help="a projection file to start from",
    )
    parser.add_argument("--output-dir", default=DATA_FOLDER, metavar="DIR", help=f"({DATA_FOLDER})")
    parser.add_argument("--output-filename", metavar="STEM", help="file name without its ending")


def options_of(arguments: argparse.Namespace) -> MultitokenOptions:
    """What the flags say; what does nothing any more is said once."""
    if arguments.scale_trick:
        note(NO_SCALE_TRICK)
    given = [
        f"--{name.replace('_', '-')}"
        for name in ("enable_exact_match", "use_raw_tokens", "use_canonicalization")
        if getattr(arguments, name)
    ]
    if given:
        note(f"{', '.join(given)} {BYTES_DECIDE}")
    return MultitokenOptions(
        reverse_pass=arguments.reverse_pass,
        special_token_mapping=arguments.special_token_mapping,
        tokens_to_cut=arguments.tokens_to_cut,
        top_k=arguments.top_k,
        special_token_similarity_threshold=arguments.special_token_similarity_threshold,
        special_token_top_k=arguments.special_token_top_k,
    )


def _add_switch(parser: argparse.ArgumentParser, name: str, *, default: bool, help: str) -> None:
    destination = name.replace("-", "_")
    parser.add_argument(
        f"--enable-{name}", dest=destination, action="store_true", default=default, help=help
    )
    parser.add_argument(
        f"--disable-{name}", dest=destination, action="store_false", help=argparse.SUPPRESS
    )
