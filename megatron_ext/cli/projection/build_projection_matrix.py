"""Build a projection in one command: the multi-token map, exact rows, sorting and cutting.

python -m megatron_ext.cli.projection.build_projection_matrix \\
    --student-model llama3_2/ --teacher-model qwen3/

Flags and file names are those of build_projection_matrix.sh in NeMo RL; its three steps are the
actions minimal-projection-via-multitoken, reapply-exact-map and sort-and-cut-projection-matrix.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from megatron_ext.cli.main import main
from megatron_ext.cli.projection import (
    minimal_projection_via_multitoken,
    reapply_exact_map,
    sort_and_cut_projection_matrix,
)
from megatron_ext.cli.projection.files import add_pair
from megatron_ext.cli.projection.tool_files import DATA_FOLDER, clean_model_name, made_folder


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of the wrapper."""
    add_pair(parser, required=True)
    parser.add_argument("--data-dir", default=DATA_FOLDER, metavar="DIR", help=f"({DATA_FOLDER})")
    parser.add_argument(
        "--prep-top-k", type=int, default=32, metavar="K", help="entries of a row at first (32)"
    )
    parser.add_argument(
        "--runtime-top-k", type=int, default=4, metavar="K", help="entries of a row at last (4)"
    )
    parser.add_argument(
        "--final-output",
        type=Path,
        metavar="FILE",
        help="by default projection_matrix_STUDENT_TEACHER_topK.pt in the folder",
    )
    for flag, what in (
        ("--skip-exact-map", "leave out the second step"),
        ("--use-canonicalization", "accepted; tokens of equal bytes are always exact"),
        ("--no-scale-trick", "accepted; no filler column is ever written"),
        ("--no-reverse-pass", "do not spell the teacher's tokens"),
        ("--no-special-token-mapping", "leave control tokens without a match empty"),
    ):
        parser.add_argument(flag, action="store_true", help=what)


def run(arguments: argparse.Namespace) -> None:
    """Run the three steps."""
    folder = made_folder(arguments.data_dir)
    models = ["--student-model", arguments.student, "--teacher-model", arguments.teacher]
    first = ["--top-k", str(arguments.prep_top_k), "--output-dir", str(folder)]
    first += ["--disable-reverse-pass"] if arguments.no_reverse_pass else []
    first += ["--disable-special-token-mapping"] if arguments.no_special_token_mapping else []
    first += ["--use-canonicalization"] if arguments.use_canonicalization else []
    path = minimal_projection_via_multitoken.build(
        _parsed(minimal_projection_via_multitoken.add_arguments, [*models, *first])
    )
    if not arguments.skip_exact_map:
        path = reapply_exact_map.reapply(
            _parsed(
                reapply_exact_map.add_arguments, [*models, "--initial-projection-path", str(path)]
            )
        )
    sort_and_cut_projection_matrix.cut(
        argparse.Namespace(
            initial_projection_path=path,
            top_k=arguments.runtime_top_k,
            output_path=arguments.final_output or folder / _final_name(arguments),
            preserve_last=False,
            quiet=False,
        )
    )


def _parsed(add: object, words: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    assert callable(add)
    add(parser)
    return parser.parse_args(words)


def _final_name(arguments: argparse.Namespace) -> str:
    student, teacher = (clean_model_name(m) for m in (arguments.student, arguments.teacher))
    return f"projection_matrix_{student}_{teacher}_top{arguments.runtime_top_k}.pt"


if __name__ == "__main__":
    main(["projection", "build-projection-matrix", *sys.argv[1:]])
