"""Parts of a checkpoint's tensors, read in any one process: no process group, no model.

``dist_checkpointing`` loads what a whole layout asks for. Here one process asks torch's distributed
checkpointing, which the files are written by, for some layers of some tensors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, Final

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from megatron_ext.errors import CheckpointError

_ERRORS: Final = (OSError, EOFError, UnpicklingError, RuntimeError, KeyError, CheckpointException)


class CheckpointSlices:
    """Reads a checkpoint's tensors.

    Args:
        checkpoint: One iteration's folder.

    Raises:
        CheckpointError: It cannot be read.
    """

    def __init__(self, checkpoint: Path) -> None:
        self._checkpoint = checkpoint
        self._reader = FileSystemReader(str(checkpoint))
        try:
            self._metadata: Metadata = self._reader.read_metadata()
        except _ERRORS as error:
            raise self._error(error) from error
        self.tensors: Mapping[str, TensorStorageMetadata] = {
            name: stored
            for name, stored in self._metadata.state_dict_metadata.items()
            if isinstance(stored, TensorStorageMetadata)
        }

    def read(self, wanted: Sequence[tuple[str, int | None]]) -> list[torch.Tensor]:
        """Tensors by name, each whole, or one layer of it where layers are stacked; none twice.

        Raises:
            CheckpointError: A file is missing, or cut short.
        """
        targets = _Targets()
        items: list[ReadItem] = []
        for name, layer in wanted:
            stored = self.tensors[name]
            chunk = _chunk(stored, layer)
            target = torch.empty(chunk.sizes, dtype=stored.properties.dtype)
            targets.of_chunk[name, chunk.offsets] = target
            items += create_read_items_for_chunk_list(name, stored, [chunk])
        try:
            self._reader.set_up_storage_reader(self._metadata, is_coordinator=True)
            self._reader.read_data(LoadPlan(items), targets).wait()
        except _ERRORS as error:
            raise self._error(error) from error
        return [
            tensor if layer is None else tensor.squeeze(0)
            for tensor, (_, layer) in zip(targets.of_chunk.values(), wanted, strict=True)
        ]

    def _error(self, error: BaseException) -> CheckpointError:
        return CheckpointError(
            "the checkpoint cannot be read",
            where=self._checkpoint,
            got=(str(error).splitlines() or [type(error).__name__])[0][:300],
            fix="copy it again: a file of it is missing or cut short",
        )


class _Targets(LoadPlanner):
    """Says where what is read goes."""

    def __init__(self) -> None:
        self.of_chunk: dict[tuple[str, torch.Size], torch.Tensor] = {}
        """By name, and where in the whole tensor it begins; in order."""

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        """The rectangle of a target that an item is read to."""
        index = read_item.dest_index
        assert index.offset is not None, "items are made of chunks"
        tensor = self.of_chunk[index.fqn, index.offset]
        for axis, (start, length) in enumerate(
            zip(read_item.dest_offsets, read_item.lengths, strict=True)
        ):
            tensor = tensor.narrow(axis, start, length)
        return tensor

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        """Nothing more: it was read in place."""

    def set_up_planner(
        self, state_dict: Any, metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        """Nothing: plans are made beforehand."""

    def create_local_plan(self) -> LoadPlan:
        """Never asked for."""
        raise AssertionError("the plan is made beforehand")

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        """Never asked for."""
        raise AssertionError("the plan is made beforehand")

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        """Never asked for."""
        raise AssertionError("the plan is made beforehand")

    def load_bytes(self, read_item: ReadItem, value: Any) -> None:
        """Never asked for."""
        raise AssertionError("only tensors are read")


def _chunk(stored: TensorStorageMetadata, layer: int | None) -> ChunkStorageMetadata:
    """All of a tensor, or one layer of it."""
    offsets, sizes = [0] * len(stored.size), list(stored.size)
    if layer is not None:
        offsets[0], sizes[0] = layer, 1
    return ChunkStorageMetadata(offsets=torch.Size(offsets), sizes=torch.Size(sizes))
