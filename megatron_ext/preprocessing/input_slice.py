"""A part of one input file."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_ext.preprocessing.source_file import SourceKind


@dataclass(frozen=True, slots=True)
class InputSlice:
    """A part of one file.

    The lines of a JSON lines file that begin in the bytes ``[start, stop)``, the row groups
    ``[start, stop)`` of a Parquet file, or the whole of any other file.
    """

    path: str
    kind: SourceKind
    start: int
    stop: int
    size: int
    """Its share of the bytes of the file."""
