"""The actions ``build`` and ``embed`` of ``megatron-ext projection``, and their files."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Final

from megatron_ext.errors import ConfigError
from megatron_ext.projection.builder import PROJECTION_METHODS
from megatron_ext.projection.file import is_legacy_file, load_matrix, save_matrix
from megatron_ext.projection.nemo.inspection import read_legacy_entries
from megatron_ext.projection.nemo.legacy_file import LegacyDtype, write_legacy_file
from megatron_ext.projection.nemo.loose_entries import LooseEntries
from megatron_ext.projection.nemo.tokenizer_pair import TokenizerPair
from megatron_ext.projection.projection_matrix import ProjectionMatrix
from megatron_ext.projection.sparse_projection import SparseProjection
from megatron_ext.projection.speller import PIECE_DECAY
from megatron_ext.tokenizers import TokenizerConfig, build_tokenizer

LEGACY_SUFFIXES: Final = (".pt", ".pth")
"""Suffixes of files in NeMo RL's format."""

_SHOWN: Final = 3
"""Items shown of a list."""


def add_pair(parser: argparse.ArgumentParser, *, required: bool) -> None:
    """Add ``--student`` and ``--teacher``, with the aliases of NeMo RL's tools."""
    for role in ("student", "teacher"):
        parser.add_argument(
            f"--{role}",
            f"--{role}-model",
            dest=role,
            required=required,
            metavar="MODEL",
            help=f"the {role}'s tokenizer: a file, its folder, or a name on the HuggingFace hub",
        )


def pair_of(arguments: argparse.Namespace) -> TokenizerPair | None:
    """The named tokenizers; None if neither is named.

    Raises:
        ConfigError: Only one tokenizer is named.
        TokenizerError: A tokenizer cannot be read.
    """
    names = (arguments.student, arguments.teacher)
    if names == (None, None):
        return None
    for role, name in zip(("student", "teacher"), names, strict=True):
        if name is None:
            raise ConfigError(f"the {role}'s tokenizer is not named", where=f"--{role}")
    return TokenizerPair(*(build_tokenizer(TokenizerConfig(model=name)) for name in names))


def required_pair(arguments: argparse.Namespace) -> TokenizerPair:
    """The tokenizers, both of which the parser requires."""
    pair = pair_of(arguments)
    assert pair is not None
    return pair


def read_entries(path: Path, pair: TokenizerPair | None = None) -> LooseEntries:
    """Read the entries of a file of either format.

    Raises:
        ProjectionError: The file is no projection, or one for other tokenizers.
    """
    student, teacher = (None, None) if pair is None else (pair.student, pair.teacher)
    if is_legacy_file(path):
        return read_legacy_entries(path, student, teacher)
    return LooseEntries.of(load_matrix(path, student, teacher, note))


def write_projection(
    projection: ProjectionMatrix,
    path: Path,
    arguments: argparse.Namespace,
    *,
    dtype: LegacyDtype = "float32",
    slot_count: int | None = None,
    quiet: bool = False,
) -> None:
    """Write a file in the format of its suffix, with a note on standard error unless ``quiet``.

    The file names the models as the command line does, unless the projection names others.

    Raises:
        ProjectionError: The file cannot be written.
    """
    names = {f"{role}_model_id": vars(arguments).get(role) for role in ("student", "teacher")}
    given = {key: name for key, name in names.items() if name is not None}
    projection = replace(projection, metadata={**given, **projection.metadata})
    if path.suffix in LEGACY_SUFFIXES:
        write_legacy_file(projection, path, dtype=dtype, slot_count=slot_count)
    else:
        save_matrix(projection, path)
    if quiet:
        return
    empty = projection.empty_rows
    sys.stderr.write(
        f"written: {path}: {projection.shape[0]:,} x {projection.shape[1]:,}, "
        f"{projection.entry_count:,} entries, {int(projection.is_exact_row.sum()):,} exact rows, "
        f"{len(empty):,} empty{some_of(map(str, empty.tolist()), before=' (', after=')')}\n"
    )


def some_of(items: Iterable[str], *, before: str, after: str = "") -> str:
    """The first items in one line, with an ellipsis if there are more; empty without items."""
    shown = list(islice(items, _SHOWN + 1))
    if not shown:
        return ""
    more = ", ..." if len(shown) > _SHOWN else ""
    return f"{before}{', '.join(shown[:_SHOWN])}{more}{after}"


def note(text: str) -> None:
    """Print a note on standard error."""
    sys.stderr.write(f"note: {text}\n")


def add_build_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of ``build``."""
    add_pair(parser, required=True)
    parser.add_argument(
        "-o", "--output", type=Path, required=True, metavar="FILE", help=".safetensors, or .pt"
    )
    parser.add_argument(
        "--method",
        choices=tuple(PROJECTION_METHODS),
        default="retokenized",
        help="what stands for a token that the teacher lacks: nothing (exact), the pieces that "
        "spell it (retokenized, the default), the first of these, or the nearest spelling (mined)",
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


def build(arguments: argparse.Namespace) -> None:
    """Build a projection from two tokenizers.

    megatron-ext projection build --student llama3_2/ --teacher qwen3/ -o pair.safetensors
    """
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
    write_projection(projection, arguments.output, arguments)


def add_embed_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of ``embed``."""
    parser.add_argument("model", type=Path, metavar="MODEL", help="HuggingFace folder")
    parser.add_argument("output", type=Path, metavar="FOLDER", help="new folder")
    parser.add_argument(
        "--tokenizer", type=Path, required=True, metavar="DIR", help="folder of the new tokenizer"
    )
    parser.add_argument(
        "--projection",
        type=Path,
        metavar="FILE",
        help="shares of old tokens in new ones: a file with the new tokenizer as its student and "
        "the old one as its teacher",
    )


def embed(arguments: argparse.Namespace) -> None:
    """Write a model with the vocabulary of another tokenizer: megatron-ext transfer init.

    megatron-ext projection embed models/Qwen3-0.6B models/qwen-with-llama --tokenizer llama3_2/

    The older name of that command; --projection is here alone.
    """
    # Imported late: torch takes seconds to load.
    from megatron_ext.transfer.options import TransferOptions
    from megatron_ext.transfer.write_model import transfer_model

    options = TransferOptions(projection=arguments.projection)
    report = transfer_model(arguments.model, arguments.tokenizer, arguments.output, options)
    sys.stdout.write(
        f"{arguments.output}: {report.new_ids:,} tokens, {report.copied:,} as they were, "
        f"{report.combined:,} means of others, {len(report.means):,} of all\n"
    )
