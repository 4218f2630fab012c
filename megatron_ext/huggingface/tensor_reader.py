"""Rectangles of tensors out of safetensors files; nothing else of them is read."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from megatron_ext.errors import CheckpointError
from megatron_ext.huggingface.checkpoint_files import CheckpointFiles
from megatron_ext.huggingface.tensor_map import MegatronTensor


class TensorReader:
    """Reads a checkpoint, as a context that keeps its files open.

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

    def rows(self, name: str, rows: slice, columns: slice | None) -> torch.Tensor:
        """Some rows of a tensor, and of these some columns; of a vector some elements.

        Raises:
            CheckpointError: The file cannot be read.
        """
        stored = self._tensors[name]
        try:
            part = self._file(stored.file).get_slice(name)
            found: torch.Tensor = part[rows] if columns is None else part[rows, columns]
        except (SafetensorError, OSError) as error:
            raise CheckpointError(
                f"the tensor {name} cannot be read", where=stored.file, got=error
            ) from error
        return found

    def fill(
        self, target: torch.Tensor, tensor: MegatronTensor, *, row: int, column: int = 0
    ) -> None:
        """Copy a rectangle of a megatron-core tensor, converted to the dtype of ``target``.

        Args:
            target: [rows, columns] or [rows], on any device; what no tensor fills, which is the
                padding of a vocabulary, becomes zero.
            tensor: What it is a part of.
            row: Of ``tensor``, that is the first of ``target``.
            column: Likewise.
        """
        stop = row + target.shape[0]
        columns = None if target.ndim == 1 else slice(column, column + target.shape[1])
        begin = 0
        for block in tensor.blocks:
            end = begin + block.stop - block.start
            first, last = max(row, begin), min(stop, end)
            if first < last:
                source = slice(block.start + first - begin, block.start + last - begin)
                target[first - row : last - row].copy_(self.rows(block.name, source, columns))
            begin = end
        if begin < stop:
            target[max(begin - row, 0) :].zero_()

    def _file(self, file: Path) -> Any:
        if file not in self._open:
            self._open[file] = self._stack.enter_context(safe_open(str(file), framework="pt"))
        return self._open[file]
