"""Segments of a GPU's memory, between two processes that see this GPU.

The handles are those that torch's own multiprocessing passes on, as plain values. A segment is
described once and used for many answers, so opening it costs nothing later.

Source: torch/multiprocessing/reductions.py; CUDA's documentation of cudaIpcGetMemHandle.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.multiprocessing.reductions import rebuild_cuda_tensor, reduce_tensor

from megatron_ext.teachers.serving.channels.segment import Segment


class CudaIpcChannel:
    """Needs CUDA on both sides."""

    def create(self, size: int, device: torch.device) -> Segment:
        """See ``Channel``."""
        memory = torch.empty(size, dtype=torch.uint8, device=device)
        _, arguments = reduce_tensor(memory)
        handle, storage_bytes, storage_offset = arguments[7:10]
        counter, counter_offset, event, needs_event = arguments[11:15]
        description = {
            "device": _identity(device),
            "size": size,
            "handle": handle.hex(),
            "storage_bytes": storage_bytes,
            "storage_offset": storage_offset,
            "counter": counter.hex(),
            "counter_offset": counter_offset,
            "event": event.hex(),
            "needs_event": needs_event,
        }
        return Segment(memory, description)

    def open(self, description: Mapping[str, Any], device: torch.device) -> torch.Tensor:
        """See ``Channel``; the memory is on its owner's device, which may be another than ours."""
        # Processes number their GPUs each in its own way.
        visible = range(torch.cuda.device_count())
        found = [index for index in visible if _identity(index) == description["device"]]
        if not found:
            raise OSError("this process does not see the device")
        memory: torch.Tensor = rebuild_cuda_tensor(
            torch.Tensor,
            (int(description["size"]),),
            (1,),
            0,
            torch.storage.TypedStorage,
            torch.uint8,
            found[0],
            bytes.fromhex(description["handle"]),
            int(description["storage_bytes"]),
            int(description["storage_offset"]),
            False,
            bytes.fromhex(description["counter"]),
            int(description["counter_offset"]),
            bytes.fromhex(description["event"]),
            bool(description["needs_event"]),
        )
        return memory


def _identity(device: torch.device | int) -> str:
    return str(torch.cuda.get_device_properties(device).uuid)
