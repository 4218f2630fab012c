"""Tensors of one of our checkpoints, by name and layer, without process groups or a model.

``dist_checkpointing`` loads the state of a whole layout, so single layers of tensors are read with
torch's distributed checkpointing, in whose format the files are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from megatron_ext.errors import CheckpointError
from megatron_ext.training.checkpoints.checkpoint import LOADING_ERRORS, checkpoint_lora
from megatron_ext.training.checkpoints.manifest import Manifest
from megatron_ext.training.checkpoints.reader import CheckpointReader, check_format
from megatron_ext.training.configuration.lora import LoraConfig

Place = tuple[int, ...]
"""Layer of a tensor, or layer and expert; empty for a whole tensor."""


class CheckpointSlices:
    """Tensors of a checkpoint, read by name and layer.

    Weights with an adapter are read as they work together, ``W + scale * B A`` in fp32 rounded to
    the dtype of W.

    Args:
        checkpoint: One iteration's folder.
        verify: Check every file against the checkpoint's manifest.

    Raises:
        CheckpointError: It cannot be read, or a file is damaged.
    """

    def __init__(self, checkpoint: Path, *, verify: bool = True) -> None:
        self._checkpoint = checkpoint
        manifest = Manifest.of(checkpoint, verify=verify)
        check_format(manifest)
        self._reader = CheckpointReader(manifest)
        self._metadata: Metadata = self._reader.read_metadata()
        manifest.check()
        self.tensors: Mapping[str, TensorStorageMetadata] = {
            name: stored
            for name, stored in self._metadata.state_dict_metadata.items()
            if isinstance(stored, TensorStorageMetadata)
        }
        self.lora: LoraConfig | None = checkpoint_lora(checkpoint)
        """Adapters of the checkpoint."""

    def adapter(self, name: str, place: Place = ()) -> tuple[torch.Tensor, torch.Tensor] | None:
        """A [R, in] and B [out, R] beside the weight ``name``, of every layer [layers, ...] where
        no place is given; None where it has no adapter.

        Raises:
            CheckpointError: As ``read``.
        """
        stem = name.removesuffix("weight")
        if self.lora is None or f"{stem}lora.a" not in self.tensors:
            return None
        a, b = self._read([(f"{stem}lora.a", place), (f"{stem}lora.b", place)])
        return a, b

    def read(self, wanted: Sequence[tuple[str, Place]]) -> list[torch.Tensor]:
        """Read tensors by name, each whole, or that of one layer, or of one expert of a layer.

        Names must be distinct.

        Raises:
            CheckpointError: A file is missing, or cut short.
        """
        tensors = self._read(wanted)
        for tensor, (name, place) in zip(tensors, wanted, strict=True):
            adapter = self.adapter(name, place)
            if adapter is not None and self.lora is not None:
                add_product(tensor, *adapter, scale=self.lora.scale)
        return tensors

    def _read(self, wanted: Sequence[tuple[str, Place]]) -> list[torch.Tensor]:
        """Tensors as they are stored."""
        targets = _Targets()
        items: list[ReadItem] = []
        try:
            for name, place in wanted:
                stored = self.tensors[name]
                chunk = _chunk(stored, place)
                target = torch.empty(chunk.sizes, dtype=stored.properties.dtype)
                targets.of_chunk[name, chunk.offsets] = target
                items += create_read_items_for_chunk_list(name, stored, [chunk])
            self._reader.set_up_storage_reader(self._metadata, is_coordinator=True)
            self._reader.read_data(LoadPlan(items), targets).wait()
        except (CheckpointError, MemoryError):
            raise
        except LOADING_ERRORS as error:
            raise CheckpointError(
                "the checkpoint cannot be read",
                where=self._checkpoint,
                got=(str(error).splitlines() or [type(error).__name__])[0][:300],
                fix="copy it again: a file of it is missing or cut short",
            ) from error
        return [
            tensor.view(tensor.shape[len(place) :])
            for tensor, (_, place) in zip(targets.of_chunk.values(), wanted, strict=True)
        ]


class _Targets(DefaultLoadPlanner):
    """A load planner that maps what is read to its target tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.of_chunk: dict[tuple[str, torch.Size], torch.Tensor] = {}
        """Target by name and offset in the whole tensor, in order."""

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


def _chunk(stored: TensorStorageMetadata, place: Place) -> ChunkStorageMetadata:
    """The rectangle of a whole tensor, or of one layer or expert of it."""
    offsets, sizes = [0] * len(stored.size), list(stored.size)
    for axis, number in enumerate(place):
        offsets[axis], sizes[axis] = number, 1
    return ChunkStorageMetadata(offsets=torch.Size(offsets), sizes=torch.Size(sizes))


@torch.no_grad()
def add_product(weight: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *, scale: float) -> None:
    """Add ``scale * b @ a`` to ``weight`` in place, in fp32 with one rounding."""
    product = b.float() @ a.float()
    weight.copy_(product.mul_(scale).add_(weight.float()))
