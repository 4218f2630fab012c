"""Channels for targets: a GPU's memory, main memory, or the connection.

Which one a student and a server have in common is tried with a few bytes, not guessed. Between two
processes that see one GPU the handles are those that torch's own multiprocessing passes on, as
plain values. A segment is described once and used for many answers, so opening it costs nothing
later.

Source: torch/multiprocessing/reductions.py; CUDA's documentation of cudaIpcGetMemHandle.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, Final

import torch
from torch.multiprocessing.reductions import rebuild_cuda_tensor, reduce_tensor

from megatron_ext.teachers.shared_segments import Channel, Segment, SharedMemoryChannel
from megatron_ext.teachers.target_form import TargetForm


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


FLIGHT: Final = "flight"
"""What is there without any channel: targets go through the connection."""

CHANNELS: Final[Mapping[str, Channel]] = {
    "cuda_ipc": CudaIpcChannel(),
    "shared_memory": SharedMemoryChannel(),
}
"""The best first."""

_PROBE_BYTES: Final = 64


class ChannelOffers:
    """A server's: a segment of each channel with random bytes in it, until a student has chosen.

    Args:
        device: The server's.
    """

    def __init__(self, form: TargetForm, device: torch.device) -> None:
        self._probes: dict[str, Segment] = {}
        self.values: dict[str, Any] = {}
        for name, channel in CHANNELS.items():
            # Other forms than hidden states are records, which are made in main memory.
            if name == "cuda_ipc" and (device.type != "cuda" or form.kind != "hidden"):
                continue
            try:
                probe = channel.create(_PROBE_BYTES, device)
            except (OSError, RuntimeError):
                continue
            content = os.urandom(_PROBE_BYTES)
            probe.memory.copy_(torch.frombuffer(bytearray(content), dtype=torch.uint8))
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            self._probes[name] = probe
            self.values[name] = {"segment": dict(probe.description), "content": content.hex()}


def choose(offers: Mapping[str, Any], device: torch.device) -> str:
    """The best channel that works from here; ``FLIGHT`` where none does.

    Args:
        offers: ``ChannelOffers.values``.
        device: Where targets are needed.
    """
    for name, channel in CHANNELS.items():
        if name not in offers or (name == "cuda_ipc" and device.type != "cuda"):
            continue
        try:
            memory = channel.open(offers[name]["segment"], device)
            if memory.cpu().numpy().tobytes().hex() == offers[name]["content"]:
                return name
        except (OSError, RuntimeError, KeyError, ValueError, TypeError):
            continue
    return FLIGHT
