"""Cutting the input into shards that can be read one by one, on any machine."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise

from megatron_ext.preprocessing.input_slice import InputSlice
from megatron_ext.preprocessing.parquet_rows import row_group_sizes
from megatron_ext.preprocessing.source_file import SourceFile


def cut_into_shards(
    files: Sequence[SourceFile], shard_count: int
) -> tuple[tuple[InputSlice, ...], ...]:
    """The input in ``shard_count`` parts of about the same number of bytes, in order.

    JSON lines are cut at any line, Parquet between row groups, anything else between files; a part
    may come out empty where files are few and large.

    Raises:
        DataError: A Parquet file cannot be read.
        MissingDependencyError: pyarrow is not installed.
    """
    total = max(sum(file.size for file in files), 1)
    shards: list[list[InputSlice]] = [[] for _ in range(shard_count)]
    position = 0
    for file in files:
        offset = 0
        for piece in _pieces(file, _cuts(position, file.size, total, shard_count)):
            begin = position + offset
            # An empty file at the very end begins where the last part stops.
            _add(shards[min(begin * shard_count // total, shard_count - 1)], piece)
            offset += piece.size
        position += file.size
    return tuple(tuple(shard) for shard in shards)


def _cuts(position: int, size: int, total: int, shard_count: int) -> list[int]:
    """Where, in a file that begins at ``position``, a part begins: bytes of the file."""
    first = position * shard_count // total + 1
    last = (position + size) * shard_count // total
    # Rounded up, so that the byte at a cut is the first whose share is that of the new part.
    return [-(-index * total // shard_count) - position for index in range(first, last + 1)]


def _pieces(file: SourceFile, cuts: Sequence[int]) -> Iterator[InputSlice]:
    """The slices of ``file`` that may have to lie in different parts."""
    if file.kind == "json-lines":
        # A set, because cuts fall together where there are more parts than bytes.
        bounds = {0, *(cut for cut in cuts if cut < file.size), file.size}
        for start, stop in pairwise(sorted(bounds)):
            yield InputSlice(file.path, file.kind, start, stop, stop - start)
    elif file.kind == "parquet":
        sizes = row_group_sizes(file.path)
        # Row groups know their sizes before compression; what counts here is the file's.
        ends = [file.size * sum(sizes[: i + 1]) // max(sum(sizes), 1) for i in range(len(sizes))]
        for index, (begin, end) in enumerate(pairwise([0, *ends])):
            yield InputSlice(file.path, file.kind, index, index + 1, end - begin)
    else:
        yield InputSlice(file.path, file.kind, 0, file.size, file.size)


def _add(shard: list[InputSlice], piece: InputSlice) -> None:
    """Append ``piece``, as one with the slice before it where that is the same file's."""
    if shard and shard[-1].path == piece.path and shard[-1].stop == piece.start:
        before = shard.pop()
        piece = replace(piece, start=before.start, size=before.size + piece.size)
    shard.append(piece)
