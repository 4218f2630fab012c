"""Projection files of either kind, and the tokenizers that they are for."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Final

from megatron_ext.errors import ConfigError
from megatron_ext.projection.file import is_legacy_file, load_matrix, save_matrix
from megatron_ext.projection.nemo.inspection import read_legacy_entries
from megatron_ext.projection.nemo.legacy_file import LegacyDtype, write_legacy_file
from megatron_ext.projection.nemo.loose_entries import LooseEntries
from megatron_ext.projection.nemo.tokenizer_pair import TokenizerPair
from megatron_ext.projection.projection_matrix import ProjectionMatrix
from megatron_ext.tokenizers import TokenizerConfig, build_tokenizer

LEGACY_SUFFIXES: Final = (".pt", ".pth")
"""Of files that are written so."""

_SHOWN: Final = 3
"""Examples of a list."""


def add_pair(parser: argparse.ArgumentParser, *, required: bool) -> None:
    """Add ``--student`` and ``--teacher``, and the names that NeMo RL's tools have for them."""
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
    """The tokenizers that are named; None where neither is.

    Raises:
        ConfigError: Only one of them is named.
        TokenizerError: One cannot be read.
    """
    names = (arguments.student, arguments.teacher)
    if names == (None, None):
        return None
    for role, name in zip(("student", "teacher"), names, strict=True):
        if name is None:
            raise ConfigError(f"the {role}'s tokenizer is not named", where=f"--{role}")
    return TokenizerPair(*(build_tokenizer(TokenizerConfig(model=name)) for name in names))


def required_pair(arguments: argparse.Namespace) -> TokenizerPair:
    """The tokenizers, where the parser asks for both."""
    pair = pair_of(arguments)
    assert pair is not None
    return pair


def read_entries(path: Path, pair: TokenizerPair | None = None) -> LooseEntries:
    """The entries of a file of either kind.

    Raises:
        ProjectionError: It is none, or one of ours that is for other tokenizers.
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
    """Write a file of the kind that the suffix says, and say so on standard error unless ``quiet``.

    The file names the models as the command line does, unless the projection names others.

    Raises:
        ProjectionError: The place cannot be written to.
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
    """The first items in a row, and whether there are more; nothing where there is none."""
    shown = list(islice(items, _SHOWN + 1))
    if not shown:
        return ""
    more = ", ..." if len(shown) > _SHOWN else ""
    return f"{before}{', '.join(shown[:_SHOWN])}{more}{after}"


def note(text: str) -> None:
    """Tell the user something on standard error that stops nothing."""
    sys.stderr.write(f"note: {text}\n")
