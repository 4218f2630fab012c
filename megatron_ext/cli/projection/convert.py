"""The actions ``inspect`` and ``convert`` of ``megatron-ext projection``."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final, get_args

from megatron_ext.cli.projection.build import (
    add_pair,
    note,
    pair_of,
    read_entries,
    some_of,
    write_projection,
)
from megatron_ext.projection.compressed_rows import with_step
from megatron_ext.projection.nemo.inspection import Inspection, sound_projection
from megatron_ext.projection.nemo.legacy_file import LegacyDtype
from megatron_ext.projection.nemo.tokenizer_pair import TokenizerPair

_ROW_SIZES_SHOWN: Final = 8


def add_convert_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of ``convert``."""
    parser.add_argument("file", type=Path, metavar="FILE", help=".pt, or .safetensors of ours")
    parser.add_argument(
        "-o", "--output", type=Path, required=True, metavar="FILE", help=".safetensors, or .pt"
    )
    add_pair(parser, required=False)
    parser.add_argument(
        "--dtype",
        choices=get_args(LegacyDtype),
        default="float32",
        help="dtype of the likelihoods of a .pt file (float32)",
    )


def convert(arguments: argparse.Namespace) -> None:
    """Write a projection file in the other format.

    megatron-ext projection convert map.pt -o pair.safetensors --student DIR --teacher DIR

    With the tokenizers given, vocabulary sizes are checked and the pair is recorded in the file. A
    file with misplaced mass is refused: build a projection from the tokenizers instead.
    """
    pair = pair_of(arguments)
    entries = read_entries(arguments.file, pair)
    projection = sound_projection(
        entries,
        pair,
        where=arguments.file,
        tell=note,
        metadata=with_step(entries.metadata, "convert"),
    )
    write_projection(projection, arguments.output, arguments, dtype=arguments.dtype)


def add_inspect_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of ``inspect``."""
    parser.add_argument("file", type=Path, metavar="FILE", help=".pt, or .safetensors of ours")
    add_pair(parser, required=False)
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def inspect(arguments: argparse.Namespace) -> None:
    """Show the contents and the defects of a projection file.

    megatron-ext projection inspect map.pt --student llama3_2/ --teacher qwen3/

    With the tokenizers given, it also reports padding, lost exact rows and unrelated tokens. The
    exit code is 0 whatever is found.
    """
    pair = pair_of(arguments)
    inspection = Inspection.of(read_entries(arguments.file, pair), pair)
    if arguments.json:
        sys.stdout.write(json.dumps(inspection.as_row(), ensure_ascii=False) + "\n")
    else:
        sys.stdout.writelines(_lines(inspection, arguments.file, pair))


def _lines(inspection: Inspection, path: Path, pair: TokenizerPair | None) -> Iterator[str]:
    height, width = inspection.shape
    slots = f", {inspection.slot_count} slots a row" if inspection.slot_count else ""
    reached = inspection.reachable_columns / max(width, 1)
    yield f"{path}\n"
    yield f"rows x columns   {height:,} x {width:,}{slots}\n"
    yield f"entries          {inspection.entry_count:,}\n"
    yield f"columns in a row {_row_sizes(inspection)}\n"
    yield f"exact rows       {inspection.exact_rows:,}\n"
    yield (
        f"common tokens    {inspection.strict_common:,} by exact rows "
        f"({height - inspection.strict_common:,} rows uncommon), "
        f"{inspection.relaxed_common:,} by a share of 0.6\n"
    )
    yield f"reached columns  {inspection.reachable_columns:,} ({reached:.1%})\n"
    if inspection.empty_rows:
        yield f"empty rows       {len(inspection.empty_rows):,}{_examples(inspection, pair)}\n"
    for name, value in sorted(inspection.metadata.items()):
        yield f"{name}: {value}\n"
    if not inspection.defects:
        yield "no defect found\n"
    else:
        yield "defects\n"
        yield from (f"  - {defect}\n" for defect in inspection.defects)
    if not inspection.knows_tokenizers:
        yield "give --student and --teacher to judge it by the two vocabularies\n"


def _examples(inspection: Inspection, pair: TokenizerPair | None) -> str:
    """Some of the tokens without an entry, as text if the tokenizers are given."""
    named = (
        f"{row}" if pair is None else f"{row} {pair.student.id_to_token(row)!r}"
        for row in inspection.empty_rows
    )
    return some_of(named, before=": ")


def _row_sizes(inspection: Inspection) -> str:
    sizes = list(inspection.row_sizes.items())
    shown = [f"{size}: {count:,} rows" for size, count in sizes[:_ROW_SIZES_SHOWN]]
    more = sum(count for _, count in sizes[_ROW_SIZES_SHOWN:])
    return ", ".join(shown) + (f", more: {more:,} rows" if more else "")
