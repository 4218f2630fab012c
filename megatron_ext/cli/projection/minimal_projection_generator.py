"""Build a projection from embeddings of the two vocabularies.

python -m megatron_ext.cli.projection.minimal_projection_generator \\
    --student-model llama3_2/ --teacher-model qwen3/ \\
    --student-embeddings student.safetensors --teacher-embeddings teacher.npy

Flags and the file name are those of the tool of this name in NeMo RL. No model is downloaded: the
embeddings are a matrix of each side, or the input embeddings of models whose weights lie in the
folders. Tokens of equal bytes are exact; only the others are related by embeddings.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import get_args

from megatron_ext.cli.main import main
from megatron_ext.cli.projection.embedding_files import embeddings_of
from megatron_ext.cli.projection.files import (
    add_pair,
    required_pair,
    with_model_names,
    write_projection,
)
from megatron_ext.cli.projection.tool_files import (
    DATA_FOLDER,
    clean_model_name,
    made_folder,
    note_inert,
)
from megatron_ext.errors import ConfigError
from megatron_ext.projection.building.embedding_builder import build_embedding_projection
from megatron_ext.projection.building.embedding_space import EmbeddingSpace
from megatron_ext.projection.known_files.loose_entries import LooseEntries
from megatron_ext.projection.projection_matrix import ProjectionMatrix

_INERT = {"--keep_top_tokens": -1, "--force_recompute": False, "--use_canonicalization": False}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of the tool."""
    add_pair(parser, required=True)
    for role in ("student", "teacher"):
        parser.add_argument(
            f"--{role}-embeddings",
            type=Path,
            metavar="FILE",
            help=f"a .npy or .safetensors file with a row for each token of the {role}; by default "
            "the input embeddings of the model in the folder of its tokenizer",
        )
        parser.add_argument(
            f"--{role}-tensor", metavar="NAME", help="tensor in a .safetensors file of several"
        )
    parser.add_argument(
        "--space",
        choices=get_args(EmbeddingSpace),
        default="anchored",
        help="shared: one encoder made both; anchored: each is its model's own, and what both "
        "have relate them (anchored)",
    )
    parser.add_argument("--data_dir", default=f"{DATA_FOLDER}/", metavar="DIR")
    parser.add_argument(
        "--top_k", type=int, default=10, metavar="K", help="most entries of a row (10)"
    )
    parser.add_argument(
        "--weight_threshold",
        type=float,
        default=0.0,
        metavar="X",
        help="entries of no larger share are left out (0)",
    )
    parser.add_argument("--keep_top_tokens", type=int, default=-1, help="accepted; does nothing")
    for flag in ("--force_recompute", "--use_canonicalization"):
        parser.add_argument(flag, action="store_true", help="accepted; does nothing")


def run(arguments: argparse.Namespace) -> None:
    """Build it and write it."""
    if arguments.student == arguments.teacher:
        raise ConfigError(
            "student and teacher are one model", got=arguments.student, expected="two models"
        )
    if not 0 <= arguments.weight_threshold < 1:
        raise ConfigError(
            "the least share cannot be used",
            got=arguments.weight_threshold,
            expected="at least 0 and below 1",
            where="--weight_threshold",
        )
    note_inert(arguments, _INERT, "does nothing")
    student_embeddings, teacher_embeddings = (
        embeddings_of(
            getattr(arguments, role),
            getattr(arguments, f"{role}_embeddings"),
            getattr(arguments, f"{role}_tensor"),
            role=role,
        )
        for role in ("student", "teacher")
    )
    pair = required_pair(arguments)
    projection = build_embedding_projection(
        pair.student,
        pair.teacher,
        student_embeddings,
        teacher_embeddings,
        space=arguments.space,
        top_k=arguments.top_k,
    )
    student, teacher = (clean_model_name(m) for m in (arguments.student, arguments.teacher))
    name = f"temp_projection_map_{student}_to_{teacher}_top_{arguments.top_k}.pt"
    write_projection(
        with_model_names(_above(projection, arguments.weight_threshold), arguments),
        made_folder(arguments.data_dir) / name,
    )


def _above(projection: ProjectionMatrix, threshold: float) -> ProjectionMatrix:
    """``projection`` without shares up to ``threshold``."""
    entries = LooseEntries.of(projection)
    return entries.kept(entries.weights > threshold).projection(
        projection.shape,
        vocab_sizes=projection.vocab_sizes,
        is_exact_row=projection.is_exact_row,
    )


if __name__ == "__main__":
    main(["projection", "minimal-projection-generator", *sys.argv[1:]])
