"""Reading of rectangles of tensors from safetensors files, and writing of whole checkpoints.

Weights in MXFP4, as gpt-oss is published, are decoded: groups of 32 numbers of four bits and one
exponent. A number is a sign, two bits of exponent and one of mantissa (E2M1); two numbers are in a
byte, the first in its lower half. The exponent of a group is a byte that 127 is subtracted from
(E8M0). From "OCP Microscaling Formats (MX) Specification", version 1.0.

Other quantised weights are the products of numbers, in FP8 (E4M3) or integers counted from a zero
point, and of the factor of their block, rounded to bf16, or to fp16 where factors are; so do
DeepSeek's script, transformers and compressed-tensors.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from math import prod
from pathlib import Path
from types import TracebackType
from typing import Any, Final

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from megatron_ext.errors import CheckpointError, refused_by_system
from megatron_ext.files import flush, new_folder
from megatron_ext.huggingface.checkpoint_files import (
    CONFIG_FILE,
    INDEX_FILE,
    WEIGHTS_FILE,
    CheckpointFiles,
)
from megatron_ext.huggingface.stored_tensors import StoredTensor
from megatron_ext.huggingface.tensor_map import Block, MegatronTensor

_GROUP: Final = 32
"""Numbers of a group of MXFP4."""

_MAGNITUDES: Final = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_BIAS: Final = 127

_ROUNDED: Final = {"BF16": torch.bfloat16, "F16": torch.float16}


class TensorReader:
    """Reader of a checkpoint's tensors; a context manager that keeps files open.

    Args:
        files: The checkpoint.
    """

    def __init__(self, files: CheckpointFiles) -> None:
        self._tensors = files.tensors
        self._open: dict[Path, Any] = {}
        self._stack = ExitStack()

    def __enter__(self) -> TensorReader:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._open.clear()
        self._stack.close()

    def whole(self, name: str) -> torch.Tensor:
        """Read a tensor, which is not in MXFP4.

        Raises:
            CheckpointError: The file cannot be read.
        """
        stored = self._tensors[name]
        if stored.block is not None:
            return self._scaled(stored, tuple(slice(0, size) for size in stored.shape))
        return self._read(stored, name, slice(None))

    def rows(self, block: Block, rows: slice, columns: slice | None) -> torch.Tensor:
        """Read a rectangle of a block, [rows, columns], or a range of a vector.

        Args:
            rows: Numbers of rows, from the first of the block on.
            columns: None for a vector.

        Raises:
            CheckpointError: The file cannot be read.
        """
        stored = self._tensors[block.name]
        first, last = (block.start + block.step * row for row in (rows.start, rows.stop - 1))
        place: tuple[int | slice, ...] = (slice(first, last + 1),)
        if columns is not None:
            place = (columns, *place) if block.is_transposed else (*place, columns)
        if block.expert is not None:
            place = (block.expert, *place)
        if stored.scales is None:
            part = self._read(stored, block.name, place)
        elif stored.block is not None:
            part = self._scaled(stored, place)
        else:
            part = self._decoded(stored, stored.scales, place)
        return (part.T if block.is_transposed else part)[:: block.step]

    def _read(self, stored: StoredTensor, name: str, place: Any) -> torch.Tensor:
        try:
            part: torch.Tensor = self._file(stored.file).get_slice(stored.name)[place]
        except (SafetensorError, OSError) as error:
            raise CheckpointError(
                f"the tensor {name} cannot be read", where=stored.file, got=error
            ) from error
        return part

    def _decoded(
        self, stored: StoredTensor, scales: StoredTensor, place: tuple[Any, ...]
    ) -> torch.Tensor:
        """A rectangle [columns, rows] of an entry of a tensor in MXFP4, in bf16."""
        expert, columns, rows = place
        groups = slice(columns.start // _GROUP, -(-columns.stop // _GROUP))
        packed, exponents = (
            self._read(part, part.name, (expert, rows, groups)) for part in (stored, scales)
        )
        begin = columns.start - groups.start * _GROUP
        whole = _of_mxfp4(packed, exponents)
        return whole[:, begin : begin + columns.stop - columns.start].T

    def _scaled(self, stored: StoredTensor, place: tuple[Any, ...]) -> torch.Tensor:
        """A rectangle of a tensor of numbers with factors, or of an entry of one, rounded."""
        assert stored.scales is not None
        numbers = self._numbers(stored, place, stored.bits, axis=-1)
        if stored.zeros is not None:
            numbers -= self._of_blocks(stored, stored.zeros, place)
        numbers *= self._of_blocks(stored, stored.scales, place)
        return numbers.to(_ROUNDED[stored.read_as])

    def _of_blocks(
        self, stored: StoredTensor, parts: StoredTensor, place: tuple[Any, ...]
    ) -> torch.Tensor:
        """The factor or zero point of each number of a rectangle, in fp32."""
        assert stored.block is not None
        cuts = [*zip(place[-2:], stored.block, strict=True)]
        blocks = tuple(slice(part.start // size, -(-part.stop // size)) for part, size in cuts)
        if len(parts.shape) == len(stored.shape):
            bits = stored.bits if parts.dtype == "I32" else None
            values = self._numbers(parts, place[:-2] + blocks, bits, axis=-2)
        else:
            # Dimensions of 1 are left out.
            sizes = zip(stored.shape[-2:], stored.block, strict=True)
            grid = tuple(-(-length // size) for length, size in sizes)
            whole = self._read(parts, parts.name, ...).float()
            values = whole.view(stored.shape[:-2] + grid)[place[:-2] + blocks]
        for axis, ((part, size), needed) in enumerate(zip(cuts, blocks, strict=True)):
            of_block = torch.arange(part.start, part.stop) // size - needed.start
            values = values.index_select(axis, of_block)
        return values

    def _numbers(
        self, stored: StoredTensor, place: tuple[Any, ...], bits: int | None, *, axis: int
    ) -> torch.Tensor:
        """A rectangle of numbers in fp32, which may be packed along an axis.

        Args:
            bits: Bits of a number that is packed; None for elements.
        """
        if bits is None:
            return self._read(stored, stored.name, place).float()
        part, count = place[axis], 32 // bits
        words = slice(part.start // count, -(-part.stop // count))
        of_words = [*place]
        of_words[axis] = words
        packed = self._read(stored, stored.name, tuple(of_words)).movedim(axis, -1)
        shifts = torch.arange(0, 32, bits, dtype=torch.int32)
        numbers = packed.unsqueeze(-1) >> shifts
        # In place: there are as many bytes as in the fp32 of the result.
        numbers &= (1 << bits) - 1
        numbers -= 1 << bits - 1
        begin = part.start - words.start * count
        whole = numbers.flatten(-2)[..., begin : begin + part.stop - part.start]
        return whole.movedim(-1, axis).float()

    def fill(
        self, target: torch.Tensor, tensor: MegatronTensor, *, row: int, column: int = 0
    ) -> None:
        """Copy a rectangle of a megatron-core tensor, converted to the dtype of ``target``.

        Args:
            target: [rows, columns] or [rows], on any device; rows beyond the tensor, the padding of
                a vocabulary, become zero.
            tensor: The megatron-core tensor.
            row: First row of ``target`` in ``tensor``.
            column: First column of ``target`` in ``tensor``.
        """
        stop = row + target.shape[0]
        columns = None if target.ndim == 1 else slice(column, column + target.shape[1])
        begin = 0
        for block in tensor.blocks:
            end = begin + block.rows
            first, last = max(row, begin), min(stop, end)
            if first < last:
                source = slice(first - begin, last - begin)
                target[first - row : last - row].copy_(self.rows(block, source, columns))
            begin = end
        if begin < stop:
            target[max(begin - row, 0) :].zero_()

    def _file(self, file: Path) -> Any:
        if file not in self._open:
            self._open[file] = self._stack.enter_context(safe_open(str(file), framework="pt"))
        return self._open[file]


_SHARD: Final = "model-{number:05d}-of-{count:05d}.safetensors"
_METADATA: Final = {"format": "pt"}
"""Metadata that transformers requires."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorPlan:
    """Name, dtype and shape of a tensor to be written."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        """Bytes of the tensor."""
        return prod(self.shape) * self.dtype.itemsize


def shards(plans: Iterable[TensorPlan], *, max_shard_bytes: int) -> list[list[TensorPlan]]:
    """Divide tensors into files in order; only a single tensor may exceed ``max_shard_bytes``."""
    files: list[list[TensorPlan]] = []
    size = 0
    for plan in plans:
        if not files or size + plan.bytes > max_shard_bytes:
            files.append([])
            size = 0
        files[-1].append(plan)
        size += plan.bytes
    return files


def write_checkpoint(
    folder: Path,
    *,
    config: Mapping[str, Any],
    files: list[list[TensorPlan]],
    read: Callable[[list[TensorPlan]], dict[str, torch.Tensor]],
    write_others: Callable[[Path], None],
) -> None:
    """Write a checkpoint for transformers to a temporary folder, and rename it.

    Args:
        folder: New or empty folder.
        config: Contents of ``config.json``.
        files: Tensors of each file.
        read: Function that gives the tensors of one file; they are freed once written.
        write_others: Function that adds the files of tokenizer and generation to a folder.

    Raises:
        CheckpointError: The folder is not empty, or cannot be written.
    """

    def write(part: Path) -> None:
        _write_weights(part, files, read)
        write_json(part / CONFIG_FILE, config)
        write_others(part)

    write_folder(folder, write)


def write_folder(folder: Path, write: Callable[[Path], None]) -> None:
    """Write the files of a folder that appears when it is complete.

    Args:
        folder: New or empty folder.
        write: Function that adds the files to a folder.

    Raises:
        CheckpointError: The folder is not empty, or cannot be written.
    """
    final = Path(os.path.realpath(folder))
    check_target(final)
    with (
        refused_by_system("cannot write the folder", where=final, kind=CheckpointError),
        new_folder(final) as part,
    ):
        write(part)
        flush(*part.rglob("*"), part)
        # Replaces an empty folder, and fails on any other.
        part.rename(final)
        flush(final.parent)


def check_target(folder: Path) -> None:
    """Check that the target of a checkpoint is missing or empty.

    Raises:
        CheckpointError: The folder is not empty.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise CheckpointError(
            "something is there already",
            where=folder,
            got="a folder with files" if folder.is_dir() else "a file",
            fix="name another folder, or remove it",
        )


def _write_weights(
    part: Path,
    files: list[list[TensorPlan]],
    read: Callable[[list[TensorPlan]], dict[str, torch.Tensor]],
) -> None:
    weight_map: dict[str, str] = {}
    for number, plans in enumerate(files, 1):
        name = WEIGHTS_FILE
        if len(files) > 1:
            name = _SHARD.format(number=number, count=len(files))
        save_tensors(read(plans), part / name)
        weight_map |= {plan.name: name for plan in plans}
    if len(files) > 1:
        total = sum(plan.bytes for plans in files for plan in plans)
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        write_json(part / INDEX_FILE, index)


def save_tensors(tensors: dict[str, torch.Tensor], file: Path) -> None:
    """Write tensors to a file with the default permissions of new files."""
    file.touch()
    mode = file.stat().st_mode
    save_file(tensors, file, metadata=_METADATA)
    # safetensors may have replaced the file by one with permissions for its owner alone.
    file.chmod(mode)


def write_json(file: Path, values: Mapping[str, Any]) -> None:
    """Write values as a file of JSON."""
    text = json.dumps(values, indent=2, ensure_ascii=False)
    file.write_text(text + "\n", encoding="utf-8")


def _of_mxfp4(packed: torch.Tensor, exponents: torch.Tensor) -> torch.Tensor:
    """Numbers of MXFP4 in bf16, which has all of them: none is rounded.

    Args:
        packed: [rows, groups, 16] uint8
        exponents: [rows, groups] uint8

    Returns:
        [rows, groups x 32] bf16
    """
    values = torch.tensor(_MAGNITUDES + tuple(-value for value in _MAGNITUDES))
    # Two numbers of each byte, the lower half first.
    halves = torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)
    scale = exponents.to(torch.int32).unsqueeze(-1) - _BIAS
    return torch.ldexp(values[halves.long()], scale).flatten(-2).to(torch.bfloat16)
